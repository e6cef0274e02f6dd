"""The denoising loop as one persistent launch: all steps, all blocks, from noise to the last estimate.

At batch 1 a step streams the weights of every block past a few dozen rows, so bytes decide.  As separate kernels each
product starts with an idle memory and ends with a tail; here one program per multiprocessor stays for the whole loop.  A
step is a row of phases, and all programs wait for each other in between (`_everyone`):

    input   x = [state, estimate] W                          split along k
    qkv     (x c) W / rms(x) + bias                          per block, from here
    out     x += gate * attention(qkv) W                     split by heads, attention recomputed by every tile of columns
    up      gelu((x c) W / rms(x) + bias)
    down    x += gate * (up W + bias)                        split along k
    output  estimate = (x c) W / rms(x), then the sampler's update    split along k

Who adds to the residual stream x (float32) also writes what the next product reads: x times that norm's column factor, and
the sum of squares of its columns.  So no product has a normalisation in its loop, and rms(x) is one factor at its end.
Where a product is split, partial sums go to memory, and once all parts of a tile are there (`done`) programs add up a few
rows of it each, always in the same order: results do not depend on who was first.

Before a program waits, it asks for the weights that it will read first in the next phase (`_ask_for`), so that memory goes on working.
Nothing here is specific to a GPU generation; the bulk prefetch needs sm_90 or later.  With one program, and without
prefetch, the same source runs in Triton's interpreter on a CPU, which is how CI tests it (tests/kernels/test_triton.py).
Left out: guidance (two evaluations a step), the latent decoder and the token decoder.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)
CHUNK = tl.constexpr(1024)


# Waiting


@triton.jit
def _signal(counter):
    """Everything this program has written is visible to whoever sees the counter move."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _wait(counter, target):
    while tl.atomic_add(counter, 0, sem="acquire") < target:
        pass
    tl.debug_barrier()


@triton.jit
def _stamp(clock, phase, moment, pid, PROGRAMS: tl.constexpr, PROFILE: tl.constexpr):
    """clock[phase, pid, moment] = cycles of this multiprocessor, when the kernel is compiled to be looked into."""
    if PROFILE:
        tl.debug_barrier()
        now = tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [pid], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(clock + (phase * PROGRAMS + pid) * 3 + moment, now)


@triton.jit
def _everyone(counter, phase, clock, pid, PROGRAMS: tl.constexpr, PROFILE: tl.constexpr):
    """Wait until all programs have finished `phase` phases."""
    _stamp(clock, phase - 1, 2, pid, PROGRAMS, PROFILE)
    _signal(counter)
    _wait(counter, phase * PROGRAMS)
    _stamp(clock, phase, 0, pid, PROGRAMS, PROFILE)


@triton.jit
def _begin(tile, SPAN: tl.constexpr, BLOCK_K: tl.constexpr, STAGGER: tl.constexpr):
    """The piece of its part of k that the product of this tile begins with."""
    if STAGGER == 0:
        return 0
    return tile * STAGGER % (SPAN // BLOCK_K)


@triton.jit
def _ask_for(
    weights, pid, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGGER: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Request into L2 the first BYTES of what this program reads first in a product; returns at once.

    Not more: what a phase reads may be several times L2, and would then be read from memory twice.
    """
    row: tl.constexpr = BLOCK_N * (weights.dtype.element_ty.primitive_bitwidth // 8)
    piece: tl.constexpr = K // SPLIT * row
    pieces: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N * SPLIT
    if BYTES > 0:
        if pid < pieces:
            # one thread asks for everything: operands are uniform registers, so threads would take turns, in front of a barrier
            begin = _begin(pid // SPLIT, K // SPLIT, BLOCK_K, STAGGER) * (BLOCK_K * row)
            at = weights.to(tl.int64) + pid.to(tl.int64) * piece + begin
            tl.inline_asm_elementwise(
                "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
                "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
                "=r,l,r", [at, tl.minimum(piece - begin, BYTES)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


# Products


@triton.jit
def _product(
    acc, a, a_stride, w, row0, first_k, begin, ROWS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc + a[row0:, first_k:first_k + SPAN] @ the same rows of w, one packed tile: from piece `begin` on, then round.

    Programs that begin at different pieces do not all ask for the same lines of `a` at the same moment.
    """
    rows = row0 + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    pieces: tl.constexpr = SPAN // BLOCK_K
    turns = pieces + (tl.program_id(0) >> 24)  # so that the assembler does not know it, and does not unroll
    for turn in tl.range(turns, num_stages=STAGES):
        k = first_k + (begin + turn) % pieces * BLOCK_K
        x = tl.load(a + rows[:, None] * a_stride + (k + inner)[None, :], mask=(rows < ROWS)[:, None], other=0.0)
        y = tl.load(w + (k + inner)[:, None] * BLOCK_N + columns[None, :])
        acc = tl.dot(x, y.to(x.dtype), acc, input_precision="ieee")
    return acc


@triton.jit
def _squares(squares, row0, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):
    """The sums of squares that the writers of the residual stream left, one for each of their tiles of columns."""
    part, rows = tl.arange(0, triton.next_power_of_2(PARTS)), row0 + tl.arange(0, BLOCK_M)
    mask = (part < PARTS)[:, None] & (rows < ROWS)[None, :]
    return tl.load(squares + part[:, None] * ROWS + rows[None, :], mask=mask, other=0.0)


@triton.jit
def _inverse_rms(squares, D: tl.constexpr):
    """1 / rms of the rows."""
    return tl.rsqrt(tl.sum(squares, axis=0) / D + EPSILON)


@triton.jit
def _scaled(acc, scale, index, N: tl.constexpr, BLOCK_N: tl.constexpr, QUANTISED: tl.constexpr):
    """Quantised weights have one scale per column, applied to the finished sum."""
    if QUANTISED:
        columns = index * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = acc * tl.load(scale + columns, mask=columns < N, other=0.0)[None, :]
    return acc


@triton.jit
def _normed_product(
    target, a, w, scale, bias, squares, pid,
    ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, GELU: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, STAGGER: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """target = act(a @ w / rms(x) + bias), where a is x times the norm's factor."""
    row_tiles: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for item in range(pid, row_tiles * tiles, PROGRAMS):
        row0, tile = (item % row_tiles) * BLOCK_M, item // row_tiles
        parts = _squares(squares, row0, ROWS, BLOCK_M, PARTS)  # here, to arrive beside the product's first operands
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = _product(
            acc, a, D, w + tile * D * BLOCK_N, row0, 0, _begin(tile, D, BLOCK_K, STAGGER), ROWS, D,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        acc = _scaled(acc, scale, tile, N, BLOCK_N, QUANTISED)
        rows, columns = row0 + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        y = acc * _inverse_rms(parts, D)[:, None]
        y += tl.load(bias + columns, mask=inside, other=0.0)[None, :]
        if GELU:  # tanh approximation, as jax.nn.gelu; 0.5 (1 + tanh(u)) = sigmoid(2u)
            y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
        mask = (rows < ROWS)[:, None] & inside[None, :]
        tl.store(target + rows[:, None] * N + columns[None, :], y.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _split_product(
    partial, done, a, w, scale, pid,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, STAGGER: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    """partial[split] = a @ w over that part of k; done[tile] counts the parts that are there."""
    row_tiles: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for item in range(pid, row_tiles * tiles * SPLIT, PROGRAMS):
        split, cell = item % SPLIT, item // SPLIT
        row0, tile = (cell % row_tiles) * BLOCK_M, cell // row_tiles
        first = split * (K // SPLIT)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = _product(
            acc, a, K, w + tile * K * BLOCK_N, row0, first, _begin(tile, K // SPLIT, BLOCK_K, STAGGER), ROWS, K // SPLIT,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        acc = _scaled(acc, scale, tile, N, BLOCK_N, QUANTISED)
        _store_partial(partial, acc, split, row0, tile, ROWS, N, BLOCK_M, BLOCK_N)
        _signal(done + cell)


@triton.jit
def _store_partial(
    partial, acc, split, row0, tile, ROWS: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows, columns = row0 + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < ROWS)[:, None] & (columns < N)[None, :]
    tl.store(partial + (split * ROWS + rows)[:, None] * N + columns[None, :], acc, mask=mask)


@triton.jit
def _sum_of_partials(partial, rows, columns, mask, D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    at = partial + rows[:, None] * D + columns[None, :]
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLIT):
        total += tl.load(at + split * ROWS * D, mask=mask, other=0.0)
    return total


@triton.jit
def _add_to_stream(
    x, a, squares, partial, done, turn, gate, bias, factor, pid,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ADD_M: tl.constexpr,
    KIND: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """x = sum (KIND 0), x += gate * sum (1) or x += gate * (sum + bias) (2), with what the next product needs."""
    row_tiles: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    for item in range(pid, row_tiles * tiles * (BLOCK_M // ADD_M), PROGRAMS):
        cell, rows, columns = _rows_and_columns(item, row_tiles, BLOCK_M, BLOCK_N, ADD_M)
        _wait(done + cell, turn * SPLIT)
        inside = columns < D
        mask = (rows < ROWS)[:, None] & inside[None, :]
        value = _sum_of_partials(partial, rows, columns, mask, D, ROWS, SPLIT)
        at = rows[:, None] * D + columns[None, :]
        if KIND == 2:
            value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        if KIND != 0:
            value = (
                tl.load(x + at, mask=mask, other=0.0) + value * tl.load(gate + columns, mask=inside, other=0.0)[None, :]
            )
        tl.store(x + at, value, mask=mask)
        scaled = value * tl.load(factor + columns, mask=inside, other=0.0)[None, :]
        tl.store(a + at, scaled.to(a.dtype.element_ty), mask=mask)
        part = cell // row_tiles
        tl.store(squares + part * ROWS + rows, tl.sum(value * value, axis=1), mask=rows < ROWS)
        if tiles < PARTS and part == 0:  # other products that write x have more tiles
            for unused in tl.static_range(tiles, PARTS):
                tl.store(squares + unused * ROWS + rows, tl.zeros([ADD_M], tl.float32), mask=rows < ROWS)


@triton.jit
def _rows_and_columns(item, row_tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ADD_M: tl.constexpr):
    """Item -> tile of a product as its items count them, and which ADD_M of its rows; these fastest."""
    groups: tl.constexpr = BLOCK_M // ADD_M
    cell = item // groups
    rows = (cell % row_tiles) * BLOCK_M + item % groups * ADD_M + tl.arange(0, ADD_M)
    return cell, rows, (cell // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _update_state(
    estimate, z, pair, squares, partial, done, turn, noise, update, pid,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ADD_M: tl.constexpr,
    FRESH_NOISE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """estimate = sum / rms(x); z = update @ (z, estimate, noise); pair = [z, estimate] for the next step's input."""
    row_tiles: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    for item in range(pid, row_tiles * tiles * (BLOCK_M // ADD_M), PROGRAMS):
        cell, rows, columns = _rows_and_columns(item, row_tiles, BLOCK_M, BLOCK_N, ADD_M)
        row0 = (cell % row_tiles) * BLOCK_M + item % (BLOCK_M // ADD_M) * ADD_M
        inverse = _inverse_rms(_squares(squares, row0, ROWS, ADD_M, PARTS), D)
        _wait(done + cell, turn * SPLIT)
        mask = (rows < ROWS)[:, None] & (columns < D)[None, :]
        x0 = _sum_of_partials(partial, rows, columns, mask, D, ROWS, SPLIT) * inverse[:, None]
        at = rows[:, None] * D + columns[None, :]
        state = tl.load(update) * tl.load(z + at, mask=mask, other=0.0) + tl.load(update + 1) * x0
        if FRESH_NOISE:
            state += tl.load(update + 2) * tl.load(noise + at, mask=mask, other=0.0)
        tl.store(estimate + at, x0, mask=mask)
        tl.store(z + at, state, mask=mask)
        both = rows[:, None] * (2 * D) + columns[None, :]
        tl.store(pair + both, state.to(pair.dtype.element_ty), mask=mask)
        tl.store(pair + both + D, x0.to(pair.dtype.element_ty), mask=mask)


# Attention


@triton.jit
def _rotated(
    qkv, rows, gain, cos, sin, offset, scale,
    ROWS: tl.constexpr, LATENTS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Both halves of normalised, rotated queries or keys of one head, times `scale`."""
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, half)
    mask = (rows < ROWS)[:, None]
    at = qkv + rows[:, None] * (3 * D) + offset + i[None, :]
    low, high = (
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + half, mask=mask, other=0.0).to(tl.float32),
    )
    inverse = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM + EPSILON) * scale
    low = low * inverse[:, None] * tl.load(gain + i).to(tl.float32)[None, :]
    high = high * inverse[:, None] * tl.load(gain + half + i).to(tl.float32)[None, :]
    turn = (rows % LATENTS)[:, None] * half + i[None, :]
    c, s = tl.load(cos + turn), tl.load(sin + turn)
    kind = qkv.dtype.element_ty
    return (low * c - high * s).to(kind), (low * s + high * c).to(kind)


@triton.jit
def _attend(
    qkv, head, q_gain, k_gain, cos, sin, row0,
    ROWS: tl.constexpr, LATENTS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Attention of one head for BLOCK_M rows, each within its own sequence of LATENTS rows; softmax accumulated online."""
    rows = row0 + tl.arange(0, BLOCK_M)
    offset = head * HEAD_DIM
    q_low, q_high = _rotated(
        qkv, rows, q_gain, cos, sin, offset, HEAD_DIM**-0.5 * 1.4426950408889634, ROWS, LATENTS, D, HEAD_DIM
    )
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    sequence = rows // LATENTS
    first = row0 // LATENTS * LATENTS
    last = tl.minimum(((row0 + BLOCK_M - 1) // LATENTS + 1) * LATENTS, ROWS)
    for key0 in tl.range(first, last, BLOCK_KEYS, num_stages=1):
        keys = key0 + tl.arange(0, BLOCK_KEYS)
        k_low, k_high = _rotated(qkv, keys, k_gain, cos, sin, D + offset, 1.0, ROWS, LATENTS, D, HEAD_DIM)
        scores = tl.dot(q_low, tl.trans(k_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="ieee")
        seen = (keys < last)[None, :] & ((keys // LATENTS)[None, :] == sequence[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_high = tl.maximum(high, tl.max(scores, axis=1))
        safe = tl.where(new_high == float("-inf"), 0.0, new_high)
        weights, shrink = tl.exp2(scores - safe[:, None]), tl.exp2(high - safe)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(
            qkv + keys[:, None] * (3 * D) + 2 * D + offset + tl.arange(0, HEAD_DIM)[None, :],
            mask=(keys < ROWS)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        high = new_high
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attention_product(
    partial, done, qkv, w, scale, q_gain, k_gain, cos, sin, pid,
    ROWS: tl.constexpr, LATENTS: tl.constexpr, D: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """partial[split] = attention of that part of the heads @ their rows of w."""
    row_tiles: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    heads: tl.constexpr = D // HEAD_DIM // SPLIT
    for item in range(pid, row_tiles * tiles * SPLIT, PROGRAMS):
        split, cell = item % SPLIT, item // SPLIT
        row0, tile = (cell % row_tiles) * BLOCK_M, cell // row_tiles
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.range(heads, num_stages=1):
            head = split * heads + i
            inner = head * HEAD_DIM + tl.arange(0, HEAD_DIM)
            y = tl.load(w + (tile * D + inner)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :])
            mixed = _attend(qkv, head, q_gain, k_gain, cos, sin, row0, ROWS, LATENTS, D, HEAD_DIM, BLOCK_M, BLOCK_KEYS)
            kind = qkv.dtype.element_ty
            acc = tl.dot(mixed.to(kind), y.to(kind), acc, input_precision="ieee")
        acc = _scaled(acc, scale, tile, D, BLOCK_N, QUANTISED)
        _store_partial(partial, acc, split, row0, tile, ROWS, D, BLOCK_M, BLOCK_N)
        _signal(done + cell)


# The loop


@triton.jit
def denoise_loop(
    w_input, w_qkv, w_out, w_up, w_down, w_output,
    s_input, s_qkv, s_out, s_up, s_down, s_output,
    q_gain, k_gain, b_down, cos, sin,
    factor, gate, bias_qkv, bias_up, update, noise, z_start, steps,
    estimate, z, pair, x, a, squares, qkv, hidden, partial, everyone, done, clock,
    ROWS: tl.constexpr, LATENTS: tl.constexpr, D: tl.constexpr, FFN: tl.constexpr, DEPTH: tl.constexpr,
    HEAD_DIM: tl.constexpr, INPUT_N: tl.constexpr, INPUT_SPLIT: tl.constexpr, QKV_N: tl.constexpr, OUT_N: tl.constexpr,
    OUT_SPLIT: tl.constexpr, UP_N: tl.constexpr, DOWN_N: tl.constexpr, DOWN_SPLIT: tl.constexpr, OUTPUT_N: tl.constexpr,
    OUTPUT_SPLIT: tl.constexpr, CELLS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_KEYS: tl.constexpr, PARTS: tl.constexpr,
    INPUT_ADD_M: tl.constexpr, OUT_ADD_M: tl.constexpr, DOWN_ADD_M: tl.constexpr, OUTPUT_ADD_M: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
    STAGGER: tl.constexpr, FRESH_NOISE: tl.constexpr, QUANTISED: tl.constexpr, PROFILE: tl.constexpr,
):  # fmt: skip
    """`estimate` after `steps` steps from `z_start`, both (rows, d) float32; the other outputs are scratch.

    Weights are packed (packing.py) with scales (blocks, n); gains (blocks, head_dim), b_down (blocks, d); cos and sin
    (latents, head_dim / 2); factor, gate, bias_qkv, bias_up, update as in tables.StepTables; noise (steps, rows, d).
    `everyone` (1) and `done` (4, cells) are int32 counters that start at zero.  With PROFILE, clock (phases, programs, 3) gets
    the cycle (modulo 2^32) at which each program began a phase, had its product, and was through.
    """
    pid = tl.program_id(0)
    norms: tl.constexpr = 2 * DEPTH + 1
    qkv_size: tl.constexpr = D * ((3 * D + QKV_N - 1) // QKV_N * QKV_N)
    out_size: tl.constexpr = D * ((D + OUT_N - 1) // OUT_N * OUT_N)
    up_size: tl.constexpr = D * ((FFN + UP_N - 1) // UP_N * UP_N)
    down_size: tl.constexpr = FFN * ((D + DOWN_N - 1) // DOWN_N * DOWN_N)
    phase = 0

    for start in range(pid * CHUNK, ROWS * D, PROGRAMS * CHUNK):
        at = start + tl.arange(0, CHUNK)
        state = tl.load(z_start + at, mask=at < ROWS * D, other=0.0)
        both = (at // D) * (2 * D) + at % D
        tl.store(z + at, state, mask=at < ROWS * D)
        tl.store(pair + both, state.to(pair.dtype.element_ty), mask=at < ROWS * D)
        tl.store(pair + both + D, tl.zeros_like(state).to(pair.dtype.element_ty), mask=at < ROWS * D)
    _ask_for(w_input, pid, 2 * D, D, INPUT_N, INPUT_SPLIT, BLOCK_K, STAGGER, PREFETCH)
    phase += 1
    _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)

    for step in range(steps):
        _split_product(
            partial, done, pair, w_input, s_input, pid,
            ROWS, 2 * D, D, INPUT_N, INPUT_SPLIT, PROGRAMS, BLOCK_M, BLOCK_K, STAGES, STAGGER, QUANTISED,
        )  # fmt: skip
        _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
        _ask_for(w_qkv, pid, D, 3 * D, QKV_N, 1, BLOCK_K, STAGGER, PREFETCH)
        _add_to_stream(
            x, a, squares, partial, done, step + 1, gate, b_down, factor + step * norms * D, pid,
            ROWS, D, INPUT_N, INPUT_SPLIT, INPUT_ADD_M, 0, PROGRAMS, BLOCK_M, PARTS,
        )  # fmt: skip
        phase += 1
        _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)

        block_qkv, block_out, block_up, block_down = w_qkv, w_out, w_up, w_down
        for block in range(DEPTH):
            here = step * DEPTH + block

            _normed_product(
                qkv, a, block_qkv, s_qkv + block * 3 * D, bias_qkv + here * 3 * D, squares, pid,
                ROWS, D, 3 * D, QKV_N, False, PROGRAMS, BLOCK_M, BLOCK_K, PARTS, STAGES, STAGGER, QUANTISED,
            )  # fmt: skip
            _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
            _ask_for(block_out, pid, D, D, OUT_N, OUT_SPLIT, BLOCK_K, 0, PREFETCH)
            phase += 1
            _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)

            _attention_product(
                partial, done + CELLS, qkv, block_out, s_out + block * D, q_gain + block * HEAD_DIM,
                k_gain + block * HEAD_DIM, cos, sin, pid,
                ROWS, LATENTS, D, HEAD_DIM, OUT_N, OUT_SPLIT, PROGRAMS, BLOCK_M, BLOCK_KEYS, QUANTISED,
            )  # fmt: skip
            _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
            _ask_for(block_up, pid, D, FFN, UP_N, 1, BLOCK_K, STAGGER, PREFETCH)
            _add_to_stream(
                x, a, squares, partial, done + CELLS, here + 1, gate + 2 * here * D, b_down,
                factor + (step * norms + 2 * block + 1) * D, pid,
                ROWS, D, OUT_N, OUT_SPLIT, OUT_ADD_M, 1, PROGRAMS, BLOCK_M, PARTS,
            )  # fmt: skip
            phase += 1
            _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)

            _normed_product(
                hidden, a, block_up, s_up + block * FFN, bias_up + here * FFN, squares, pid,
                ROWS, D, FFN, UP_N, True, PROGRAMS, BLOCK_M, BLOCK_K, PARTS, STAGES, STAGGER, QUANTISED,
            )  # fmt: skip
            _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
            _ask_for(block_down, pid, FFN, D, DOWN_N, DOWN_SPLIT, BLOCK_K, STAGGER, PREFETCH)
            phase += 1
            _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)

            _split_product(
                partial, done + 2 * CELLS, hidden, block_down, s_down + block * D, pid,
                ROWS, FFN, D, DOWN_N, DOWN_SPLIT, PROGRAMS, BLOCK_M, BLOCK_K, STAGES, STAGGER, QUANTISED,
            )  # fmt: skip
            _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
            if block + 1 < DEPTH:
                _ask_for(block_qkv + qkv_size, pid, D, 3 * D, QKV_N, 1, BLOCK_K, STAGGER, PREFETCH)
            else:
                _ask_for(w_output, pid, D, D, OUTPUT_N, OUTPUT_SPLIT, BLOCK_K, STAGGER, PREFETCH)
            _add_to_stream(
                x, a, squares, partial, done + 2 * CELLS, here + 1, gate + (2 * here + 1) * D, b_down + block * D,
                factor + (step * norms + 2 * block + 2) * D, pid,
                ROWS, D, DOWN_N, DOWN_SPLIT, DOWN_ADD_M, 2, PROGRAMS, BLOCK_M, PARTS,
            )  # fmt: skip
            phase += 1
            _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)
            block_qkv, block_out = block_qkv + qkv_size, block_out + out_size
            block_up, block_down = block_up + up_size, block_down + down_size

        _split_product(
            partial, done + 3 * CELLS, a, w_output, s_output, pid,
            ROWS, D, D, OUTPUT_N, OUTPUT_SPLIT, PROGRAMS, BLOCK_M, BLOCK_K, STAGES, STAGGER, QUANTISED,
        )  # fmt: skip
        _stamp(clock, phase, 1, pid, PROGRAMS, PROFILE)
        _ask_for(w_input, pid, 2 * D, D, INPUT_N, INPUT_SPLIT, BLOCK_K, STAGGER, PREFETCH)
        _update_state(
            estimate, z, pair, squares, partial, done + 3 * CELLS, step + 1, noise + step * ROWS * D, update + 3 * step,
            pid, ROWS, D, OUTPUT_N, OUTPUT_SPLIT, OUTPUT_ADD_M, FRESH_NOISE, PROGRAMS, BLOCK_M, PARTS,
        )  # fmt: skip
        phase += 1
        _everyone(everyone, phase, clock, pid, PROGRAMS, PROFILE)
