"""What None of `moe.execution.Execution` stands for, by devices and by network."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from programs import mesh_of
from whole_network import loss_and_gradient

from moe.architecture.feed_forward import ClampedSwiGLU
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.implementations import (
    DEFAULTS,
    explain_selection,
    explain_selections,
    select,
    selected_implementation,
)
from moe.kernels import choice
from moe.kernels.choice import Devices, devices_of
from moe.weights import shapes
from sharding.folding import Layout, fold_abstract

SERVED = ModelConfig(
    vocab_size=64,
    num_layers=1,
    d_model=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=8,
    d_expert=64,
    dtype="bfloat16",
)


class Gpu(NamedTuple):
    """What an implementation is selected by: a device of a mesh, here or elsewhere."""

    compute_capability: str


@pytest.fixture
def on(monkeypatch):
    """Mesh of GPUs of a capability; an abstract mesh has this process's."""

    def on(capability, layout=""):
        monkeypatch.setattr(choice, "capability", lambda: capability)
        monkeypatch.setattr(choice, "capability", lambda: capability)
        return fold_abstract(Layout.parse(layout) if layout else Layout(), "gpu")

    return on


def names(config, mesh):
    return {field: selected_implementation(Model(config, mesh), field) for field in DEFAULTS}


PLAIN = {
    "attention": "blocked",
    "experts": "batched",
    "router": "plain",
    "decode_attention": "plain",
}


def test_defaults_by_device(on):
    assert names(SERVED, fold_abstract(Layout(), None)) == dict.fromkeys(DEFAULTS)
    assert names(SERVED, fold_abstract(Layout(), "tpu")) == PLAIN | {"experts": "blocks"}
    assert names(SERVED, fold_abstract(Layout(), "cpu")) == PLAIN | {"experts": "tiles"}
    kernels = dict.fromkeys(DEFAULTS, "mosaic")
    assert names(SERVED, on(9.0)) == kernels | {"attention": "cudnn"}
    assert names(SERVED, on(0.0)) == PLAIN
    assert names(SERVED, on(8.0)) == PLAIN | {"attention": "cudnn"}
    assert names(SERVED, on(10.0)) == PLAIN | {"attention": "cudnn", "router": "mosaic"}


def test_devices_of_a_mesh_are_asked_and_not_this_process(monkeypatch):
    """For a program that is compiled for absent GPUs."""
    mesh = mesh_of("dp2")
    monkeypatch.setattr(choice, "_mesh_devices", lambda mesh: (Gpu("9.0"), Gpu("10.0")))
    assert devices_of(mesh) == Devices("cpu", 0.0)
    assert devices_of(replace(mesh, platform="gpu")) == Devices("gpu", 9.0)
    monkeypatch.setattr(choice, "_mesh_devices", lambda mesh: (Gpu("gfx942"),))
    assert devices_of(replace(mesh, platform="gpu")) == Devices("gpu", 0.0)


def test_every_field_has_a_row_for_any_devices(on):
    odd = replace(SERVED, dtype="float32", d_model=96, num_experts=12, head_dim=32)
    for mesh in (*(fold_abstract(Layout(), name) for name in ("cpu", "tpu")), on(9.0)):
        for field in DEFAULTS:
            selected = select(Model(odd, mesh), field)
            assert selected.name not in ("cudnn", "mosaic")
            assert selected.explanation.startswith(f"{selected.name} (")
    assert select(Model(SERVED, fold_abstract(Layout(), "cpu")), "experts").name == "tiles"
    assert select(Model(SERVED, fold_abstract(Layout(), "tpu")), "experts").name == "blocks"


def test_a_name_that_is_given_stays(on):
    given = {"attention": "xla", "experts": "blocks", "router": "plain"}
    given |= {"decode_attention": "plain"}
    config = replace(SERVED, execution=Execution(**given))
    assert names(config, on(9.0)) == given
    assert explain_selections(Model(config, on(9.0))) == []


@pytest.mark.parametrize(
    ("field", "changed", "layout", "obstacle"),
    [
        ("experts", {"dtype": "float32"}, "", "rows of float32 (needs bfloat16"),
        ("experts", {"d_model": 192}, "", "d_model=192 (needs a multiple of 128)"),
        ("experts", {}, "tp2 / etp2", "32 hidden units per device (needs"),
        ("router", {"num_experts": 12}, "", "12 experts (needs"),
        ("router", {"num_experts": 256}, "", "256 experts (needs"),
        ("decode_attention", {"attention_sinks": True}, "", "attention sinks"),
        ("decode_attention", {"head_dim": 32}, "", "heads of 32 elements"),
        ("decode_attention", {"head_dim": 320}, "", "heads of 320 elements (needs"),
    ],
)
def test_default_names_obstacle_of_kernel(on, field, changed, layout, obstacle):
    config = replace(SERVED, **changed)
    assert explain_selection(Model(config, fold_abstract(Layout(), "cpu")), field) is None
    model = Model(config, on(9.0, layout))
    assert selected_implementation(model, field) == PLAIN[field]
    explanation = explain_selection(model, field)
    assert explanation is not None
    assert explanation.startswith(f"{PLAIN[field]} (")
    assert f"not mosaic: {obstacle}" in explanation
    assert f"{field} {explanation}" in explain_selections(model)
    assert "H200" in (explain_selection(Model(SERVED, on(9.0)), "experts") or "")


def test_a_network_without_experts_has_no_line_for_them(on):
    lines = explain_selections(Model(replace(SERVED, num_experts=0, d_ff=64), on(9.0)))
    assert [line.split()[0] for line in lines] == ["attention", "decode_attention"]


@pytest.mark.slow
def test_the_kernels_that_are_chosen_serve_experts_with_biases_and_other_activations(on):
    """Forward and backward can be lowered for CUDA."""
    mesh = on(9.0)
    wide = {"expert_bias": True, "activation": ClampedSwiGLU(alpha=1.702, limit=7.0)}
    for config in (SERVED, replace(SERVED, **wide)):
        program = jax.jit(loss_and_gradient(config, mesh))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2, 16), bool)
        exported = jax.export.export(program, platforms=["cuda"])(shapes(config), tokens)
        # Each of two products and its two gradients, and what moves their rows.
        assert exported.mlir_module().count("custom_call @mosaic_gpu_v2") > 6
