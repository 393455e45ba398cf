"""Refusals: settings that contradict each other, unknown choices, arrays of the wrong shape.

`test_settings.py` has the numbers of one setting, `test_rows.py` arrays with one entry per row.
"""

import re

import jax
import numpy as np
import pytest
from annotations import unchecked

import jrl
from jrl import diagnostics

# Arrays of two rows and three tokens, of one token each, and of one entry per row.
X, SHORT = np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)
ROWS, GROUPS, THREE = np.ones(2, np.float32), np.zeros(2, int), np.zeros(3, int)

CHOICES = [
    (lambda: jrl.aggregate(X, X, "mean"), "mode='mean' is not an aggregation mode: choose one of"),
    (lambda: jrl.sapo_loss(X, X, X, X, aggregation="mean"), "mode='mean' is not an aggregation"),
    (lambda: jrl.gspo_loss(X, X, X, X, gradient="row"), "gradient='row' is neither 'token' nor"),
    (lambda: jrl.luspo_loss(X, X, X, X, gradient="tokens"), "gradient='tokens' is neither 'token'"),
    (lambda: jrl.dppo_loss(X, X, X, X, kind="js", max_divergence=1), "kind='js' is neither 'tv'"),
    (lambda: jrl.entropy_signal(X, X, sign="paper"), "sign='paper' is neither 'intended' nor"),
    (lambda: jrl.grpo_advantages(ROWS, GROUPS, scale="std"), "scale='std' is not a scale"),
    (lambda: jrl.grpo_advantages(ROWS, GROUPS, singleton="one"), "singleton='one' is not a rule"),
    (lambda: jrl.gpg_advantages(ROWS, GROUPS, alpha="all"), "alpha='all' is unknown"),
    (lambda: jrl.pass_at_k_advantages(ROWS, GROUPS, scale="batch"), "scale='batch' is not a scale"),
    (lambda: jrl.gae(X, X, X, implementation="pallas"), "'pallas' is neither 'scan' nor 'blocked'"),
    (lambda: jrl.kl_estimate(X, X, kind="k4"), "kind='k4' is not an estimator of KL: choose one"),
    (lambda: jrl.kl_from_logits(X, X, direction="forward"), "direction='forward' is neither"),
    (lambda: jrl.mismatch_weights(X, X, X, level="row"), "level='row' is not a level of weights"),
    (lambda: jrl.normalized_weights(X, X, over="batch"), "over='batch' is neither 'token' nor"),
    (lambda: jrl.divergence_rejection_mask(X, X, X, kind="k1", bound=1), "kind='k1' is neither"),
    (lambda: jrl.divergence_rejection_mask(X, X, X, over="min", bound=1), "over='min' is not a"),
    (lambda: jrl.conventions(like="rlax"), "like='rlax' is not a library with conventions here"),
]
NUMBERS = [
    (lambda: jrl.ppo_loss(X, X, X, X, clip_dual=1), "clip_dual=1 must be above 1, such as 3; None"),
    (lambda: jrl.ppo_loss(X, X, X, X, guard=1), "guard=1 must be above 1 + clip_high"),
    (lambda: jrl.ppo_loss(X, X, X, X, guard=1.2), "guard=1.2 must be above 1 + clip_high"),
    (lambda: jrl.ppo_loss(X, X, X, X, clip_high=X, guard=0.5), "guard=0.5 must be above 1"),
    (lambda: jrl.dppo_loss(X, X, X, X, kind="kl", max_divergence=1, max_ratio=1), "max_ratio=1"),
    (lambda: jrl.hapo_loss(X, X, X, X, X, redistribution=2), "redistribution=2 must be"),
    (lambda: jrl.hapo_loss(X, X, X, X, X, clip_dual=1), "clip_dual=1 must be above 1"),
    (lambda: jrl.entropy_statistics(X, X, quantile=1.5), "quantile=1.5 must be from 0 to 1"),
    (lambda: jrl.adaptive_temperature(X, base=0), "base=0 is a temperature"),
    (lambda: jrl.adaptive_temperature(X, strength=1), "reaches a temperature of 0"),
    (lambda: jrl.clip_cov_loss(X, X, X, X), "key=None cannot select tokens at random"),
    (lambda: jrl.clip_cov_loss(X, X, X, X, low=5, high=1), "low=5 must be below high=1"),
    (lambda: jrl.kl_cov_loss(X, X, X, X, fraction=2), "fraction=2 is a share"),
    (lambda: jrl.top_entropy_mask(X, X, fraction=0), "fraction=0 is a share of the tokens"),
    (lambda: jrl.top_entropy_mask(X, X, fraction=1.5), "fraction=1.5 is a share of the tokens"),
    (lambda: jrl.sapo_loss(X, X, X, X, tau_positive=0), "tau_positive=0 is a temperature and must"),
    (lambda: jrl.vespo_loss(X, X, X, X, k_positive=0), "k_positive=0 must be positive"),
    (lambda: jrl.vespo_loss(X, X, X, X, lam_negative=0.0), "lam_negative=0.0 must be positive"),
    (lambda: jrl.value_loss(X, X, X, X, clip=(0.1, -0.2)), "clip=-0.2 is a distance and cannot be"),
    (lambda: jrl.pass_at_k_exact_advantages(ROWS, GROUPS, k=1), "k=1 must be at least 2"),
    (lambda: jrl.token_level_group_average(ROWS, GROUPS, X, fallback=0), "fallback=0 must be"),
    (lambda: jrl.effective_length(ROWS, ROWS, window=0), "window=0 must be positive"),
    (lambda: jrl.length_adaptive_lambda(ROWS, alpha=0), "alpha=0 must be positive"),
    (lambda: jrl.length_adaptive_lambda(ROWS, floor=1.5), "floor=1.5 must lie in [0, 1]"),
    (lambda: jrl.gae(X, X, X, terminated=ROWS), "terminated is given without bootstrap_value"),
    (
        lambda: jrl.decoupled_gae(X, X, X, terminated=ROWS),
        "terminated is given without bootstrap_v",
    ),
    (lambda: jrl.icepop_weights(X, X, low=3, high=2), "low=3 must not be above high=2"),
    (
        lambda: jrl.geometric_rejection_mask(X, X, X, low=3, high=2),
        "low=3 must not be above high=2",
    ),
    (lambda: jrl.adaptive_kl_coefficient(0.1, 1.0, target=0, num_samples=1, horizon=1), "target=0"),
    (lambda: jrl.adaptive_entropy_coefficient(0.1, 1.0, low=2), "low=2 must not be above high"),
    (lambda: jrl.bounded_value(X, low=1, high=1), "low=1 must be below high=1"),
    (
        lambda: jrl.overlong_penalty(ROWS, max_length=3, buffer=1, floor=0.5),
        "floor=0.5 must not be",
    ),
    (
        lambda: jrl.overlong_penalty(ROWS, max_length=7, buffer=8),
        "buffer=8 must lie between 0 and ",
    ),
    (
        lambda: jrl.jsd_from_logits(X, X, beta=1.5),
        "beta=1.5 is the teacher's weight in the mixture, from 0 (forward KL) to 1 (reverse KL).",
    ),
    (
        lambda: jrl.distillation_advantages(X, X, X, coefficient=-1),
        "coefficient=-1 is a weight and cannot be negative; 0 is off.",
    ),
    (
        lambda: jrl.extrapolated_distillation_advantages(X, X, X, X, scale=-1),
        "scale=-1 scales a reward and cannot be negative; 1 imitates the teacher.",
    ),
    (
        lambda: jrl.entropy_from_logits(X, chunk_size=0),
        "chunk_size=0 must be at least 1; None is o",
    ),
    (
        lambda: jrl.aggregate(X, X, "seq-mean-token-sum-norm"),
        "max_length=None cannot normalise seq",
    ),
    (
        lambda: jrl.aggregate(X, X, "seq-mean-token-sum-norm", max_length=0),
        "max_length=0 cannot no",
    ),
    (
        lambda: jrl.aggregate(X, X, "seq-mean-token-mean", sequence_lengths=X),
        "sequence_lengths without num_sequences",
    ),
    (lambda: diagnostics.by_position(X, X, X, num_bins=0), "num_bins=0 must be at least 1"),
    (lambda: diagnostics.calibration(X, X, X, low=1.0), "low=1.0 must be below high=1.0"),
    (lambda: diagnostics.calibration(X, X, X, num_bins=0), "num_bins=0 must be at least 1"),
    (lambda: diagnostics.length_share(X, edges=(4, 4)), "edges=(4, 4) must increase"),
    (lambda: diagnostics.td_concentration(X, X, X, share=0), "share=0 must be in (0, 1]"),
    (lambda: diagnostics.guard_rate(ROWS, alpha=0), "alpha=0 must be positive"),
]
SHAPES = [
    (lambda: jrl.aggregate(X, SHORT), "per_token (2, 3), mask (2, 1)"),
    (lambda: jrl.masked_mean(X, SHORT), "x (2, 3), mask (2, 1)"),
    (lambda: jrl.ppo_loss(X, SHORT, X, X), "logprobs (2, 3), old_logprobs (2, 1), mask (2, 3)"),
    (lambda: jrl.cispo_loss(X, SHORT, X, X), "logprobs (2, 3), old_logprobs (2, 1), mask (2, 3)"),
    (lambda: jrl.ppo_loss(X, X, X[:, 0], X), "advantages has shape (2,), which does not broadcast"),
    (
        lambda: jrl.gmpo_loss(X, X, X[0], X),
        "advantages has shape (3,), which does not broadcast to",
    ),
    (
        lambda: jrl.ppo_loss(X, X, X, X, importance_weights=X[0]),
        "importance_weights has shape (3,)",
    ),
    (lambda: jrl.gspo_loss(X, X, X, X, clip_high=X[0]), "clip_high has shape (3,)"),
    (lambda: jrl.reinforce_loss(X, X, SHORT), "same tokens: logprobs (2, 3), mask (2, 1)."),
    (lambda: jrl.positive_example_loss(X, ROWS, SHORT), "logprobs (2, 3), mask (2, 1)"),
    (lambda: jrl.hapo_loss(X, X, X, X, SHORT), "logprobs (2, 3), signal (2, 1)"),
    (lambda: jrl.kl_cov_loss(X, X, X, X, chosen=SHORT), "logprobs (2, 3), chosen (2, 1)"),
    (lambda: jrl.covariances(X, X, SHORT), "logprobs (2, 3), old_logprobs (2, 3), mask (2, 1)"),
    (lambda: jrl.entropy_signal(X, SHORT), "entropy (2, 3), mask (2, 1)"),
    (lambda: jrl.top_entropy_mask(X, SHORT), "entropy (2, 3), mask (2, 1)"),
    (
        lambda: jrl.off_policy_sequence_mask(X, SHORT, X, X, max_divergence=1),
        "logprobs (2, 3), old_logprobs (2, 1), mask (2, 3)",
    ),
    (lambda: jrl.value_loss(X, X, SHORT, X), "old_values (2, 3), returns (2, 1), mask (2, 3)"),
    (lambda: jrl.explained_variance(X, SHORT, X), "values (2, 3), returns (2, 1), mask (2, 3)"),
    (lambda: jrl.gae(X, SHORT, X), "rewards (2, 3), values (2, 1), mask (2, 3)"),
    (lambda: jrl.gae(X, X, X, lam=X[0]), "lam has shape (3,)"),
    (
        lambda: jrl.gae(X, X, X, bootstrap_value=X),
        "bootstrap_value has shape (2, 3), which does no",
    ),
    (lambda: jrl.whiten(X, SHORT), "x (2, 3), mask (2, 1)"),
    (lambda: jrl.grpo_advantages(ROWS, THREE), "rewards (2,), groups (3,)"),
    (lambda: jrl.informative_groups(ROWS, THREE), "scores (2,), groups (3,)"),
    (lambda: jrl.gdpo_advantages(X, THREE), "groups has shape (3,) and must have one entry for"),
    (lambda: jrl.gdpo_advantages(X, GROUPS, weights=ROWS), "weights has shape (2,)"),
    (lambda: jrl.optimal_token_baseline(X, THREE, X, X, X), "groups has shape (3,) and must have"),
    (lambda: jrl.kl_estimate(X, SHORT), "logprobs (2, 3), reference_logprobs (2, 1)"),
    (lambda: jrl.kl_estimate(X, X, SHORT), "logprobs (2, 3), mask (2, 1)"),
    (lambda: jrl.kl_from_logits(X, SHORT, ROWS), "logits (2, 3), ref_logits (2, 1)"),
    (lambda: jrl.jsd_from_logits(X, SHORT), "logits (2, 3), teacher_logits (2, 1)"),
    (lambda: jrl.distillation_advantages(X, X, X, kl=SHORT), "kl (2, 1), mask (2, 3)"),
    (lambda: jrl.top_k_divergence(X, SHORT), "top_logprobs (2, 3), teacher_top_logprobs (2, 1)"),
    (lambda: jrl.icepop_weights(X, SHORT), "weights (2, 3), mask (2, 1)"),
    (lambda: jrl.mismatch_statistics(X, SHORT, X), "behaviour_logprobs (2, 1), mask (2, 3)"),
    (lambda: diagnostics.terminal_reach(X, lam=X[0]), "lam has shape (3,)"),
]


@pytest.mark.parametrize(("call", "message"), [*CHOICES, *NUMBERS, *SHAPES])
def test_refusal_is_one_line(call, message):
    with unchecked(), pytest.raises(ValueError, match=re.escape(message)) as error:
        jax.eval_shape(call)
    assert "\n" not in str(error.value)
