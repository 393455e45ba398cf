"""Compiling quickly: tests of values need the program once and not fast."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var, jaxprs_in_params

from moe.cache import over_columns
from moe.config import ModelConfig
from moe.weights import Transformer, axis_sizes, shapes, table
from sharding.folding import FoldedMesh, Layout, fold

# Without the code generator's optimisations a compilation takes half the time.
FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


def mesh_of(layout: str) -> FoldedMesh:
    """The layout over as many of the fake devices as it needs."""
    parsed = Layout.parse(layout)
    return fold(parsed, jax.devices()[: parsed.num_devices])


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.jit(function, compiler_options=FAST_COMPILE, **options)


def random_weights(config: ModelConfig, seed: int) -> Transformer[np.ndarray]:
    """Weights about as large as initial ones, none of them 0 or 1, and nothing is compiled: neither
    here nor to lay them out, as placing NumPy's arrays on many devices needs no program."""
    draw = np.random.default_rng(seed)

    def values(shape, weight):
        noise = draw.normal(size=shape.shape)
        if not weight.fan_in:
            return (1 + 0.2 * noise).astype(np.float32)
        sizes = axis_sizes(config)
        fan_in = math.prod(sizes[axis] for axis in weight.fan_in.split())
        return (noise / fan_in**0.5).astype(np.float32)

    return jax.tree.map(values, shapes(config), table(config))


def on_mesh(function: Callable[..., Any], mesh: FoldedMesh, in_specs: Any, out_specs: Any) -> Any:
    """`function` inside the one `jax.shard_map`, compiled."""
    return jit(
        jax.shard_map(function, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs),
    )


def array_sizes(jaxpr):
    """The number of elements of every array that is computed, in inner programs too."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from array_sizes(inner)


def most_bytes(jaxpr, within=False):
    """The most that the values of a program take at a time, beside what it is given: each as it is
    written, from its definition to its last use.

    A compiler's buffers are fewer, as it fuses operations, or more, as it chooses another order.

    Args:
      within: it is the body of an operation, which has room for what it gives: what loops carry is
        written in its place.
    """
    last = {v: n for n, e in enumerate(jaxpr.eqns) for v in e.invars if isinstance(v, Var)}
    inputs = {v for v in jaxpr.outvars if isinstance(v, Var)}
    live, most = {}, 0
    for number, equation in enumerate(jaxpr.eqns):
        for out in equation.outvars:
            live[out] = 0 if within and out in inputs else out.aval.size * out.aval.dtype.itemsize
        bodies = [most_bytes(inner, within=True) for inner in jaxprs_in_params(equation.params)]
        most = max(most, sum(live.values()) + max(bodies, default=0))
        for done in {*equation.outvars, *(v for v in equation.invars if isinstance(v, Var))}:
            if done not in inputs and last.get(done, number) <= number:
                live.pop(done, None)
    return most


def with_room(cache, more):
    """A cache with so many columns more."""

    def wider(buffer, column):
        if column is None:
            return buffer
        return jnp.pad(
            buffer, [(0, more * (axis == column % buffer.ndim)) for axis in range(buffer.ndim)]
        )

    return over_columns(wider, cache)
