"""What JAX hands to a GPU for the fused loop, as far as it can be seen without one: traced, compiled for sm_90, lowered.

jax-triton describes a launch in classes of JAX's CUDA plugin.  A recorder stands in for them, so that no plugin is needed
and the test sees the launch.  It all happens in a process of its own, since here Triton interprets (conftest.py).
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jaxlib import gpu_triton

from jdllm.config import preset
from jdllm.kernels import fused
from jdllm.kernels.packing import PackedMatrix
from jdllm.kernels.tables import StepTables
from jdllm.kernels.tiling import tiling

MISSING = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]


class Recorder:
    """Any description of a launch or of a part of it: keeps what it was made of."""

    last = None

    def __init__(self, *given):
        self.given = given

    def to_proto(self, name, metadata):
        Recorder.last = self
        return b""


def lowered_launch(steps):
    """Grid, parameters, warps, shared memory and code of a launch with two blocks on four programs."""
    gpu_triton.TritonKernel = gpu_triton.TritonKernelCall = Recorder
    gpu_triton.create_array_parameter = lambda zeroed, alignment: ("array", zeroed)
    gpu_triton.create_scalar_parameter = lambda value, kind: (kind, value)
    gpu_triton.get_compute_capability = lambda device: 90
    gpu_triton.get_serialized_metadata = None
    model = dataclasses.replace(
        preset("smoke").model, latent_dim=64, num_latents=16, head_dim=32, denoiser_depth=2, ffn_multiple=2
    )
    cut, d, blocks, ffn = tiling(model, 1, 4), 64, 2, 128

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    matrices = {}
    for name, product in cut.products.items():
        count = 1 if name in ("input", "output") else blocks
        values = array(count, product.tiles, product.k, product.block_n, dtype=jnp.bfloat16)
        matrices[name] = PackedMatrix(values, array(count, product.n))
    weights = fused.FusedWeights(matrices, array(blocks, 32), array(blocks, 32), array(blocks, d))
    tables = StepTables(
        factor=array(steps, 2 * blocks + 1, d), gate=array(steps, 2 * blocks, d),
        bias_qkv=array(steps, blocks, 3 * d), bias_up=array(steps, blocks, ffn), update=array(steps, 3),
    )  # fmt: skip
    options = {"tiling": cut, "launch": fused.Launch(stages=2), "sampler": "sde", "dtype": "bfloat16"}
    call = jax.jit(lambda weights, tables, key: fused.denoise_fused(weights, tables, key, 1.0, model, **options))
    traced = call.trace(weights, tables, jax.eval_shape(jax.random.key, 0))
    assert traced.out_info.shape == (1, 16, d)
    assert "triton_kernel_call" in traced.lower(lowering_platforms=("cuda",)).as_text()
    kernel, *grid, parameters = Recorder.last.given
    _, warps, _, shared, code, *_ = kernel.given
    return {"grid": grid, "parameters": parameters, "warps": warps, "shared": shared, "code": code}


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_the_launch_is_traced_compiled_and_lowered():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, "3"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["grid"] == [4, 1, 1] and found["warps"] == 8 and found["shared"] > 0
    assert ".target sm_90" in found["code"]
    kinds, values = zip(*found["parameters"])
    assert [kind for kind in kinds if kind != "array"] == ["i32"] and values[24] == 3, "all arrays but the steps"
    zeroed = [place for place, value in enumerate(values) if value and place != 24]
    assert zeroed == [34, 35], "the counters, which are last, and nothing else start at zero"
    assert found["cache"] is None, "jax-triton's import has left Triton's cache where it was"


if __name__ == "__main__":
    print(json.dumps(lowered_launch(int(sys.argv[1])) | {"cache": os.environ.get("TRITON_CACHE_DIR")}))
