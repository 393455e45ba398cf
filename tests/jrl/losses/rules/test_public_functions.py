"""Public names of `import jrl`: documentation, defaults, and no import heavier than jax."""

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
import typing

import contract_calls
import pytest
from tiers import full_but
from vectors.tables import ROWS

import jrl
import jrl.losses

MODULES = [m.name for m in pkgutil.walk_packages(jrl.losses.__path__, "jrl.losses.") if not m.ispkg]


def run(program: str) -> str:
    """Output of a fresh interpreter, which checks no types at run time."""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_importing_loads_nothing_heavier_than_jax():
    heavy = ("flax", "optax", "orbax", "matplotlib", "chex", "sentencepiece", "tyro", "rich")
    program = f"import sys, jrl; print([name for name in {heavy} if name in sys.modules])"
    assert run(program).strip() == "[]"


def test_public_names_of_both_packages_agree():
    assert jrl.__all__ == jrl.losses.__all__
    assert len(set(jrl.__all__)) == len(jrl.__all__)
    for name in jrl.__all__:
        assert getattr(jrl, name) is getattr(jrl.losses, name)


@pytest.mark.parametrize("name", jrl.__all__)
def test_public_names_are_documented(name):
    thing = getattr(jrl, name)
    if typing.get_origin(thing) is typing.Literal:
        return  # A set of strings; the function that takes it has them in a table.
    assert len(inspect.getdoc(thing) or "") > 60
    if inspect.isfunction(thing):
        text = inspect.getdoc(thing) or ""
        assert ("Args:" in text and "Returns:" in text and ">>>" in text) or name == "masked_mean"
        missing = [p for p in inspect.signature(thing).parameters if f"  {p}: " not in text]
        assert not missing


@pytest.mark.parametrize(
    ("choices", "function"),
    [
        (jrl.Aggregation, jrl.aggregate),
        (jrl.KLEstimator, jrl.kl_estimate),
        (jrl.EntropySign, jrl.entropy_signal),
        (jrl.ProbabilityDistance, jrl.dppo_loss),
        (jrl.WeightLevel, jrl.mismatch_weights),
        (jrl.WeightMean, jrl.normalized_weights),
        (jrl.RejectionKind, jrl.divergence_rejection_mask),
        (jrl.RejectionOver, jrl.divergence_rejection_mask),
    ],
)
def test_docstring_lists_every_choice(choices, function):
    for choice in typing.get_args(choices):
        assert f"``{choice}``" in (inspect.getdoc(function) or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", full_but(MODULES, "jrl.losses.reduction", "jrl.losses.policy.token_ratio")
)
def test_docstring_examples_are_true(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module)
    assert not failed
    # Files that have no public name serve the others and need no examples.
    assert tried or not any(
        getattr(module, name, None) is getattr(jrl, name) for name in public(module)
    )


def public(module):
    """The names of `jrl` that are defined in this file."""
    return [n for n in jrl.__all__ if getattr(getattr(jrl, n), "__module__", "") == module.__name__]


@pytest.mark.slow
def test_losses_accept_numpy_with_default_promotion():
    program = """
import numpy as np, jrl
x, mask = np.array([[0.5, -1.0, 2.0]], np.float64), np.array([[1, 0, 1]], np.int64)
advantages, returns = jrl.gae(x, x, mask)
loss, metrics = jrl.ppo_loss(x, x, advantages, mask, num_tokens=np.int64(2))
jrl.value_loss(x, x, returns, mask, clip=0.5), jrl.grpo_advantages(x[0], np.array([3, 3, 3]))
print(loss.dtype, round(float(loss + advantages.sum() / 2), 6), metrics["ratio"].value())
"""
    assert run(program).strip() == "float32 0.0 1.0"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.function)
def test_default_settings_are_the_table(row):
    parameters = inspect.signature(contract_calls.public(row.function)).parameters.values()
    inputs = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    assert inputs == row.defaults
