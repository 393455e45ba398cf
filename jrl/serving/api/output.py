"""Arguments that determine how a choice ends, and what is returned of it, named as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jrl.serving.api.fields import boolean, integer, invalid_argument, stops, token_ids

MAX_STOP_IDS = 128
MAX_TOP_LOGPROBS = 20
"""Limit of top log-probabilities per position."""
OUTPUT_ARGUMENTS = (
    *("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"),
)


@dataclass(frozen=True)
class Output:
    """End and contents of the choices of a request.

    Attributes:
      stops: stop strings; a choice ends before the first.
      stop_ids: tokens that end a choice, besides the stop tokens of the checkpoint.
      keeps_stop: true if the text includes the stop string or token that ended it.
      min_tokens: tokens before which no stop ends a choice.
      ignores_end: true if the checkpoint's own stop tokens are never sampled.
      skips_special: false if special tokens are written out in the text.
      returns_ids: true if the token ids of prompts and choices are returned.
      names_ids: true if tokens of log-probabilities are written as ``token_id:7``.
      prompt_logprobs: number of top log-probabilities per position of the prompt; None returns
        none.
    """

    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    keeps_stop: bool = False
    min_tokens: int = 0
    ignores_end: bool = False
    skips_special: bool = True
    returns_ids: bool = False
    names_ids: bool = False
    prompt_logprobs: int | None = None


def output_of(body: Mapping[str, Any], *, stream: bool) -> Output:
    """Output arguments of a request; raises ApiError for invalid ones."""
    prompt_logprobs = integer(body, "prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise invalid_argument(
            "prompt_logprobs",
            f"prompt_logprobs={prompt_logprobs} is not supported with stream=true: leave out one "
            "of them.",
        )
    output = Output(
        stops=stops(body),
        stop_ids=token_ids(body, "stop_token_ids", MAX_STOP_IDS),
        keeps_stop=boolean(body, "include_stop_str_in_output"),
        min_tokens=integer(body, "min_tokens", 0, None) or 0,
        ignores_end=boolean(body, "ignore_eos"),
        skips_special=body.get("skip_special_tokens") is None
        or boolean(body, "skip_special_tokens"),
        returns_ids=boolean(body, "return_token_ids"),
        names_ids=boolean(body, "return_tokens_as_token_ids"),
        prompt_logprobs=prompt_logprobs,
    )
    longest = integer(body, "max_completion_tokens", 0, None)
    longest = integer(body, "max_tokens", 0, None) if longest is None else longest
    if longest is not None and output.min_tokens > longest:
        raise invalid_argument(
            "min_tokens", f"min_tokens={output.min_tokens} is more than max_tokens={longest}."
        )
    return output
