"""The report on a critic: numbers of critics that are known, and its picture."""

import numpy as np
import pytest
from tiers import full_but

from jrl.report.critic import BINS, CriticRollout, critic_diagnostics
from jrl.report.critic_plots import plot_diagnostics


def rollout_of(knows: float, **changes) -> CriticRollout:
    """Ten groups of four responses whose critic knows the outcome to this degree from the start."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 30, 40)
    mask = np.arange(32) < lengths[:, None]
    mask[:, 2] = False  # a hole
    correct = np.arange(40) % 4 < np.arange(40) // 8
    values = np.where(mask, knows * correct[:, None] + (1 - knows) / 2, np.nan)
    rewards = np.where(np.arange(32) == lengths[:, None] - 1, correct[:, None], 0.0)
    return CriticRollout(
        **{
            "values": values.astype(np.float32),
            "rewards": rewards.astype(np.float32),
            "mask": mask,
            "correct": correct,
            "groups": np.arange(40) // 4,
            "lam": 0.9,
            **changes,
        }
    )


@pytest.mark.slow
def test_a_critic_that_knows_and_one_that_does_not():
    knows, blind = (
        critic_diagnostics(rollout_of(1.0)).summary(),
        critic_diagnostics(rollout_of(0.0)).summary(),
    )
    assert knows["explained_variance"] == 1 and abs(blind["explained_variance"]) < 1e-5
    assert knows["calibration/brier"] == 0 and blind["calibration/brier"] == pytest.approx(0.25)
    assert knows["bootstrap_bias/upper_estimate"] == 0 < blind["bootstrap_bias/upper_estimate"]
    assert knows["advantage/std"] == 0 < blind["advantage/std"]
    assert blind["td/top_5_percent_mass"] > 0.9 and blind["outcome_contradiction"] == 0
    assert knows["groups/all_wrong"] == blind["groups/all_wrong"] == pytest.approx(0.2)


@pytest.mark.slow
def test_parts_of_a_response_average_to_the_whole():
    report = critic_diagnostics(rollout_of(0.5))
    tokens = np.asarray(report.position.tokens)
    assert len(report.errors) == len(report.contradictions) == BINS
    full = np.average(report.contradictions, weights=tokens)
    assert full == pytest.approx(report.contradiction, abs=1e-6)


@pytest.mark.slow
def test_the_discount_is_in_every_number():
    """Of a critic that knows the discounted return exactly nothing is left, with its gamma."""
    gamma = 0.8
    plain = rollout_of(1.0)
    to_go = np.cumsum(plain.mask[:, ::-1], axis=1)[:, ::-1] - plain.mask
    values = np.where(plain.mask, plain.values * gamma**to_go, np.nan).astype(np.float32)
    report = critic_diagnostics(rollout_of(1.0, values=values, gamma=gamma))
    # Float32 sums; without the discount the errors are tenths of a reward.
    np.testing.assert_allclose(report.errors, 0, atol=1e-6)
    assert report.summary()["td/identity_gap"] < 1e-5
    assert report.summary()["bootstrap_bias/bound"] < 1e-6
    # Values of 1/2 throughout: each but the last falls short of them by what a token costs.
    flat = critic_diagnostics(rollout_of(0.0, gamma=gamma))
    assert flat.errors[0] == pytest.approx(0.5 * (1 - gamma), rel=1e-5)
    tokens = np.asarray(flat.position.tokens)
    full = np.average(flat.contradictions, weights=tokens)
    assert full == pytest.approx(flat.contradiction, abs=1e-6)


@pytest.mark.slow
def test_only_an_adaptive_lambda_has_a_guard():
    fixed = critic_diagnostics(rollout_of(0.5))
    lam = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
    adaptive = critic_diagnostics(rollout_of(0.5, lam=lam, alpha=0.1))
    assert fixed.guard_rate is None and "lambda/guard_rate" not in fixed.summary()
    assert 0 < adaptive.summary()["lambda/guard_rate"] < 1
    # One row has lam = 1, whose horizon has no end.
    assert "terminal_reach/horizon" not in adaptive.summary()


def test_a_rollout_without_a_token_is_refused():
    with pytest.raises(ValueError, match="has no sampled token"):
        critic_diagnostics(rollout_of(0.5, mask=np.zeros((40, 32), bool)))


@pytest.mark.slow
@pytest.mark.parametrize("knows", full_but([0.0, 1.0], 1.0))
def test_the_picture_is_drawn_for_critics_without_errors_or_sense(knows, tmp_path):
    path = plot_diagnostics(rollout_of(knows), tmp_path / "new" / "critic.png", "a critic")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 50_000


@pytest.mark.slow
def test_one_token_is_enough_for_a_picture(tmp_path):
    mask = np.zeros((40, 32), bool)
    mask[3, 7] = True
    assert plot_diagnostics(rollout_of(0.5, mask=mask), tmp_path / "critic.png").exists()
