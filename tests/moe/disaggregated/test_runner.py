"""Two sides give what one device gives, in whatever parts and by whatever way."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from references import placement_of
from tiers import full_but
from two_sides import (
    CONFIG,
    CROWDED,
    MIXED,
    ROWS,
    STEPS,
    live,
    noise,
    one_side,
    sides,
    split_mesh,
    two_sides,
)

from moe.architecture.rope import YarnScaling
from moe.config import MultiHeadLatentAttention
from moe.disaggregated.balance import plan_placement
from moe.disaggregated.placement import Placement
from moe.disaggregated.runner import Runner
from moe.disaggregated.schedule import order_programs
from moe.disaggregated.split import devices_of

CLOSE = 1e-6
"""float32, of the largest logit: the sums of a token's experts come in another order."""
LATENT = replace(
    CONFIG,
    num_kv_heads=4,
    head_dim=9,
    mla=MultiHeadLatentAttention(kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=4, v_head_dim=3),
    rope_scaling=YarnScaling(4.0, 2, score_temperature=1.0),
)
REPLICATED = placement_of(
    [
        *[[(expert % 2, expert // 2)] for expert in range(10)],
        [(0, 5), (1, 6)],
        [(1, 5), (0, 6)],
    ],
    num_devices=2,
)
"""Experts in another order, two of them on both devices."""

SHARED = replace(CONFIG, d_ff=4)
"""Two layers of routed experts with a shared one."""
RATIOS = "dp1 / ep1", "dp2 / ep2", "tp2 dp2 / ep2", "dp2 / ep6", "dp4 / ep12"
# Of the ratio, the micro-batches, copies of experts and drawn tokens, any two in every combination.
COVERING = [
    (split, m, (ratio + m) % 2 == 1, (ratio + m // 2) % 2 == 1, SHARED)
    for ratio, split in enumerate(RATIOS)
    for m in (1, 2, 3, 4)
]


class Counted:
    """An exchange, with the bytes of what came by it to devices of the other side."""

    def __init__(self, exchange, source):
        self.exchange, self.source, self.num_bytes = exchange, {*devices_of(source)}, 0

    def __call__(self, parts, message):
        came = self.exchange(parts, message)
        shards = [shard for array in came for shard in array.addressable_shards]
        assert not self.source & {shard.device for shard in shards}
        self.num_bytes += sum(shard.data.nbytes for shard in shards)
        return came


def counted(runner):
    """Has the runner's exchanges counted."""
    runner._out = Counted(runner._out, runner.mesh.attention)
    runner._back = Counted(runner._back, runner.mesh.experts)
    return runner


def crossed(runner):
    return runner._out.num_bytes + runner._back.num_bytes


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
    runner = counted(Runner(config, mesh, records_choices=True, **options))
    runner.keeps_log = True
    halves = "attention_half", "experts_half"
    jax.clear_caches()
    weights = sides(mesh, config, options.get("placement"))
    with jax.log_compiles():
        check(runner, weights, micro_batches, config)
    # One program for the layers of prompts and one for the layers of steps, on each side.
    messages = [record.getMessage() for record in caplog.records]
    for half in halves:
        assert sum(text.startswith(f"Compiling jit({half})") for text in messages) == 2
    assert runner.log == list(
        order_programs(config.num_expert_layers, micro_batches, lambda token: token < STEPS)
    )
    # Each device of attention sends each of the experts room for all its tokens, and gets as much
    # back: ids and probs go out beside them.
    sources, targets = mesh.attention.layout.num_devices, mesh.experts.layout.num_devices
    width, k = config.d_model, config.experts_per_token
    tokens = ROWS * (4 + STEPS) // sources // mesh.experts.layout.etp
    assert runner.bytes_sent == (
        config.num_expert_layers * sources * targets * tokens * 4 * (width + 2 * k + width)
    )
    assert runner.bytes_sent == crossed(runner)


@functools.cache
def sides_of(split, copies, config):
    """A runner and its weights; with copies each device has a slot more, for what is hot."""
    mesh, places = split_mesh(split), None
    peers = mesh.experts.layout.ep
    if copies:
        loads = np.random.default_rng(1).integers(1, 60, config.num_experts)
        placed = plan_placement(loads.astype(float), config.num_experts + peers, peers)
        places = Placement.from_slots(placed, peers)
    runner = counted(Runner(config, mesh, placement=places, records_choices=True))
    return runner, sides(mesh, config, places)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "micro_batches", "copies", "sampled", "config"),
    # In the last one every token goes to experts of the first device alone.
    full_but([*COVERING, ("dp4 / ep4", 2, False, False, CROWDED)], COVERING[5], COVERING[7]),
)
def test_both_go_on_with_the_same_tokens(split, micro_batches, copies, sampled, config):
    """Each row's next token is the likeliest, or drawn."""
    runner, weights = sides_of(split, copies, config)
    before = runner.bytes_sent - crossed(runner)
    logits, choices, of_prompts = two_sides(runner, weights, micro_batches, sampled=sampled)
    wanted, wanted_choices, wanted_of_prompts = one_side(config, sampled)
    tokens, wanted_tokens = (np.argmax(x + noise(sampled), axis=-1) for x in (logits, wanted))
    np.testing.assert_array_equal(tokens[live()], wanted_tokens[live()])
    np.testing.assert_allclose(
        logits[live()], wanted[live()], atol=CLOSE * np.abs(wanted[live()]).max()
    )
    np.testing.assert_array_equal(choices[live()], wanted_choices[live()])
    np.testing.assert_array_equal(of_prompts, wanted_of_prompts)
    assert runner.bytes_sent - crossed(runner) == before == 0
    if config.selection_bias:
        assert np.all(choices[live()] < config.num_experts // 4)
