"""A whole layer of experts, router and dispatch included, forward and backward.

Another way to compute it is another entry of `FORMS`. Work is that of the experts' products.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from benchmarks.gpu.networks import network, one_device
from benchmarks.gpu.rows import Figures, Row, Settings, Work, measured, needs_gpu, random
from benchmarks.gpu.shapes import QWEN3_A3B, SMALL_MOE
from moe.config import Model

FORMS: dict[str, dict[str, Any]] = {
    "mosaic": {"experts": "mosaic"},
    "mosaic, plain router": {"experts": "mosaic", "router": "plain"},
    "batched": {"experts": "batched"},
    "blocks": {"experts": "blocks"},
}
"""Fields of `moe.execution.Execution`; the router is chosen where it is not named
(`moe.implementations`)."""
WORST = 3e-2
"""Relative difference of a token from float32, in the median: three products in half precision, and
what lies between them, are a few times as far from it as one."""
CHECKED = 16
"""Tokens that are compared: the reference multiplies every row by every matrix."""


def rows(settings: Settings) -> Iterator[Row]:
    """A layer of Qwen3-30B-A3B on 32,768 tokens, in bfloat16."""
    sizes = (SMALL_MOE if settings.small else QWEN3_A3B) | {"num_layers": 1, "vocab_size": 8}
    name, batch, time = ("small", 2, 12) if settings.small else ("qwen3-30b-a3b", 8, 4096)
    operands = cache(partial(operands_of, sizes, batch, time, settings))
    for which in ("forward", "both"):
        for form, execution in FORMS.items():
            needs = needs_gpu() if form.startswith("mosaic") else None
            run = partial(_layer, settings, operands, sizes, execution, which)
            yield Row(f"layer/{name}/{which}", form, run, needs)


def operands_of(
    sizes: dict[str, Any], batch: int, time: int, settings: Settings
) -> tuple[Any, ...]:
    """The layer, its experts in bfloat16 as an update casts them once, tokens and what pulls."""
    import jax
    import jax.numpy as jnp

    from moe.weights import initialise

    def make(key: Any) -> Any:
        layer = jax.tree.map(lambda x: x[0], initialise(network(sizes), key).layers)
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim >= 3 else x, layer)

    layer = jax.jit(make)(jax.random.key(settings.seed))
    shape = (batch, time, sizes["d_model"])
    return layer, random(settings, 1, shape), random(settings, 2, shape)


def program(config: Any, which: str) -> Callable[..., Any]:
    """The feed-forward term of a block, or with it the gradients of the layer and of tokens."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from moe.layers.block import feed_forward
    from moe.placement import specs
    from moe.tokens.packing import pack_rows

    mesh = one_device()
    model = Model(config, mesh)
    spread = PartitionSpec(mesh.axes)
    of_layer = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), specs(model).layers)

    def local(layer, x):
        tokens = jnp.zeros(x.shape[:2], jnp.int32)
        packed = pack_rows(tokens, jnp.ones(tokens.shape, bool), model)
        out, _ = feed_forward(layer, x.reshape(-1, x.shape[-1]), packed, model)
        return out.reshape(x.shape)

    term = jax.shard_map(local, mesh=mesh.mesh, in_specs=(of_layer, spread), out_specs=spread)

    def both(layer, x, pull):
        out, back = jax.vjp(term, layer, x)
        return out, *back(pull)

    return jax.jit(both if which == "both" else lambda layer, x, pull: term(layer, x))


def _layer(
    settings: Settings,
    operands: Callable[[], tuple[Any, ...]],
    sizes: dict[str, Any],
    execution: dict[str, Any],
    which: str,
) -> Figures:
    _, x, _ = operands()
    tokens, k = x.shape[0] * x.shape[1], sizes.get("experts_per_token", 2)
    amount = (6 if which == "both" else 2) * tokens * k * 3 * sizes["d_model"] * sizes["d_expert"]
    compare = partial(_compared, sizes, which, operands())
    operations = Work(amount, "operations")
    config = network(sizes, **execution)
    return measured(program(config, which), operands(), operations, settings, compare)


def _compared(sizes: dict[str, Any], which: str, operands: tuple[Any, ...], found: Any) -> float:
    """The difference of some tokens, and of their gradients, from those of a plain layer in
    float32 that has these tokens alone."""
    import jax
    import jax.numpy as jnp

    layer, x, pull = operands
    few = [array[:1, :CHECKED].astype(jnp.float32) for array in (x, pull)]
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer)
    plain = program(network(sizes, "float32", experts="plain"), which)
    with jax.default_matmul_precision("highest"):
        expected = plain(wide, *few)
    if which == "forward":
        found, expected = [found], [expected]
    else:
        found, expected = ([array[0], array[2]] for array in (found, expected))
    return max(median_difference(a[:1, :CHECKED], b) for a, b in zip(found, expected, strict=True))


def median_difference(found: Any, expected: Any) -> float:
    """Of tokens: one that is a rounding from another choice of experts may take it."""
    import jax.numpy as jnp

    distance = jnp.linalg.norm(found.astype(jnp.float32) - expected, axis=-1)
    relative = float(jnp.median(distance / jnp.linalg.norm(expected, axis=-1)))
    if not relative < WORST:
        raise ValueError(f"tokens differ from float32 by {relative:.3g}")
    return relative
