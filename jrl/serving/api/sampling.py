"""Sampling parameters of requests, and their defaults in generation_config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.rollout.adjustments import MAX_BIASES, NO_ADJUSTMENTS, Adjustments
from jrl.rollout.sampling import LEAST_TEMPERATURE, LEAST_TOP_P
from jrl.serving.api.fields import (
    ApiError,
    as_number,
    integer,
    invalid_argument,
    invalid_value,
    number,
)

DEFAULT_ARGUMENTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Arguments with defaults from a checkpoint, the same as in vLLM."""
SAMPLING_ARGUMENTS = (*DEFAULT_ARGUMENTS, "presence_penalty", "frequency_penalty", "logit_bias")
MAX_PENALTY, MAX_BIAS = 2.0, 100.0
LEAST_REPETITION, MAX_REPETITION = 0.01, 100.0
GENERATION_CONFIG = "generation_config.json"


def sampling_parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature, top-p and adjustments of a request, None if they change nothing; raises ApiError
    for values out of range."""
    temperature, top_p = number(body, "temperature", 0.0, 2.0), number(body, "top_p", 0.0, 1.0)
    greedy = "use temperature=0 for greedy decoding"
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        too_low = f"less than {LEAST_TEMPERATURE:g}, and logits divided by it overflow in float32"
        raise invalid_argument(
            "temperature", f"temperature={temperature:g} is {too_low}: {greedy}."
        )
    if top_p is not None and top_p < LEAST_TOP_P:
        raise invalid_argument("top_p", f"top_p={top_p:g} leaves no token in float32: {greedy}.")
    adjustments = Adjustments(
        # -1 is vLLM's value for all tokens.
        top_k=max(integer(body, "top_k", -1, None) or 0, 0),
        min_p=number(body, "min_p", 0.0, 1.0) or 0.0,
        presence_penalty=number(body, "presence_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        frequency_penalty=number(body, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY) or 0.0,
        repetition_penalty=number(body, "repetition_penalty", LEAST_REPETITION, MAX_REPETITION)
        or 1.0,
        biases=_biases(body.get("logit_bias")),
    )
    return {
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
        "adjustments": None if adjustments == NO_ADJUSTMENTS else adjustments,
    }


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    rule = f"an object of token ids and numbers in -{MAX_BIAS:g}..{MAX_BIAS:g}"
    if not isinstance(value, dict):
        raise invalid_value("logit_bias", value, rule)
    if len(value) > MAX_BIASES:
        raise invalid_argument(
            "logit_bias", f"logit_bias has {len(value)} tokens: give {MAX_BIASES} at most."
        )
    biases = []
    for token, stated in value.items():
        bias = as_number(stated)
        is_number = bias is not None and abs(bias) <= MAX_BIAS
        # The number of digits of a 32-bit id.
        if not (token.isascii() and token.isdigit() and len(token) < 10 and is_number):
            raise invalid_value("logit_bias", {token: stated}, rule)
        if bias:
            biases.append((int(token), bias))
    return tuple(biases)


def check_biases(adjustments: Adjustments | None, vocab_size: int) -> None:
    """Raises ApiError for a bias of a token that the vocabulary does not have."""
    for token, _ in () if adjustments is None else adjustments.biases:
        if token >= vocab_size:
            raise invalid_argument(
                "logit_bias",
                f"logit_bias has the token {token}, outside of the vocabulary of {vocab_size}: "
                "leave it out.",
            )


def read_generation_config(directory: Path) -> tuple[dict[str, Any], int | None]:
    """Default arguments of requests from a checkpoint's generation_config.json.

    Returns:
      The arguments, and the maximum tokens of a chat's completion (`max_new_tokens`); empty and
      None if the file or the setting does not exist.

    Raises:
      ValueError: for a file that cannot be read, or a value that is invalid in a request.
    """
    path = directory / GENERATION_CONFIG
    if not path.exists():
        return {}, None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        stated = {n: content[n] for n in DEFAULT_ARGUMENTS if content.get(n) is not None}
        sampling_parameters(stated)
        longest = integer(content, "max_new_tokens", 1, None)
    except (OSError, ValueError, ApiError) as error:
        raise ValueError(
            f"{path}: {str(error).rstrip('.')}: correct it, or serve with --generation-config none."
        ) from error
    return stated, longest


def with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a request with defaults for its missing arguments."""
    return {**defaults, **{name: value for name, value in body.items() if value is not None}}
