"""The settings with which our functions give the numbers of another library."""

from typing import Any, Literal, get_args

Library = Literal["verl", "trl", "openrlhf"]

# What differs from our defaults, or is worth stating beside them, by function.
_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "verl": {
        "aggregate": {"mode": "token-mean", "empty_rows": "skip"},
        "grpo": {"scale": "group", "unbiased": True, "epsilon": 1e-6, "singleton": "reward"},
        "whiten": {"unbiased": True, "epsilon": 1e-8, "min_variance": None},
        "ppo_loss": {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "clip_dual": 3.0,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
            "empty_rows": "skip",
        },
        "value_loss": {"clip": 0.5, "aggregation": "token-mean", "empty_rows": "skip"},
        "kl_estimate": {"kind": "k3", "max_log_ratio": 20.0, "max_value": 10.0},
        "overlong_penalty": {"floor": None},
    },
    "trl": {
        "aggregate": {"mode": "token-mean", "empty_rows": "count"},
        "grpo": {"scale": "group", "unbiased": True, "epsilon": 1e-4, "singleton": "zero"},
        "ppo_loss": {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "clip_dual": None,
            "max_log_ratio": None,
            "aggregation": "token-mean",
            "empty_rows": "count",
        },
        "kl_estimate": {"kind": "k3", "max_log_ratio": None, "max_value": None},
        "overlong_penalty": {"floor": -1.0},
    },
    "openrlhf": {
        "aggregate": {"mode": "token-mean", "empty_rows": "skip"},
        "grpo": {"scale": "group", "unbiased": True, "epsilon": 1e-9, "singleton": "zero"},
        "whiten": {"unbiased": False, "epsilon": 0.0, "min_variance": 1e-8},
        "ppo_loss": {
            "clip_low": 0.2,
            "clip_high": 0.2,
            "clip_dual": None,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
            "empty_rows": "skip",
        },
        "value_loss": {"clip": None, "aggregation": "token-mean", "empty_rows": "skip"},
        "kl_estimate": {"kind": "k1", "max_log_ratio": None, "max_value": 10.0},
    },
}


def conventions(*, like: Library) -> dict[str, dict[str, Any]]:
    """Keyword arguments that make our functions follow another library, by function.

    For people who compare curves: ``grpo(rewards, groups, **conventions(like="trl")["grpo"])``.
    Each entry holds the settings that differ from ours or from one another: how the standard
    deviation of a group is taken and what is added to it, whether rows without a true token count
    as sequences, what is clamped, and the bounds that the library has by default. Replace single
    ones as in any dictionary: ``{**settings["ppo_loss"], "clip_high": 0.28}``.

    What a setting cannot express is in the table of the documentation, among it OpenRLHF's GAE
    (pass ``values * mask`` and a mask without holes) and the 1e-8 that verl adds to the length of a
    row.

    Args:
      like: the library: verl 0.9, TRL 1.16 or OpenRLHF 0.11.

    Returns:
      A new dictionary from the name of a function to its keywords.

    Raises:
      ValueError: if the library is another one.

    Examples:
      >>> conventions(like="verl")["grpo"]["epsilon"], conventions(like="trl")["grpo"]["epsilon"]
      (1e-06, 0.0001)
    """
    if like not in get_args(Library):
        choices = ", ".join(get_args(Library))
        raise ValueError(f"like={like!r} has no conventions here: choose one of {choices}.")
    return {function: dict(settings) for function, settings in _SETTINGS[like].items()}
