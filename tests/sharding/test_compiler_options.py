"""Compiler options: names that the compiler knows, for devices that communicate."""

import jax
import jax.numpy as jnp
import pytest
from programs import mesh_of

from sharding.folding import Layout, fold_abstract
from sharding.sharded_jit import (
    LEAST_EFFORT,
    ONE_GRAPH,
    OVERLAP,
    REQUIRED,
    compiler_options,
    device_options,
)

TABLES = OVERLAP, REQUIRED, LEAST_EFFORT, ONE_GRAPH
NAMED = [o for table in TABLES for p in table.values() for o in p.items()]


@pytest.mark.parametrize(("name", "value"), NAMED)
def test_compiler_accepts_every_option(name, value):
    """Options of all platforms are fields of one record, whatever the compiler compiles for."""
    jax.jit(jnp.sin, compiler_options={name: value}).lower(1.0).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(jnp.sin, compiler_options={f"{name}_": value}).lower(1.0).compile()


def test_compiler_options_overlap_on_communicating_gpus():
    hidden, two = {"xla_gpu_enable_latency_hiding_scheduler": True}, Layout.parse("dp2 / ep2")
    required = REQUIRED["gpu"]
    assert compiler_options(fold_abstract(two, "gpu")) == required | hidden
    assert compiler_options(fold_abstract(two, "gpu"), overlap=False) == required
    assert compiler_options(fold_abstract(Layout.parse("dp1"), "gpu")) == {}
    assert compiler_options(mesh_of("dp2 / ep2")) == {}
    assert compiler_options(fold_abstract(Layout.parse("dp2"))) == {}


def test_compiler_options_with_least_effort():
    one, two = Layout.parse("dp1"), Layout.parse("dp2 / ep2")
    least = {"xla_backend_optimization_level": 0}
    assert compiler_options(mesh_of("dp1"), least_effort=True) == least
    hidden = compiler_options(fold_abstract(two, "gpu"))
    assert compiler_options(fold_abstract(two, "gpu"), least_effort=True) == hidden
    assert compiler_options(fold_abstract(one), least_effort=True) == {}


def test_compiler_options_of_one_graph():
    graph, one = ONE_GRAPH["gpu"], Layout.parse("dp1")
    assert compiler_options(fold_abstract(one, "gpu"), one_graph=True) == graph
    two = fold_abstract(Layout.parse("dp2 / ep2"), "gpu")
    options = compiler_options(two, overlap=False, one_graph=True)
    assert options == REQUIRED["gpu"] | graph
    assert compiler_options(mesh_of("dp1"), one_graph=True) == {}


def test_device_options_follow_the_devices(monkeypatch):
    monkeypatch.setitem(REQUIRED, "cpu", {"xla_of_nobody": True})
    assert device_options(jax.devices()[:2]) == {"xla_of_nobody": True}
    assert device_options(jax.devices()[:1]) == {}
    assert device_options([]) == {}
