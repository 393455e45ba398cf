"""The calls on which the rules for arrays are tried, from the rows of the objectives."""

import functools

import jax
import jax.numpy as jnp
from vectors.call import Kind
from vectors.tables import ROWS, advantages, distillation

import jrl


def public(name):
    """The function behind a public name, for example `diagnostics.kl`."""
    return functools.reduce(getattr, name.split("."), jrl)


def prepared(row, call):
    """A call that takes a batch, and settings beside its own."""
    function, names = public(row.function), list(row.cases[0].inputs)

    def run(b, **more):
        wanted = [call.arrays.get(name, name) for name in names]
        arrays = [b[x] if isinstance(x, str) else x(b) for x in wanted]
        settings = {name: x(b) if callable(x) else x for name, x in call.settings.items()}
        result = function(*arrays, **settings, **more)
        as_they_are = {**settings, **more}.get("aggregation", "reduced") is None
        return with_numbers(result[0] if as_they_are else result, b)

    return run


def with_numbers(result, b):
    """The result, or what a mask keeps of the log-probabilities: a mask itself has no numbers."""
    if not (isinstance(result, jax.Array) and result.dtype == bool):
        return result
    kept = jnp.where(result, b["logprobs"], 0)
    return kept.astype(jnp.float32) if kept.dtype == jnp.bfloat16 else kept


def grouped(estimator):
    """An estimator on responses and their groups, for any leading axes, spread over the tokens."""

    def call(b):
        rows = {n: x.reshape(-1, *x.shape[b["mask"].ndim - 1 :]) for n, x in b.items()}
        result = estimator(rows)
        result = result if result.ndim > 1 else result[:, None]
        counts = rows["mask"].astype(bool)
        return jnp.where(counts, result, 0).reshape(b["mask"].shape)

    return call


def both(loss, aggregations):
    """The losses of the tokens as they are, and reduced with weights."""

    def call(b):
        weights = b["importance_weights"]
        reduced = {
            mode: loss(b, aggregation=mode, importance_weights=weights, max_length=9)
            for mode in aggregations
        } or loss(b, importance_weights=weights)
        return {"per token": loss(b, aggregation=None), "reduced": reduced}

    return call


def each(result):
    """The results of a call that has several, by name."""
    return [x for one in result.values() for x in each(one)] if type(result) is dict else [result]


def together(calls):
    """Several calls in one program."""
    return lambda b: {name: call(b) for name, call in calls.items()}


def of_kind(*kinds):
    """The calls of some kinds, by the name of their function and what is special about them."""
    return {
        f"{row.function} {special}".strip(): call_of(row, call)
        for row in ROWS
        for special, call in row.calls.items()
        if call.kind in kinds
    }


def call_of(row, call):
    run = prepared(row, call)
    if call.kind is Kind.RESPONSE:
        return grouped(run)
    if call.kind in (Kind.LOSS, Kind.LOSS_OF_BATCH):
        return both(run, call.aggregations)
    return run


# The losses by name, to be called with a batch and an aggregation.
UNREDUCED = {
    f"{row.function} {special}".strip(): prepared(row, call)
    for row in ROWS
    for special, call in row.calls.items()
    if call.kind in (Kind.LOSS, Kind.LOSS_OF_BATCH)
}
PER_TOKEN = of_kind(Kind.TOKEN)
PER_BATCH = of_kind(Kind.BATCH, Kind.RESPONSE)
LOSSES, LOSSES_OF_BATCH = of_kind(Kind.LOSS), of_kind(Kind.LOSS_OF_BATCH)
SCALAR = of_kind(Kind.SCALAR)
# The diagnostics are small, and one program.
_SMALL = {name: call for name, call in SCALAR.items() if name.startswith("diagnostics.")}
SCALAR = {name: call for name, call in SCALAR.items() if name not in _SMALL}
SCALAR["diagnostics"] = together(_SMALL)
WITH_BOTH = LOSSES | LOSSES_OF_BATCH
EVERYTHING = PER_TOKEN | PER_BATCH | SCALAR | WITH_BOTH
# An advantage is a fact: the critic does not learn through its own targets.
FACTS = {
    f"{row.function} {special}".strip()
    for row in (*advantages.ROWS, *distillation.ADVANTAGES)
    for special in row.calls
}
