"""Every public function with arrays of a given size, its required settings and nothing else."""

import inspect

import jax
import numpy as np
from annotations import unchecked
from contract_calls import public
from vectors.tables import ROWS

# Settings for a usual call.
REQUIRED = {row.function: row.required for row in ROWS if row.required}
# Whose rewards are one per response.
OF_RESPONSES = {
    row.function
    for row in ROWS
    if {"rewards", "groups"} <= row.cases[0].inputs.keys()
    and not isinstance(row.cases[0].inputs["rewards"][0], list)
}
PER_ROW = {"groups", "lengths", "scores", "correct", "truncated", "greedy_rewards", "num_correct"}
NUMBERS = {"coefficient", "kl", "entropy"}


def functions():
    """All that compute something, by the name under which `jrl` has them."""
    return {row.function: public(row.function) for row in ROWS}


def arguments(name, rows=2, time=3):
    """The arrays that a function needs, by the names of its parameters."""
    parameters = inspect.signature(functions()[name]).parameters.values()
    needed = [
        p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    ]
    settings = REQUIRED.get(name, {})
    return {p: _array(name, p, rows, time) for p in needed if p not in settings}


def call(name, rows=2, time=3, **changes):
    """The result of a function, with arrays or settings replaced or added.

    As a user has it, whose types nobody checks at run time.
    """
    with unchecked():
        inputs = {**arguments(name, rows, time), **REQUIRED.get(name, {}), **changes}
        return functions()[name](**inputs)


def _array(name, parameter, rows, time):
    draw = np.random.default_rng(len(parameter))
    if name.startswith("adaptive") and parameter in NUMBERS:
        return np.float32(0.25)
    if parameter == "lam":
        return np.float32(0.5)
    if parameter == "num_samples":
        return np.full(rows, 3)
    if parameter in PER_ROW or (parameter == "rewards" and name in OF_RESPONSES):
        full = draw.integers(0, 2, rows)
        return full if parameter in ("groups", "truncated") else full.astype(np.float32)
    if parameter == "mask":
        return np.ones((rows, time), bool)
    if parameter.endswith("top_logprobs"):
        return -draw.uniform(2.0, 3.0, (rows, time, 5)).astype(np.float32)
    if parameter.endswith("logits"):
        return np.asarray(draw.normal(size=(rows, time, 5)), np.float32)
    if parameter == "tokens":
        return np.zeros((rows, time), int)
    if name == "gdpo_advantages" and parameter == "rewards":
        return np.asarray(draw.normal(size=(rows, 2)), np.float32)
    if parameter in ("entropy", "weights", "importance_weights"):
        return np.asarray(draw.uniform(0.5, 1.5, (rows, time)), np.float32)
    if parameter in ("logprobs", "old_logprobs") or parameter.endswith("_logprobs"):
        return -draw.uniform(0.1, 1.5, (rows, time)).astype(np.float32)
    return np.asarray(draw.normal(size=(rows, time)), np.float32)


def values(result):
    """The numbers of a result; records give their quotient."""
    records = jax.tree.leaves(result, is_leaf=lambda x: hasattr(x, "value"))
    return [x.value() if hasattr(x, "value") else x for x in records]
