"""Layers that rotate in ways of their own, known before the program runs and while it runs."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from programs import jit

from moe.architecture.attention import MultiHeadLatentAttention
from moe.architecture.rope import LinearScaling, YarnScaling
from moe.attention.rotary import apply_rotary, rope, rotary_tables
from moe.config import ModelConfig

SCALING = YarnScaling(4.0, 16, attention_factor=1.3)
CONFIG = ModelConfig(
    7,
    num_layers=4,
    head_dim=12,
    sliding_window=3,
    full_attention_layers=(0, 2),
    rope_base=50.0,
    rope_scaling=SCALING,
    window_rope_base=20.0,
    nope_layers=(2,),
    rotary_dim=8,
)
POSITIONS = jnp.asarray([0, 3, 9, 1, 30], jnp.int32)
HEADS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 12)), jnp.float32)


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_rotates_with_its_own_wavelengths(layer):
    kinds = {0: (50.0, SCALING), 1: (20.0, None), 3: (20.0, None)}
    expected = HEADS
    if layer in kinds:
        first = rope(HEADS[..., :8], POSITIONS, *kinds[layer])
        expected = jnp.concatenate([first, HEADS[..., 8:]], axis=-1)
        assert np.abs(expected[1:, :, :8] - HEADS[1:, :, :8]).max() > 0.1
    found = apply_rotary(HEADS, POSITIONS, CONFIG, layer)
    np.testing.assert_array_equal(found, expected)


def test_a_number_known_at_run_time_gives_the_same():
    run = jit(lambda number: apply_rotary(HEADS, POSITIONS, CONFIG, number))
    for layer in range(4):
        expected = apply_rotary(HEADS, POSITIONS, CONFIG, layer)
        # Powers and sines of two programs: the last digits.
        np.testing.assert_allclose(run(jnp.int32(layer)), expected, atol=1e-5, err_msg=str(layer))


def test_rotary_cache_equals_computed_tables():
    turns = rotary_tables(31, CONFIG).gather(POSITIONS)
    run = jit(lambda number: apply_rotary(HEADS, turns, CONFIG, number))
    for layer in range(4):
        expected = apply_rotary(HEADS, POSITIONS, CONFIG, layer)
        found = apply_rotary(HEADS, turns, CONFIG, layer)
        np.testing.assert_array_equal(found, expected, err_msg=str(layer))
        # Sines and sums of two programs: the last digits.
        np.testing.assert_allclose(run(jnp.int32(layer)), expected, atol=1e-5, err_msg=str(layer))


def test_latent_attention_turns_a_part_of_its_own_width():
    mla = MultiHeadLatentAttention(8, q_lora_rank=None, qk_rope_head_dim=4, v_head_dim=6)
    config = ModelConfig(7, num_heads=2, num_kv_heads=2, head_dim=12, mla=mla)
    turns = rotary_tables(31, config).gather(POSITIONS)
    expected = apply_rotary(HEADS[..., 8:], POSITIONS, config, 0)
    np.testing.assert_array_equal(apply_rotary(HEADS[..., 8:], turns, config, 0), expected)


def test_interpolated_positions_are_shorter():
    stretched = rope(HEADS, 2 * POSITIONS, 50.0, LinearScaling(2.0))
    np.testing.assert_allclose(stretched, rope(HEADS, POSITIONS, 50.0), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rotary_dim": 7}, "rotary_dim=7 must be even"),
        ({"rotary_dim": 14}, r"rotary_dim=14 must be even and in 2\.\.head_dim=12"),
        ({"nope_layers": (4,)}, r"nope_layers=\(4,\) must be among the layers 0 to 3"),
        (
            {"sliding_window": None, "full_attention_layers": ()},
            "window_rope_base=20.0 must be above 0 and needs layers with a window",
        ),
        (
            {"rope_scaling": YarnScaling(4.0, 16, score_temperature=1.0)},
            "leave out score_temperature",
        ),
    ],
)
def test_rope_scaling_rejects_invalid_values(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changed)
