"""How the matrix products of the fused denoising loop are cut into work for the programs of one persistent launch.

A product (rows, k) @ (k, n) is cut into tiles of `block_m` x `block_n`, and along k into `split` parts whose partial sums are
added afterwards, in a fixed order.  Products that end in a non-linearity (qkv, up) are never split; those that end in the
residual stream always may be.  What is chosen here decides the layout of the packed weights too (packing.py).
"""

from __future__ import annotations

import dataclasses
import math

from jdllm.config import ModelConfig

BLOCK_N = (256, 128, 64, 32, 16)
BLOCK_K = (64, 32, 16)
OPERAND_BYTES, PARTIAL_BYTES = 2, 8
ATTENTION_BYTES = 32
"""Attention of one row and one dimension of a head, as bytes that a multiprocessor could have read in that time.  On an H200 a
head of 64 rows and 128 dimensions took some 6 us, in which a product's loop read 250 KB (docs/decisions.md, 14)."""


@dataclasses.dataclass(frozen=True)
class Product:
    """Tiles of one matrix product."""

    k: int
    n: int
    block_n: int
    split: int = 1

    @property
    def tiles(self) -> int:
        """Tiles along n; the last one may reach beyond it."""
        return -(-self.n // self.block_n)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """All products of one denoiser evaluation, and what they share."""

    programs: int
    """Programs of the launch: all of them must be resident at once."""
    rows: int
    """Latents of all sequences together."""
    block_m: int
    block_k: int
    input: Product
    qkv: Product
    out: Product
    up: Product
    down: Product
    output: Product

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.block_m)

    def add_rows(self, product: Product) -> int:
        """Rows of a tile that one program adds up at a time: as few as leave no program a second turn."""
        sizes = [1 << power for power in range(self.block_m.bit_length())]
        return next(
            (m for m in sizes if product.tiles * self.row_tiles * (self.block_m // m) <= self.programs), self.block_m
        )

    @property
    def parts(self) -> int:
        """Tiles of columns in which the residual stream is written, at most."""
        return max(product.tiles for product in (self.input, self.out, self.down))

    @property
    def products(self) -> dict[str, Product]:
        """By the names of `PackedDenoiser`."""
        return {name: getattr(self, name) for name in ("input", "qkv", "out", "up", "down", "output")}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def cut(
    k: int, n: int, row_tiles: int, block_m: int, programs: int, block_k: int, splits: list[int], widest: int,
    bytes_per_k: int = 0,
) -> Product:  # fmt: skip
    """The cut that leaves the busiest program the fewest bytes to move: weights, rows, and partial sums there and back.

    `bytes_per_k` is what else an item costs for each row of its weights, as if it were bytes.
    """

    def cost(block_n: int, split: int) -> tuple[float, int]:
        rounds = math.ceil(-(-n // block_n) * row_tiles * split / programs)
        operands = k // split * ((block_n + block_m) * OPERAND_BYTES + bytes_per_k)
        return rounds * (operands + (block_m * block_n * PARTIAL_BYTES if split > 1 else 0)), split

    choices = [
        (block_n, split) for block_n in BLOCK_N if block_n <= widest for split in splits if (k // split) % block_k == 0
    ]
    return Product(k, n, *min(choices, key=lambda choice: cost(*choice)))


def tiling(model: ModelConfig, num: int, programs: int) -> Tiling:
    """The cut for `num` sequences at once on a device that keeps `programs` programs resident."""
    d, rows = model.latent_dim, num * model.num_latents
    ffn, heads = model.ffn_multiple * d, d // model.head_dim
    block_m = min(64, max(16, power_of_two(rows)))
    row_tiles = -(-rows // block_m)
    block_k = next(size for size in BLOCK_K if d % size == 0)
    powers = [1, 2, 4, 8, 16]
    by_heads = [split for split in range(1, 17) if heads % split == 0]

    def product(k: int, n: int, splits: list[int], widest: int = 128, bytes_per_k: int = 0) -> Product:
        return cut(k, n, row_tiles, block_m, programs, block_k, splits, widest, bytes_per_k)

    products = {
        "input": product(2 * d, d, powers), "qkv": product(d, 3 * d, [1], 64), "out": product(d, d, by_heads, 256, ATTENTION_BYTES * block_m),
        "up": product(d, ffn, [1], 64), "down": product(ffn, d, powers), "output": product(d, d, powers),
    }  # fmt: skip
    return Tiling(programs, rows, block_m, block_k, **products)
