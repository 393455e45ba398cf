"""What is reported of a step."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked

from jrl.losses import ExplainedVariance, Mean
from jrl.recipes import Batch
from jrl.report.metrics import check_defined
from jrl.trainer.learner.metrics import ExpertLoad, FirstUpdate, Max, Outcome, PerUpdate
from jrl.trainer.summary import count_updates, describe, drift_alarm, summarise


def outcome(loss=0.0, grad_norm=0.0, finite=True, empty=False, **fields):
    return Outcome(
        np.float32(loss), np.float32(grad_norm), np.bool_(finite), np.bool_(empty), **fields
    )


def test_summary_pools_means_over_tokens():
    def explained(values, returns):
        return ExplainedVariance.of(jnp.array(values), jnp.array(returns), jnp.ones(len(values)))

    def actor(loss, empty, pg_loss, entropy, difference, largest, counts):
        metrics = {
            "actor/pg_loss": PerUpdate(np.float32(pg_loss)),
            "actor/entropy": Mean(np.float32(entropy[0]), np.int32(entropy[1])),
            "sampling/sampling_logp_difference/mean": FirstUpdate(
                Mean(np.float32(difference), np.int32(4))
            ),
            "sampling/sampling_logp_difference/max": FirstUpdate(Max(np.float32(largest))),
            "actor/largest_ratio": Max(np.float32(largest)),
        }
        load = ExpertLoad(np.array(counts))
        return outcome(loss, 1.0, empty=empty, load=load, metrics=metrics)

    def critic(loss, grad_norm, variance):
        load = ExpertLoad(np.array([[5.0, 0.0]]))
        metrics = {"critic/vf_explained_var": variance}
        return outcome(loss, grad_norm, load=load, metrics=metrics)

    history = [
        {"critic": critic(3.0, 2.0, explained([0.0, 1.0], [1.0, 1.0]))},
        {
            "critic": critic(1.0, 4.0, explained([2.0], [4.0])),
            "actor": actor(8.0, False, 6.0, (6.0, 3), 2.0, 0.5, [[1.0, 3.0], [2.0, 2.0]]),
        },
        {"actor": actor(2.0, False, 1.0, (1.0, 1), 90.0, 90.0, [[3.0, 1.0], [0.0, 4.0]])},
        # No token counts in it, and so it counts in nothing.
        {"actor": actor(77.0, True, 0.0, (0.0, 0), 0.0, 99.0, [[9.0, 0.0], [9.0, 0.0]])},
    ]
    values, returns = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 4.0])
    expected = {
        "actor/loss": 5.0,
        "actor/pg_loss": 3.5,
        "actor/entropy": 7 / 4,  # over tokens: the mean of means would be 1.5
        # The first mini-batch alone: after it the policy is no longer the one that sampled.
        "sampling/sampling_logp_difference/mean": 0.5,
        "sampling/sampling_logp_difference/max": 0.5,
        "actor/largest_ratio": 90.0,
        "actor/grad_norm": 1.0,
        # Over both mini-batches the first layer is even, and the second is 2 to 6.
        "moe/max_load": (1.0 + 1.5) / 2,
        "moe/min_load": (1.0 + 0.5) / 2,
        "critic/loss": 2.0,
        "critic/grad_norm": 3.0,
        "critic/vf_explained_var": 1 - np.var(returns - values) / np.var(returns),
    }
    summary = summarise(history)
    assert summary.keys() == expected.keys()
    for name, value in expected.items():
        assert summary[name] == pytest.approx(value, rel=1e-6), name  # float32
    assert summarise([]) == {}
    assert summarise(history[-1:]) == {}


def test_updates_are_counted_by_what_came_of_them():
    def one(finite, empty):
        return outcome(finite=finite, empty=empty)

    history = [
        {"critic": one(True, False)},
        {"critic": one(True, True), "actor": one(True, True)},
        {"critic": one(False, True), "actor": one(False, False)},  # the worse of two reasons
        {"critic": one(True, False), "actor": one(True, False)},
    ]
    assert count_updates(history) == {
        "training/optimizer_steps": 1.0,
        "training/nonfinite_skipped": 2.0,
        "training/empty_skipped": 2.0,
    }


@pytest.mark.parametrize(
    ("kl", "bound", "alarm"),
    [(0.02, 0.01, 1.0), (0.01, 0.01, 0.0), (np.nan, 0.01, 1.0), (np.inf, 0.01, 1.0)],
)
def test_a_drift_of_the_sampler_is_told(kl, bound, alarm):
    assert drift_alarm({"sampling/k3_kl": kl}, bound) == {"sampling/drift_alarm": alarm}


def test_without_a_measurement_or_a_bound_there_is_no_alarm():
    assert drift_alarm({}, 0.01) == drift_alarm({"sampling/k3_kl": 1.0}, None) == {}


@unchecked()
def test_scores_are_those_of_finished_responses():
    """Rows stand in no groups: nothing is said of them."""
    scores, lengths, cut = [1.0, 0.0, 0.5, 0.0], [4, 3, 5, 3], [False, False, True, False]
    one_turn = SimpleNamespace(request=SimpleNamespace(conversation=None))
    completions = [
        SimpleNamespace(
            score=score, length=length, truncated=truncated, verdict=None, trajectory=one_turn
        )
        for score, length, truncated in zip(scores, lengths, cut, strict=True)
    ]
    valid = jnp.arange(7)[None, :] < jnp.array(lengths)[:, None] + 1
    batch = Batch(
        tokens=jnp.zeros((4, 7), int),
        valid=valid,
        mask=valid,
        rewards=jnp.array([1.0, 0.0, 0.5, 0.0]),
        advantages=jnp.where(valid, 2.0, 9.0),
        finished=jnp.array([True, False, True, False]),
    )
    metrics = describe(completions, batch, batch.mask, None)
    check_defined(metrics)
    assert metrics["critic/score/mean"] == 0.75 and metrics["critic/rewards/min"] == 0.5
    assert metrics["response_length/mean"] == 4.5
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["critic/advantages/mean"] == 2 and metrics["training/tokens"] == 19
    assert not {"critic/score/group_std", "frac_reward_zero_std"} & metrics.keys()
    none = batch.replace(finished=jnp.zeros(4, bool))
    metrics = describe(completions, none, batch.mask, None)
    assert metrics.keys() == {
        "critic/advantages/mean",
        "critic/advantages/max",
        "critic/advantages/min",
        "training/tokens",
    }
