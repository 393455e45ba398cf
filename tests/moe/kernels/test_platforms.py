"""Which devices the kernels serve, what they say on others, and what runs there in their place."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiers import full_but
from whole_network import loss_and_gradient

from moe.config import ModelConfig
from moe.execution import Execution
from moe.experts.grouped_dot import grouped_dot
from moe.experts.permutation import permute_rows, unpermute_rows
from moe.kernels import choice
from moe.kernels.decode_attention import decode_attention
from moe.kernels.latent_decode import latent_decode_attention
from moe.kernels.layout import sorted_layout
from moe.kernels.routing import Rule, route
from moe.weights import shapes
from sharding.folding import Layout, fold_abstract

KERNEL = "mosaic_gpu_v2"


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


OPERATIONS = {
    "sorted_layout": (lambda ids, **of: sorted_layout(ids, 4, **of), (integers(16, 2),)),
    "permute": (permute_rows, (half(16, 128), integers(40), integers(16, 2))),
    "unpermute": (unpermute_rows, (half(40, 128), integers(16, 2), integers(40))),
    "route": (partial(route, rule=Rule(2)), (numbers(16, 8), numbers(8), numbers(16))),
    "grouped_dot": (grouped_dot, (half(72, 64), half(2, 64, 64), integers(2))),
    "decode_attention": (
        decode_attention,
        (half(3, 4, 64), half(3, 2, 64, 64), half(3, 2, 64, 64), integers(3), integers(3)),
    ),
    "latent_decode_attention": (
        partial(latent_decode_attention, scale=0.1, rank=128),
        (half(3, 4, 192), half(3, 1, 192, 64), integers(3), integers(3)),
    ),
}
HOPPER_ALONE = ("grouped_dot", "decode_attention", "latent_decode_attention")


def lowered(operation, platform, name=None):
    function, operands = OPERATIONS[operation]
    program = jax.jit(lambda *of: function(*of, implementation=name))
    return jax.export.export(program, platforms=[platform])(*operands).mlir_module()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("found", full_but([0.0, 8.9, 9.0, 10.0, 12.0], 8.9))
def test_a_gpu_that_the_kernel_is_not_written_for_is_refused(operation, found, monkeypatch):
    """With no GPU here it is lowered for one elsewhere. Later ones than Hopper's lack its matrix
    units and nothing else."""
    monkeypatch.setattr(choice, "capability", lambda: found)
    if found in (0.0, 9.0) or (found >= 10 and operation not in HOPPER_ALONE):
        assert KERNEL in lowered(operation, "cuda", "mosaic")
    else:
        with pytest.raises(ValueError, match=rf"GPUs of capability {found} \(needs"):
            lowered(operation, "cuda", "mosaic")
    assert KERNEL not in lowered(operation, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_tpu_has_the_plain_twin_and_no_kernel(operation):
    assert "custom_call" not in lowered(operation, "tpu").replace("custom_call @Sharding", "")
    with pytest.raises(ValueError, match=r"runs on NVIDIA GPUs .* lowered for tpu: use"):
        lowered(operation, "tpu", "mosaic")


PLATFORMS = ["tpu", "cuda"]


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_training_is_lowered_for_accelerators_without_one(platform, scanned):
    """Loss and gradient on eight devices, by what None chooses on them."""
    execution = Execution(remat="selective", buffer_factor=1.5, scan_layers=scanned)
    config = ModelConfig(
        vocab_size=32,
        num_layers=2,
        d_model=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_experts=8,
        experts_per_token=2,
        d_expert=64,
        sliding_window=8,
        dtype="bfloat16",
        execution=execution,
    )
    mesh = fold_abstract(Layout.parse("tp2 dp4 / ep8"), "tpu" if platform == "tpu" else "gpu")
    tokens, valid = integers(8, 16), jax.ShapeDtypeStruct((8, 16), bool)
    # Its format has no promise from XLA, and nothing is kept here.
    ragged = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    exported = jax.export.export(
        jax.jit(loss_and_gradient(config, mesh)), platforms=[platform], disabled_checks=[ragged]
    )(shapes(config), (tokens, valid))
    text = exported.mlir_module()
    # Slices of dynamic length are the default of TPUs, and not of GPUs.
    assert ("ragged_all_to_all" in text) == (platform == "tpu")
    assert KERNEL not in text and "custom_call @tpu_custom_call" not in text
