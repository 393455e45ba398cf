"""Strings that name a variant: each is documented, and others are refused by name."""

import inspect
import subprocess
import sys
import typing

import pytest

import jrl


@pytest.mark.parametrize(
    ("choices", "function"),
    [
        (jrl.EntropySign, jrl.entropy_signal),
        (jrl.ProbabilityDistance, jrl.dppo_loss),
        (jrl.WeightLevel, jrl.mismatch_weights),
        (jrl.WeightMean, jrl.normalized_weights),
        (jrl.RejectionKind, jrl.divergence_rejection_mask),
        (jrl.RejectionOver, jrl.divergence_rejection_mask),
    ],
)
def test_every_choice_is_in_the_docstring(choices, function):
    for choice in typing.get_args(choices):
        assert f"``{choice}``" in (inspect.getdoc(function) or "")


@pytest.mark.slow
def test_other_choices_and_shapes_are_refused_without_the_help_of_run_time_types():
    program = """
import jax.numpy as jnp, jrl
x, short = jnp.ones((2, 3)), jnp.ones((2, 1))
for call in (
    lambda: jrl.entropy_signal(x, x, sign="paper"),
    lambda: jrl.dppo_loss(x, x, x, x, kind="js", max_divergence=1),
    lambda: jrl.mismatch_weights(x, x, x, level="row"),
    lambda: jrl.normalized_weights(x, x, over="batch"),
    lambda: jrl.divergence_rejection_mask(x, x, x, kind="k1", bound=1),
    lambda: jrl.divergence_rejection_mask(x, x, x, over="min", bound=1),
    lambda: jrl.entropy_signal(x, short),
    lambda: jrl.hapo_loss(x, x, x, x, short),
    lambda: jrl.kl_cov_loss(x, x, x, x, chosen=short),
    lambda: jrl.covariances(x, x, short),
    lambda: jrl.top_entropy_mask(x, short),
    lambda: jrl.off_policy_sequence_mask(x, short, x, x, max_divergence=1),
    lambda: jrl.icepop_weights(x, short),
    lambda: jrl.mismatch_statistics(x, short, x),
):
    try:
        call()
    except ValueError as error:
        print(error)
    else:
        print("accepted")
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    expected = [
        "sign='paper' is neither 'intended' nor 'release'",
        "kind='js' is neither 'tv' nor 'kl'",
        "level='row' is not a level of weights: choose one of token, sequence, geometric",
        "over='batch' is neither 'token' nor 'sequence'",
        "kind='k1' is neither 'k2' nor 'k3'",
        "over='min' is not a level of a divergence bound: choose one of token, sum, mean, max",
        "entropy (2, 3), mask (2, 1)",
        "logprobs (2, 3), signal (2, 1)",
        "logprobs (2, 3), chosen (2, 1)",
        "logprobs (2, 3), old_logprobs (2, 3), mask (2, 1)",
        "entropy (2, 3), mask (2, 1)",
        "logprobs (2, 3), old_logprobs (2, 1), mask (2, 3)",
        "weights (2, 3), mask (2, 1)",
        "logprobs (2, 3), behaviour_logprobs (2, 1), mask (2, 3)",
    ]
    messages = finished.stdout.splitlines()
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message
