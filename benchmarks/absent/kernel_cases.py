"""Every kernel at the shapes of published models: functions and operands to compile."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.absent.shapes import MODELS, ROPE, Model
from moe.kernels import grouped, rows
from moe.kernels.attention.forward import attend
from moe.kernels.attention.gradient import attend_gradient
from moe.kernels.decode_attention import split_attention
from moe.kernels.latent_decode import split_latent_attention
from moe.kernels.layout import sorted_layout
from moe.kernels.routing import Rule, route, supports_experts
from moe.ops.mask import Mask, TokenIndices

Shape = jax.ShapeDtypeStruct
CACHE_ROWS, CACHE_COLUMNS = 16, 4096
"""Rows and columns of a KV cache."""


class Case(NamedTuple):
    """A kernel at a shape.

    Attributes:
      operation: what is computed.
      function: calls the kernel.
      operands: their shapes.
      window: positions that a query of an attention looks back; None is no limit.
    """

    operation: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    window: int | None = None


def half(*shape: int) -> Shape:
    return Shape(shape, jnp.bfloat16)


def single(*shape: int) -> Shape:
    return Shape(shape, jnp.float32)


def integers(*shape: int) -> Shape:
    return Shape(shape, jnp.int32)


def gpu_cases(name: str) -> Iterator[Case]:
    """The Mosaic kernels at the shapes of one of `shapes.MODELS`."""
    model = MODELS[name]
    yield from _products(model)
    yield from _moves(model)
    yield from _attention(model)
    yield _decoding(model)


def _products(model: Model) -> Iterator[Case]:
    slots, sizes = model.tokens * model.k, integers(model.experts)
    spread, units = half(slots, model.hidden), half(slots, model.inner)
    into = half(model.experts, model.hidden, 2 * model.inner)
    out = half(model.experts, model.inner, model.hidden)
    product, total = grouped.multiply_rows, grouped.sum_products
    yield Case("gate/up product", partial(product, 0), (spread, into, sizes))
    yield Case("down product", partial(product, 0), (units, out, sizes))
    yield Case("transposed product", partial(product, 1), (spread, out, sizes))
    # In the dtype of the weights, as an update asks for it.
    yield Case("weight gradient", partial(total, dtype=jnp.bfloat16), (spread, units, sizes))


def _moves(model: Model) -> Iterator[Case]:
    slots, ids = model.tokens * model.k, integers(model.tokens, model.k)
    named: dict[str, Any] = {"implementation": "mosaic"}
    yield Case(
        "sorted layout",
        lambda ids: sorted_layout(ids, model.experts, **named),
        (ids,),
    )
    if rows.unsupported_width(model.hidden) is None:
        x, spread = half(model.tokens, model.hidden), half(slots, model.hidden)
        yield Case("permute", partial(rows.take, **named), (x, integers(slots)))
        combine = partial(rows.combine, dtype=jnp.bfloat16, **named)
        yield Case("unpermute", combine, (spread, ids))
    if supports_experts(model.experts):
        grouped_experts = model.groups > 1
        rule = Rule(
            model.k,
            sigmoid=grouped_experts,
            scaling=2.5 if grouped_experts else 1.0,
            groups=model.groups,
            open_groups=model.open_groups,
        )
        yield Case(
            "router",
            lambda logits, bias, weights: route(logits, bias, weights, rule, **named),
            (
                single(model.tokens, model.experts),
                single(model.experts),
                single(model.tokens),
            ),
        )


def _attention(model: Model) -> Iterator[Case]:
    group = model.heads // model.kv_heads
    heads = 1, model.kv_heads, group, model.tokens
    keys = half(1, model.kv_heads, model.tokens, model.width)
    values = half(1, model.kv_heads, model.tokens, model.wide)
    query, per_query = half(*heads, model.width), single(*heads)
    scale = model.width**-0.5
    # Shapes stand for arrays in it.
    of_token: Any = integers(1, model.tokens)
    fields = TokenIndices(*[of_token] * len(TokenIndices._fields))
    for window in dict.fromkeys((None, model.window)):
        suffix = "" if window is None else f", window {window}"

        def forward(query, key, value, of_query, of_key, window=window):
            mask = Mask(of_query, of_key, window)
            return attend(query, key, value, mask, scale, dtype=jnp.bfloat16)

        def backward(query, key, value, of_query, of_key, log_sum, softmax_d, pull, window=window):
            mask = Mask(of_query, of_key, window)
            return attend_gradient(
                *(query, key, value, mask, log_sum, softmax_d, pull, scale), dtype=jnp.bfloat16
            )

        given = query, keys, values, fields, fields
        yield Case(f"attention{suffix}", forward, given, window)
        pulled = per_query, per_query, half(*heads, model.wide)
        yield Case(f"attention gradient{suffix}", backward, (*given, *pulled), window)


def _decoding(model: Model) -> Case:
    seen = integers(CACHE_ROWS), integers(CACHE_ROWS), integers()
    if model.rank is not None:
        width = model.rank + ROPE
        return Case(
            "latent decode attention",
            partial(split_latent_attention, rank=model.rank, scale=0.1),
            (
                half(CACHE_ROWS, model.heads, width),
                half(2, CACHE_ROWS, 1, width, CACHE_COLUMNS),
                *seen,
            ),
        )
    keys = half(2, CACHE_ROWS, model.kv_heads, model.width, CACHE_COLUMNS)
    values = half(2, CACHE_ROWS, model.kv_heads, CACHE_COLUMNS, model.wide)
    query = half(CACHE_ROWS, model.heads, model.width)
    return Case("decode attention", split_attention, (query, keys, values, *seen))
