"""The defaults, one by one: those of the papers, and of the libraries where a paper has none.

A default is part of what a function computes, and a changed one changes curves without an error.
"""

import inspect

import pytest

import jrl
from jrl import diagnostics

# None, which means "off" or "counted here", is left out.
DEFAULTS = {
    "gae": {"gamma": 1.0, "lam": 0.95},
    "decoupled_gae": {"gamma": 1.0, "lam_policy": 0.95, "lam_critic": 1.0},
    "length_adaptive_lambda": {"alpha": 0.05, "floor": 0.0},
    "extended_gae": {"gamma": 1.0, "lam": 0.95, "ignore_last": 0},
    "grpo_advantages": {"scale": "group", "unbiased": True, "epsilon": 1e-06, "singleton": "zero"},
    "gpg_advantages": {"alpha": "informative"},
    "pass_at_k_advantages": {"scale": "group", "epsilon": 1e-06},
    "gdpo_advantages": {"whitened": True, "epsilon": 1e-06, "whiten_epsilon": 1e-08},
    "token_level_group_average": {"epsilon": 1e-06},
    "reinforce_plus_plus_advantages": {"gamma": 1.0, "whitened": True},
    "optimal_token_baseline": {"epsilon": 0.0, "lone_tail": False},
    "whiten": {"unbiased": True, "keep_mean": False, "epsilon": 1e-08},
    "ppo_loss": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "reinforce_loss": {"aggregation": "token-mean"},
    "cispo_loss": {
        "clip_high": 0.2,
        "level": "token",
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "vespo_loss": {
        "k_positive": 2.0,
        "lam_positive": 3.0,
        "k_negative": 3.0,
        "lam_negative": 2.0,
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "gspo_loss": {
        "clip_low": 0.0003,
        "clip_high": 0.0004,
        "gradient": "token",
        "max_log_ratio": 20.0,
        "aggregation": "seq-mean-token-mean",
    },
    "luspo_loss": {
        "clip_low": 0.002,
        "clip_high": 0.0025,
        "gradient": "token",
        "max_log_ratio": 20.0,
        "aggregation": "seq-mean-token-mean",
    },
    "gmpo_loss": {
        "clip_low": 0.4,
        "clip_high": 0.4,
        "max_log_ratio": 20.0,
        "aggregation": "seq-mean-token-mean",
    },
    "sapo_loss": {
        "tau_positive": 1.0,
        "tau_negative": 1.05,
        "level": "token",
        "max_log_ratio": 20.0,
        "aggregation": "seq-mean-token-mean",
    },
    "dro_loss": {"max_log_ratio": 20.0, "aggregation": "token-mean"},
    "entropy_statistics": {"quantile": 0.8},
    "standardized_entropy": {"quantile": 0.8},
    "entropy_signal": {"quantile": 0.8, "sign": "intended"},
    "adaptive_temperature": {"base": 1.0, "strength": 0.05, "max_signal": 1.0},
    "asymmetric_clip_bounds": {"clip_low": 0.2, "clip_high": 0.28, "strength": 1.0},
    "redistributed_advantages": {"clip_low": 0.2, "clip_high": 0.28, "strength": 1.0},
    "hapo_loss": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "clip_strength": 1.0,
        "redistribution": 1.0,
        "clip_dual": 10.0,
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "dppo_loss": {"max_ratio": 20.0, "max_log_ratio": 20.0, "aggregation": "token-mean"},
    "clip_cov_loss": {
        "fraction": 0.0002,
        "low": 1.0,
        "high": 5.0,
        "clip_low": 1.0,
        "clip_high": 1.0,
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "kl_cov_loss": {
        "fraction": 0.002,
        "coefficient": 1.0,
        "max_log_ratio": 20.0,
        "aggregation": "token-mean",
    },
    "top_entropy_mask": {"fraction": 0.2},
    "entropy_threshold": {"fraction": 0.2},
    "value_loss": {"aggregation": "token-mean"},
    "kl_estimate": {"kind": "k3", "max_log_ratio": 20.0},
    "kl_from_logits": {"direction": "policy||reference"},
    "adaptive_entropy_coefficient": {"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0},
    "overlong_penalty": {"floor": -1.0},
    "mismatch_weights": {"level": "token", "max_log_weight": 20.0},
    "truncated_weights": {"high": 2.0},
    "icepop_weights": {"low": 0.5, "high": 5.0},
    "sequence_masked_weights": {"max_log_weight": 20.0},
    "normalized_weights": {"over": "token"},
    "divergence_rejection_mask": {"kind": "k3", "over": "mean", "max_log_weight": 20.0},
    "mismatch_statistics": {"max_log_weight": 20.0},
    "aggregate": {"mode": "token-mean", "empty_rows": "skip"},
    "by_position": {"num_bins": 10},
    "relative_position": {"num_bins": 10},
    "calibration": {"low": 0.0, "high": 1.0, "num_bins": 10},
    "bootstrap_bias": {"gamma": 1.0},
    "terminal_reach": {"gamma": 1.0, "threshold": 0.01},
    "lambda_sensitivity": {"gamma": 1.0, "edges": ()},
    "guard_rate": {"floor": 0.0},
    "td_concentration": {"gamma": 1.0, "share": 0.05},
    "outcome_contradiction": {"gamma": 1.0},
    "bootstrap_bias_bound": {"gamma": 1.0},
}


def functions():
    things = [getattr(package, name) for package in (jrl, diagnostics) for name in package.__all__]
    return {thing.__name__: thing for thing in things if inspect.isfunction(thing)}


@pytest.mark.parametrize("name", functions())
def test_defaults(name):
    parameters = inspect.signature(functions()[name]).parameters.values()
    given = {p.name: p.default for p in parameters if p.default not in (p.empty, None)}
    assert given == DEFAULTS.get(name, {})
