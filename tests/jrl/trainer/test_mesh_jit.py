"""Programs are compiled with the options of their mesh, and once for all that have the same."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from programs import mesh_of

from jrl.trainer.learner.update import update
from jrl.trainer.scoring import RetryOnOverflow, _score_packed, logprobs_of, values_of
from sharding import sharded_jit as asked
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit


@dataclass(frozen=True)
class Objective:
    mesh: FoldedMesh
    scale: float = 3.0


def test_a_mesh_says_what_its_programs_are_compiled_with(monkeypatch):
    traced = []

    def scaled(objective, x):
        """What it says."""
        traced.append(objective)
        return objective.scale * x

    program = MeshJit(scaled, static_argnums=0)
    one, two = Objective(mesh_of("dp1")), Objective(mesh_of("dp2"))
    x = jnp.arange(5.0)
    assert program(two, x)[4] == program.lower(two, x).compile()(x)[4] == 12.0
    assert program.jit_for(one.mesh) is program.jit_for(two.mesh)
    assert program.__doc__ == "What it says." and traced == [two]
    monkeypatch.setitem(asked.OVERLAP, "cpu", {"xla_of_nobody": True})
    # Of one device there is nothing to ask.
    assert program(one, x)[4] == 12.0
    for run in (program, lambda *given: program.lower(*given).compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"No such compile option.*of_nobody"):
            run(two, x)


def test_updates_and_scores_are_such_programs():
    assert isinstance(update, MeshJit)
    for score in (values_of, logprobs_of, _score_packed):
        assert isinstance(score, RetryOnOverflow)
        assert isinstance(score.with_overflow, MeshJit) and isinstance(score.dropless, MeshJit)
