"""Runs that sample with attention and experts on devices of their own."""

from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    fresh_weights,
    sampled,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.config.run import RunConfig

TWO_SIDES = {"rollout_engine": "disaggregated", "rollout_split": "dp1 / ep1"}


def setup_of(**changes):
    run = small_run(warm_start_steps=0, layout="dp2", **changes)
    return small_setup(small_recipe(router_replay="R3"), run)


@pytest.mark.slow
def test_a_step_learns_from_the_same():
    """By turns on the same devices; what an update reads is the batch, choices of experts
    included."""
    one, two = setup_of(), setup_of(**TWO_SIDES)
    weights = fresh_weights(one)
    batches = [sampled(setup, weights) for setup in (one, two)]
    for name in ("tokens", "valid", "mask", "truncated", "choices"):
        np.testing.assert_array_equal(*(getattr(batch, name) for batch in batches))
    np.testing.assert_allclose(*(batch.old_logprobs for batch in batches), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_split": "dp1 / ep1"}, "rollout_split='dp1 / ep1' needs --rollout-engine"),
        ({"rollout_m2n": "transfer"}, "rollout_m2n='transfer' needs --rollout-engine"),
        ({"rollout_engine": "disaggregated"}, "give --rollout-split, for example"),
        (TWO_SIDES | {"rollout_layout": "dp2"}, "leave out --rollout-layout"),
        (TWO_SIDES | {"max_staleness": 2, "stale_cache": True}, "leave out --stale-cache"),
        ({"rollout_replan": 9}, "rollout_replan=9 needs --rollout-engine"),
        (TWO_SIDES | {"rollout_expert_slots": 0}, "rollout_expert_slots=0 must be at least 1"),
        (TWO_SIDES | {"rollout_micro_batches": 0}, "rollout_micro_batches=0 must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        RunConfig(**settings)
    assert "\n" not in str(error.value)


def test_devices_and_slots_of_two_sides_must_divide():
    with pytest.raises(ValueError, match="2 devices and the layout of training 1"):
        replace(setup_of(**TWO_SIDES), mesh=small_setup().mesh).rollout_mesh  # noqa: B018
    setup = setup_of(**TWO_SIDES, rollout_micro_batches=3)
    assert setup.geometry.slots(None) % 3 == 0
    with pytest.raises(
        ValueError, match="slots=4 does not divide over dp x tp x micro-batches = 3"
    ):
        setup.geometry.slots(4)
    ahead = setup_of(**TWO_SIDES, max_staleness=1, rollout_devices=3)
    with pytest.raises(ValueError, match="has 2 devices and rollout_devices=3"):
        ahead.rollout_mesh  # noqa: B018
