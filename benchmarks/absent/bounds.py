"""Lower bounds of the time of a kernel on a GPU, at the datasheet's rates.

The *floor* is what the operation needs, ``max(FLOPs / peak, bytes / bandwidth)``, with each operand
and result once. A kernel multiplies whole tiles, and so more than that: rows of other experts, and
scores that the mask hides. The time of the products that it *issues* at peak rate is the second
bound. Experts have the rows that a random choice gives them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.absent.machine_code import Kernel
from benchmarks.absent.shapes import Model
from benchmarks.absent.work import kernel_flops
from moe.kernels.attention import forward, gradient
from moe.kernels.attention.blocks import (
    MAX_BLOCK_TOKENS,
    UNIT,
    block_mask,
    pad_mask,
    visit_table,
)
from moe.kernels.decode_attention import MIN_QUERIES
from moe.kernels.grouped import TILING, plan_tiles
from moe.ops.mask import TokenIndices
from sharding.costs.hardware import Hardware

TILED_ROWS = ("grouped_product",)
SUMS = "grouped_sum"
FORWARD, OF_QUERIES, OF_KEYS = (
    "attention_forward",
    "attention_grad_query",
    "attention_grad_key_value",
)
COPIES = "take_rows", "combine_rows"
LEAST = 0.8
"""Share of its floor's rate below which the products of a kernel are a defect."""
DECODING, LATENT_DECODING = "decode_attention", "latent_decode_attention"


class Products(NamedTuple):
    """Floating-point operations of the products of a kernel: needed, and issued."""

    needed: float
    issued: float


class Bound(NamedTuple):
    """Lower bounds of the time of a kernel, in seconds."""

    floor: float
    issued: float

    @property
    def share(self) -> float:
        """The most of its floor's rate that the kernel can reach."""
        return self.floor / max(self.floor, self.issued)


def bound(kernel: str, model: Model, case: Any, hardware: Hardware) -> Bound:
    """Lower bounds of a kernel of a `benchmarks.absent.kernel_cases.Case`.

    Args:
      kernel: its name in profiles. The bytes of a case of several kernels are those of all.
    """
    results = jax.tree.leaves(jax.eval_shape(case.function, *case.operands))
    products = _products(kernel, model, case, results)
    moved = _bytes(jax.tree.leaves(case.operands)) + _bytes(results)
    if kernel in (DECODING, LATENT_DECODING):
        moved -= _bytes(_cache(case)) / 2  # one of two layers is read
    floor = max(products.needed / hardware.peak, moved / hardware.memory_bandwidth)
    return Bound(floor, products.issued / hardware.peak)


def defects_of(kernel: Kernel, bounds: Bound) -> list[str]:
    """Products that cannot reach `LEAST` of their floor's rate, and rows that are copied in narrow
    loads; empty without any."""
    found = []
    if bounds.share < LEAST:
        found.append(f"its products allow {bounds.share:.0%} of the floor's rate")
    if kernel.name in COPIES and not kernel.wide_loads:
        found.append("loads of less than 16 bytes")
    return found


def _bytes(arrays: list[Any]) -> float:
    return float(sum(array.size * array.dtype.itemsize for array in arrays))


def _cache(case: Any) -> list[Any]:
    """Keys and values of two layers, ``[layer, row, head, ...]``."""
    return [x for x in jax.tree.leaves(case.operands) if len(x.shape) == 5]


def _products(kernel: str, model: Model, case: Any, results: list[Any]) -> Products:
    if kernel in (*TILED_ROWS, SUMS):
        operands = [tuple(x.shape) for x in jax.tree.leaves(case.operands)]
        needed = kernel_flops(kernel, operands, tuple(results[0].shape))
        return Products(needed, needed * _multiplied_rows(kernel, model))
    if kernel in (FORWARD, OF_QUERIES, OF_KEYS):
        return _attention(kernel, model, case.window)
    if kernel in (DECODING, LATENT_DECODING):
        return _decoding(kernel, model, case)
    return Products(0.0, 0.0)


def _multiplied_rows(kernel: str, model: Model) -> float:
    """Rows that are multiplied, of each that there is."""
    rows = model.tokens * model.k
    even = np.full(model.experts, 1 / model.experts)
    sizes = np.random.default_rng(0).multinomial(rows, even)
    if kernel == SUMS:
        stop = np.cumsum(sizes)
        slices = -(-stop // TILING.depth) - (stop - sizes) // TILING.depth
        return float(np.where(sizes > 0, slices, 0).sum()) * TILING.depth / rows
    padded = max(TILING.rows, -(-rows // 8) * 8)
    tiles = plan_tiles(jnp.asarray(sizes), padded, TILING.rows)
    return float((np.asarray(tiles.size) > 0).sum()) * TILING.rows / rows


def _attention(kernel: str, model: Model, window: int | None) -> Products:
    """Products over pairs of a query and a key: scores, values, and their gradients."""
    width, wide = model.width, model.wide
    seen = np.arange(1, model.tokens + 1)
    pairs = float(np.minimum(seen, window or model.tokens).sum())
    if kernel == FORWARD:
        needed = issued = width + wide
        visited = _visited(model, window, MAX_BLOCK_TOKENS, forward.keys_per_block(width, wide))
    elif kernel == OF_QUERIES:
        needed = issued = 2 * width + wide
        blocks = gradient.query_blocks_per_program(width, wide)
        visited = _visited(model, window, blocks * UNIT, UNIT)
    else:
        needed = issued = 2 * width + 2 * wide
        blocks = gradient.key_blocks_per_program(width, wide)
        if blocks == 1:
            issued += width  # each of two warpgroups multiplies queries and keys
        visited = _visited(model, window, UNIT, blocks * UNIT, by_query=False)
    return Products(2.0 * model.heads * needed * pairs, 2.0 * model.heads * issued * visited)


def _visited(
    model: Model, window: int | None, queries: int, keys: int, *, by_query: bool = True
) -> float:
    """Pairs in the blocks that the kernel visits, of a sequence with a causal mask."""
    order = jnp.arange(model.tokens, dtype=jnp.int32)[None]
    fields = TokenIndices(**dict.fromkeys(TokenIndices._fields, order))
    fields = pad_mask(fields._replace(segment=jnp.ones_like(order)))
    table = visit_table(
        block_mask(fields, queries), block_mask(fields, keys), window, by_query=by_query
    )
    visits = np.asarray(table)
    return float((visits[..., 1] - visits[..., 0]).sum()) * queries * keys


def _decoding(kernel: str, model: Model, case: Any) -> Products:
    """Products of the query heads with the keys and values of a cache."""
    keys = _cache(case)[0]
    rows, columns = keys.shape[1], keys.shape[-1]
    width, wide = model.width, model.wide
    if kernel == LATENT_DECODING:
        assert model.rank is not None
        width, wide = keys.shape[3], model.rank
        heads = model.heads
    else:
        heads = max(MIN_QUERIES, model.heads // model.kv_heads) * model.kv_heads
    each = 2.0 * rows * columns * (width + wide)
    return Products(each * model.heads, each * heads)
