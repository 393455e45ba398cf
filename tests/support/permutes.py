"""Permutes of a traced program that some of its devices may not come by."""

from collections.abc import Iterator

from jax.extend import core
from jax.extend.core import jaxprs_in_params

PERMUTES = {"ppermute", "pshuffle"}


def unreached_permutes(jaxpr: core.Jaxpr, differs: bool = False) -> Iterator[core.JaxprEqn]:
    """Collective-permutes under a condition, or in a loop, whose predicate may differ between
    devices.

    A permute is one operation of all devices of a program. Where some of them leave it out, the
    others wait for ever or take what another permute sent. Inside `jax.shard_map` the type of a
    predicate says over which mesh axes it varies: of none, and all devices go the same way.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in PERMUTES and differs:
            yield equation
        predicate = None
        if name == "cond":
            predicate = equation.invars[0]
        elif name == "while":
            (predicate,) = equation.params["cond_jaxpr"].jaxpr.outvars
        own = predicate is not None and bool(predicate.aval.manual_axis_type.varying)
        for inner in jaxprs_in_params(equation.params):
            yield from unreached_permutes(inner, differs or own)


def check_permutes(jaxpr: core.Jaxpr) -> None:
    """Asserts that there are none."""
    unreached = [str(equation.source_info.name_stack) for equation in unreached_permutes(jaxpr)]
    assert not unreached, f"{len(unreached)} permutes that some devices may leave out: {unreached}"
