"""Norms, rotations, attention and stacks of blocks."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdllm.model.layers import FeedForward, RMSNorm, SelfAttention, attend, rms_norm, rotary, run_stack, stack

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 16)), jnp.float32)


def test_rms_norm_has_unit_root_mean_square_whatever_the_scale():
    for scale in (0.1, 1.0, 1e4):
        np.testing.assert_allclose(jnp.square(rms_norm(scale * X)).mean(-1), 1.0, rtol=1e-3)
    np.testing.assert_allclose(rms_norm(X, jnp.full(16, 3.0)), 3 * rms_norm(X), rtol=1e-6)


def test_rms_norm_is_exact_in_bfloat16_up_to_the_last_rounding():
    low = X.astype(jnp.bfloat16)
    assert rms_norm(low).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rms_norm(low), rms_norm(low.astype(jnp.float32)).astype(jnp.bfloat16))


def test_rotated_products_depend_on_the_distance_alone():
    q, k = (jnp.tile(row, (1, 9, 1, 1)) for row in np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)))
    scores = jnp.einsum("bnhc,bmhc->nm", rotary(q), rotary(k))
    for distance in range(-8, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(jnp.square(rotary(q)).sum(-1), jnp.square(q).sum(-1), rtol=1e-5)


def test_attention_is_the_softmax_average_and_does_not_see_keys_beyond_the_length():
    q, k, v = np.random.default_rng(2).normal(size=(3, 2, 5, 2, 4)).astype(np.float32)
    lengths = np.array([3, 5])
    out = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        for head in range(2):
            scores = q[row, :, head] @ k[row, :length, head].T / 4**0.5
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            wanted = weights @ v[row, :length, head]
            np.testing.assert_allclose(out[row, :, 4 * head : 4 * head + 4], wanted, rtol=1e-5, atol=1e-6)
    spoilt = [np.where(np.arange(5)[None, :, None, None] < lengths[:, None, None, None], x, 1e3) for x in (k, v)]
    np.testing.assert_array_equal(attend(jnp.asarray(q), *map(jnp.asarray, spoilt), jnp.asarray(lengths)), out)


def test_a_stack_is_its_blocks_in_turn_and_they_differ_from_the_start():
    blocks = stack(lambda rngs: FeedForward(16, 2, out_scale=1.0, rngs=rngs), 3, nnx.Rngs(0))
    graphdef, weights = nnx.split(blocks)
    x = X
    for index in range(3):
        x = nnx.merge(graphdef, jax.tree.map(lambda leaf, index=index: leaf[index], weights))(x)
    np.testing.assert_allclose(run_stack(blocks, X, walk="scan"), x, rtol=1e-5, atol=1e-6)
    kernels = blocks.up.kernel[...]
    assert kernels.shape == (3, 16, 32) and not np.allclose(kernels[0], kernels[1])
    np.testing.assert_allclose(kernels.std(axis=(1, 2)), 16**-0.5, rtol=0.2)  # fan-in of one block, not of the stack


def test_how_a_stack_is_walked_changes_no_gradient():
    blocks = stack(lambda rngs: SelfAttention(16, 8, out_scale=1.0, rngs=rngs), 2, nnx.Rngs(0))
    graphdef, weights = nnx.split(blocks)

    def grad(walk):
        loss = lambda w: jnp.square(run_stack(nnx.merge(graphdef, w), X, walk=walk)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(weights)

    scanned = jax.tree.leaves(grad("scan"))
    for walk in ("unroll", "remat"):
        for a, b in zip(scanned, jax.tree.leaves(grad(walk))):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_self_attention_knows_the_order():
    attention = SelfAttention(16, 8, out_scale=1.0, rngs=nnx.Rngs(0))
    order = jnp.array([2, 0, 1, 5, 4, 3])
    assert not np.allclose(attention(X[:, order]), attention(X)[:, order], atol=1e-3)


def test_a_gain_is_a_weight():
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(RMSNorm(5), nnx.Param))] == [(5,)]
