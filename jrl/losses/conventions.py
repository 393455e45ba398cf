"""Settings that reproduce the numbers of verl, TRL and OpenRLHF."""

from typing import Any, Literal

from jrl.losses import settings

Library = Literal["verl", "trl", "openrlhf"]

VERSIONS = {"verl": "verl 0.9", "trl": "TRL 1.16", "openrlhf": "OpenRLHF 0.11"}

# Aggregation: over tokens or sequences, and whether a fully masked row counts as a sequence.
_TOKENS = {"aggregation": "token-mean", "empty_rows": "skip"}
_SEQUENCES = {"aggregation": "seq-mean-token-mean", "empty_rows": "skip"}
_TRL_TOKENS = {**_TOKENS, "empty_rows": "count"}
_TRL_SEQUENCES = {**_SEQUENCES, "empty_rows": "count"}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_GSPO = {**_CLIP, "clip_dual": None, "max_log_ratio": None}
_SAPO = {"tau_positive": 1.0, "tau_negative": 1.05, "level": "token"}
_COV = {"fraction": 2e-4, "max_log_ratio": None, **_TOKENS}

_VERL: dict[str, dict[str, Any]] = {
    "aggregate": {"mode": "token-mean", "empty_rows": "skip"},
    "gae": {},
    "grpo_advantages": {"scale": "group", "unbiased": True, "epsilon": 1e-6, "singleton": "reward"},
    "dr_grpo_advantages": {},
    "rloo_advantages": {},
    "opo_advantages": {},
    # Counts responses with a nonzero reward, also in groups without variance.
    "gpg_advantages": {"alpha": "nonzero"},
    "pass_at_k_advantages": {"scale": "group", "epsilon": 1e-6},
    "gdpo_advantages": {"whitened": True, "epsilon": 1e-6, "whiten_epsilon": 1e-8},
    "reinforce_plus_plus_advantages": {"whitened": True},
    "reinforce_plus_plus_baseline_advantages": {},
    "remax_advantages": {},
    "optimal_token_baseline": {"epsilon": 1e-8, "lone_tail": True},
    "whiten": {"unbiased": True, "epsilon": 1e-8, "min_variance": None},
    "ppo_loss": {**_CLIP, "clip_dual": 3.0, "max_log_ratio": 20.0, **_TOKENS},
    "gpg_loss": {**_TOKENS},
    "cispo_loss": {**_CLIP, "level": "token", "max_log_ratio": 20.0, **_TOKENS},
    # verl clamps the mean log-ratio of the sequence instead, at +10.
    "gspo_loss": {**_GSPO, "gradient": "token", **_TOKENS},
    "gmpo_loss": {**_CLIP, "max_log_ratio": None, **_SEQUENCES, "empty_rows": "count"},
    "sapo_loss": {**_SAPO, "max_log_ratio": 20.0, **_SEQUENCES},
    "dro_loss": {"max_log_ratio": None, **_TOKENS},
    # The bounds are clip_ratio_low and clip_ratio_high for both kinds; the cap is clip_ratio_c.
    "dppo_loss": {"max_divergence": (0.2, 0.2), "max_ratio": 3.0, "max_log_ratio": 20.0, **_TOKENS},
    "clip_cov_loss": {**_COV, "low": 1.0, "high": 5.0, **_CLIP},
    "kl_cov_loss": {**_COV, "coefficient": 0.1},
    "value_loss": {"clip": 0.5, **_TOKENS},
    "kl_estimate": {"kind": "k3", "max_log_ratio": 20.0, "max_value": 10.0},
    "overlong_penalty": {"floor": None},
    "mismatch_weights": {"level": "sequence", "max_log_weight": 20.0},
    "truncated_weights": {"high": 2.0, "low": None},
}

_TRL: dict[str, dict[str, Any]] = {
    "aggregate": {"mode": "token-mean", "empty_rows": "count"},
    "grpo_advantages": {"scale": "group", "unbiased": True, "epsilon": 1e-4, "singleton": "zero"},
    "dr_grpo_advantages": {},
    "gdpo_advantages": {"whitened": True, "epsilon": 1e-4, "whiten_epsilon": 0.0},
    "ppo_loss": {**_CLIP, "clip_dual": None, "max_log_ratio": None, **_TRL_TOKENS},
    # In TRL epsilon_high is the cap itself: its recommended 5 is 1 + 4.
    "cispo_loss": {
        "clip_low": None,
        "clip_high": 4.0,
        "level": "token",
        "max_log_ratio": None,
        **_TRL_TOKENS,
    },
    "vespo_loss": {
        "k_positive": 2.0,
        "lam_positive": 3.0,
        "k_negative": 3.0,
        "lam_negative": 2.0,
        "max_log_ratio": 20.0,
        **_TRL_TOKENS,
    },
    "gspo_loss": {**_GSPO, "gradient": "sequence", **_TRL_SEQUENCES},
    "luspo_loss": {**_GSPO, "gradient": "sequence", **_TRL_SEQUENCES},
    "sapo_loss": {**_SAPO, "max_log_ratio": None, **_TRL_SEQUENCES},
    "kl_estimate": {"kind": "k3", "max_log_ratio": None, "max_value": None},
    # Both masks are off by default: all tokens and all sequences are kept.
    "top_entropy_mask": {"fraction": 1.0},
    "off_policy_sequence_mask": {"max_divergence": float("inf")},
    "adaptive_entropy_coefficient": {"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0},
    "overlong_penalty": {"floor": -1.0},
    "mismatch_weights": {"level": "sequence", "max_log_weight": None},
    "icepop_weights": {"low": None, "high": 3.0},
}

_OPENRLHF: dict[str, dict[str, Any]] = {
    "aggregate": {"mode": "token-mean", "empty_rows": "skip"},
    "gae": {},
    "grpo_advantages": {"scale": "group", "unbiased": True, "epsilon": 1e-9, "singleton": "zero"},
    "dr_grpo_advantages": {},
    "rloo_advantages": {},
    # OpenRLHF whitens separately: by `whiten` with the settings below.
    "reinforce_plus_plus_advantages": {"whitened": False},
    "whiten": {"unbiased": False, "epsilon": 0.0, "min_variance": 1e-8},
    "ppo_loss": {**_CLIP, "clip_dual": None, "max_log_ratio": 20.0, **_TOKENS},
    "gspo_loss": {**_GSPO, "gradient": "sequence", **_SEQUENCES},
    "value_loss": {"clip": None, **_TOKENS},
    "kl_estimate": {"kind": "k1", "max_log_ratio": None, "max_value": 10.0},
    "mismatch_weights": {"level": "token", "max_log_weight": None},
    "truncated_weights": {"high": 5.0, "low": 0.5},
    "icepop_weights": {"low": 0.5, "high": 5.0},
    "sequence_masked_weights": {"low": 0.5, "high": 5.0, "max_log_weight": None},
}

_SETTINGS = {"verl": _VERL, "trl": _TRL, "openrlhf": _OPENRLHF}


class Conventions(dict[str, dict[str, Any]]):
    """Keyword arguments by function name; the KeyError of a missing name lists the others."""

    def __init__(self, library: Library):
        super().__init__({name: dict(x) for name, x in _SETTINGS[library].items()})
        self._library = VERSIONS[library]

    def __missing__(self, function: str) -> dict[str, Any]:
        raise KeyError(
            f"{self._library} has no counterpart of {function!r}, or none that settings can "
            f"express: choose one of {', '.join(self)}."
        )


def conventions(*, like: Library) -> Conventions:
    """Keyword arguments, by function, with which jrl gives the numbers of another library.

    For comparing training curves: ``ppo_loss(..., **conventions(like="trl")["ppo_loss"])``. There
    is an entry for each advantage, loss, divergence and weight that the library has, under the name
    in jrl, with the library's defaults: the standard deviation of a group and its epsilon, whether
    fully masked rows count as sequences, clamps, and clip bounds. An empty entry is a
    function without settings. Arguments that have no default there (`beta` of `dro_loss`, `kind` of
    `dppo_loss`) must still be passed. Override single settings as in any dictionary:
    ``{**settings["ppo_loss"], "clip_high": 0.28}``.

    The documentation lists the differences that settings cannot express, by function. Among them
    are OpenRLHF's GAE (pass ``values * mask`` and a mask without holes) and the 1e-8 that verl adds
    to the length of a row.

    Args:
      like: the library: verl 0.9, TRL 1.16 or OpenRLHF 0.11.

    Returns:
      A new dictionary from function name to keyword arguments. For a function that the library
      lacks, its KeyError says so.

    Raises:
      ValueError: if the library is another one.

    Examples:
      >>> [conventions(like=x)["grpo_advantages"]["epsilon"] for x in ("verl", "trl")]
      [1e-06, 0.0001]
      >>> conventions(like="trl")["gspo_loss"]["gradient"], "gmpo_loss" in conventions(like="trl")
      ('sequence', False)
    """
    settings.choice("like", like, Library, "a library with conventions here")
    return Conventions(like)
