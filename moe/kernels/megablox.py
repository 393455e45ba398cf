"""Grouped GEMM on TPUs by Megablox, the kernels that come with JAX.

`jax.experimental.pallas.ops.tpu.megablox` has the product and its weight gradient. They leave rows
of no group undefined; here they are zeros.

References:
  Gale et al., "MegaBlocks", 2022. https://arxiv.org/abs/2211.15841
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float, Int

from sharding.collectives import match_varying

TILE_HEIGHTS = (512, 256, 128, 64, 32, 16)
"""Rows of a tile: the first of these that divides the number of rows."""
MAX_TILE_COLUMNS = 1024
"""Columns of a tile, at most."""
VMEM = 12 * 2**20
"""Bytes of VMEM that the tiles of a program take, at most. The compiler grants 16 MiB on TPU v5e
and v5p, and uses some for itself."""
COLUMN_UNIT = 128
"""A tile that is narrower than its matrix has a multiple of this many columns."""


def multiply_rows(
    side: int,
    rows: Float[Array, "row inner"],
    weights: Float[Array, "group deep wide"],
    sizes: Int[Array, "group"],
    *,
    interpreted: bool = False,
) -> Float[Array, "row outer"]:
    """``rows[r] @ weights[g]``, with `side` 1 its transpose; zeros for rows of no group.

    Args:
      interpreted: step by step on any device, for tests.

    Raises:
      ValueError: when it is lowered for anything but a TPU and not interpreted.
    """
    run = partial(_gmm, interpret=True) if interpreted else _MULTIPLY_ROWS.bind
    operands = match_varying((_pad_rows(rows), weights, sizes.astype(jnp.int32)))
    out = run(*operands, side=side)[: rows.shape[0]]
    in_group = jnp.arange(rows.shape[0]) < jnp.sum(sizes)
    return jnp.where(in_group[:, None], out, 0)


def sum_products(
    rows: Float[Array, "row inner"],
    others: Float[Array, "row outer"],
    sizes: Int[Array, "group"],
    *,
    interpreted: bool = False,
) -> Float[Array, "group inner outer"]:
    """Sum of ``rows[r]^T others[r]`` over the rows of each group, float32.

    Args:
      interpreted: as in `multiply_rows`, with its errors.
    """
    run = partial(_tgmm, interpret=True) if interpreted else _SUM_PRODUCTS.bind
    return run(*match_varying((_pad_rows(rows), _pad_rows(others), sizes.astype(jnp.int32))))


def _pad_rows(rows: Array) -> Array:
    """Pads rows to whole tiles of at least 16 rows, and of 128 where there are as many rows."""
    unit = 128 if rows.shape[0] >= 128 else 16
    return jnp.pad(rows, ((0, -rows.shape[0] % unit), (0, 0)))


def product_tiling(rows: Array | jax.ShapeDtypeStruct, outer: int) -> tuple[int, int, int]:
    """Rows, contracted columns and result columns of the tiles of a product of padded rows."""
    itemsize = jnp.dtype(rows.dtype).itemsize

    def vmem(height: int, inner: int, outer: int) -> int:
        # Two of each tile, as the next ones are copied meanwhile, and the sum in float32.
        tiles = height * inner + inner * outer + height * outer
        return 2 * itemsize * tiles + 4 * height * outer

    return _fit_tiling(rows.shape[0], rows.shape[1], outer, vmem)


def sum_tiling(rows: Array | jax.ShapeDtypeStruct, outer: int) -> tuple[int, int, int]:
    """Rows, left columns and right columns of the tiles of a sum of products of padded rows."""
    itemsize = jnp.dtype(rows.dtype).itemsize

    def vmem(height: int, inner: int, outer: int) -> int:
        # Rows of other groups are set to zero in float32. The result is float32, twice, and so is
        # the sum.
        return (2 * itemsize + 4) * height * (inner + outer) + 3 * 4 * inner * outer

    return _fit_tiling(rows.shape[0], rows.shape[1], outer, vmem)


def _fit_tiling(
    rows: int, inner: int, outer: int, vmem: Callable[[int, int, int], int]
) -> tuple[int, int, int]:
    """The largest tiles that fit: their wider side is halved until they do."""
    height = next(height for height in TILE_HEIGHTS if rows % height == 0)
    inner, outer = min(inner, MAX_TILE_COLUMNS), min(outer, MAX_TILE_COLUMNS)
    while vmem(height, inner, outer) > VMEM:
        if inner >= outer:
            inner = _halve(inner)
        else:
            outer = _halve(outer)
    return height, inner, outer


def _halve(columns: int) -> int:
    return -(-columns // (2 * COLUMN_UNIT)) * COLUMN_UNIT


def _gmm(rows: Array, weights: Array, sizes: Array, *, side: int, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    with _megablox_tracing():
        return gmm(
            rows,
            weights,
            sizes,
            preferred_element_type=rows.dtype,
            tiling=product_tiling(rows, weights.shape[2 - side]),
            transpose_rhs=bool(side),
            interpret=interpret,
        )


def _tgmm(rows: Array, others: Array, sizes: Array, *, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    with _megablox_tracing():
        return tgmm(
            rows.T,
            others,
            sizes,
            preferred_element_type=jnp.float32,
            tiling=sum_tiling(rows, others.shape[1]),
            interpret=interpret,
        )


@contextmanager
def _megablox_tracing() -> Iterator[None]:
    """Context in which Megablox can be traced: implicit dtype promotion, and no check of varying
    mesh axes in `jax.shard_map`.

    Megablox mixes dtypes and does not state the mesh axes of its outputs. There is no public name
    for turning that check off.
    """
    from jax._src.config import _check_vma  # pyright: ignore

    with jax.numpy_dtype_promotion("standard"), _check_vma(False):
        yield


def _make_tpu_primitive(name: str, function: Callable[..., Array], abstract: Callable[..., object]):
    """`function` as a primitive whose abstract evaluation states the mesh axes that its result
    varies over, and which is lowered for TPUs alone."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(
        lambda *operands, **options: jax.jit(partial(primitive.bind, **options))(*operands)
    )
    mlir.register_lowering(primitive, _reject)
    lowered = mlir.lower_fun(function, multiple_results=False)
    mlir.register_lowering(primitive, lowered, platform="tpu")
    return primitive


def _reject(context, *_, **__):
    platforms = ", ".join(context.module_context.platforms)
    raise ValueError(
        'implementation="megablox" of grouped_dot runs on TPUs, but the program is lowered for '
        f'{platforms}: use "blocks", or None for the best that applies.'
    )


def _product_type(rows, weights, sizes, *, side: int):
    return rows.update(shape=(rows.shape[0], weights.shape[2 - side]))


def _sum_type(rows, others, sizes):
    shape = sizes.shape[0], rows.shape[1], others.shape[1]
    return rows.update(shape=shape, dtype=jnp.dtype(jnp.float32))


_MULTIPLY_ROWS = _make_tpu_primitive("megablox_each", _gmm, _product_type)
_SUM_PRODUCTS = _make_tpu_primitive("megablox_summed", _tgmm, _sum_type)
