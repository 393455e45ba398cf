"""Two sides give what one device gives, in whatever parts and by whatever way.

`tests/jrl/rollout/decoding/test_disaggregated.py` has a case in the quick tier.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from two_sides import (
    CONFIG,
    MIXED,
    ROWS,
    STEPS,
    live,
    one_side,
    sides,
    split_mesh,
    two_sides,
)

from moe.attention.rotary import YarnScaling
from moe.config import MultiHeadLatentAttention
from moe.disaggregated import programs
from moe.disaggregated.placement import Placement
from moe.disaggregated.runner import Runner
from moe.disaggregated.schedule import order

CLOSE = 1e-6
"""float32, of the largest logit: the sums of a token's experts come in another order."""
LATENT = replace(
    CONFIG,
    num_kv_heads=4,
    head_dim=9,
    mla=MultiHeadLatentAttention(kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=4, v_head_dim=3),
    rope_scaling=YarnScaling(4.0, 2, score_temperature=1.0),
)
REPLICATED = Placement.of(
    [
        *[[(expert % 2, expert // 2)] for expert in range(10)],
        [(0, 5), (1, 6)],
        [(1, 5), (0, 6)],
    ],
    num_devices=2,
)
"""Experts in another order, two of them on both devices."""


def check(runner, weights, micro_batches, config):
    logits, choices, of_prompts = two_sides(runner, weights, micro_batches)
    wanted, wanted_choices, wanted_of_prompts = one_side(config)
    logits, wanted = logits[live()], wanted[live()]
    np.testing.assert_allclose(logits, wanted, atol=CLOSE * np.abs(wanted).max())
    # What greedy rows would go on with.
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), np.argmax(wanted, axis=-1))
    np.testing.assert_array_equal(choices, wanted_choices)
    np.testing.assert_array_equal(of_prompts, wanted_of_prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "micro_batches", "config", "options"),
    [
        ("dp2 / ep2", 2, CONFIG, {}),
        ("dp1 / ep1", 4, CONFIG, {}),
        ("tp2 dp2 / ep2", 2, MIXED, {}),
        ("tp2 / ep3 etp2", 3, LATENT, {}),
        ("dp4 / ep12", 1, CONFIG, {"m2n": "collective"}),
        ("dp2 / ep2", 2, CONFIG, {"placement": REPLICATED}),
    ],
)
def test_two_sides_are_one(split, micro_batches, config, options, caplog):
    mesh = split_mesh(split)
    runner = Runner(config, mesh, records_choices=True, **options)
    runner.keeps_log = True
    halves = "attention_half", "experts_half"
    for half in halves:
        getattr(programs, half).clear_cache()
    weights = sides(mesh, config, options.get("placement"))
    with jax.log_compiles():
        check(runner, weights, micro_batches, config)
    # One program for the layers of prompts and one for those of steps, on each side.
    messages = [record.getMessage() for record in caplog.records]
    for half in halves:
        assert sum(text.startswith(f"Compiling jit({half})") for text in messages) == 2
    assert runner.log == list(
        order(config.num_expert_layers, micro_batches, lambda token: token < STEPS)
    )
    # Each device of attention sends each of the experts room for all its tokens, and gets as much
    # back: ids and probs go out beside them.
    sources, targets = mesh.attention.layout.num_devices, mesh.experts.layout.num_devices
    width, k = config.d_model, config.experts_per_token
    tokens = ROWS * (4 + STEPS) // sources // mesh.experts.layout.etp
    assert runner.bytes_sent == (
        config.num_expert_layers * sources * targets * tokens * 4 * (width + 2 * k + width)
    )
