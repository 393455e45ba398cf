"""What None of `moe.execution.Execution` stands for, by devices and by network."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from whole_network import loss_and_gradient

from moe import implementations
from moe.architecture.feed_forward import ClampedSwiGLU
from moe.config import ModelConfig
from moe.execution import Execution
from moe.implementations import (
    KERNELS,
    explain_selection,
    selected_implementation,
    selection_obstacle,
)
from moe.kernels import choice
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


@pytest.fixture
def on(monkeypatch):
    """Makes this process one with GPUs of that capability."""

    def on(capability):
        monkeypatch.setattr(choice, "capability", lambda: capability)
        monkeypatch.setattr(implementations, "capability", lambda: capability)

    return on


def names(config, etp=1):
    return {field: selected_implementation(config, field, etp) for field in KERNELS}


def test_hopper_has_kernels_and_others_have_what_they_can_run(on):
    none = dict.fromkeys(KERNELS)
    assert names(SERVED) == none
    on(9.0)
    assert names(SERVED) == dict.fromkeys(KERNELS, "mosaic")
    on(8.0)
    assert names(SERVED) == none
    on(10.0)
    assert names(SERVED) == none | {"router": "mosaic"}


def test_a_name_that_is_given_stays(on):
    on(9.0)
    given = {"experts": "blocks", "router": "plain", "decode_attention": "plain"}
    assert names(replace(SERVED, execution=Execution(**given))) == given


@pytest.mark.parametrize(
    ("field", "changed", "etp", "obstacle"),
    [
        ("experts", {"dtype": "float32"}, 1, "rows of float32 (needs bfloat16"),
        ("experts", {"d_model": 192}, 1, "d_model=192 (needs a multiple of 128)"),
        ("experts", {}, 2, "32 hidden units per device (needs"),
        ("router", {"num_experts": 12}, 1, "12 experts (needs"),
        ("router", {"num_experts": 256}, 1, "256 experts (needs"),
        ("decode_attention", {"attention_sinks": True}, 1, "attention sinks"),
        ("decode_attention", {"head_dim": 32}, 1, "heads of 32 elements"),
    ],
)
def test_what_a_kernel_cannot_serve_is_left_to_others_and_said(on, field, changed, etp, obstacle):
    config = replace(SERVED, **changed)
    assert explain_selection(config, field, etp) is None
    on(9.0)
    assert (selection_obstacle(config, field, etp) or "").startswith(obstacle)
    assert selected_implementation(config, field, etp) is None
    assert (explain_selection(config, field, etp) or "").startswith(f"not mosaic: {obstacle}")
    assert "H200" in (explain_selection(SERVED, "experts") or "")


@pytest.mark.slow
def test_the_kernels_that_are_chosen_serve_experts_with_biases_and_other_activations(on):
    """Forward and backward are lowered for CUDA without a refusal."""
    on(9.0)
    wide = {"expert_bias": True, "activation": ClampedSwiGLU(alpha=1.702, limit=7.0)}
    for config in (SERVED, replace(SERVED, **wide)):
        program = jax.jit(loss_and_gradient(config, fold_abstract(Layout(), "gpu")))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2, 16), bool)
        exported = jax.export.export(program, platforms=["cuda"])(shapes(config), tokens)
        # Each of two products and its two gradients, and what moves their rows.
        assert exported.mlir_module().count("custom_call @mosaic_gpu_v2") > 6
