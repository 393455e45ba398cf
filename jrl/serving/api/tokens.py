"""Requests of tokens: tokenization of texts and conversations, and generation from token ids."""

from collections.abc import Mapping
from typing import Any

from jrl.serving.api.fields import boolean, integer, invalid_argument, invalid_value, token_ids
from jrl.tasks.data.fields import short

MAX_IDS = 2**20
GENERATE_ARGUMENTS = ("model", "token_ids", "sampling_params", "cache_salt", "priority", "stream")
EXPERTS_START = "routed_experts_prompt_start"
COMPLETION_ONLY = ("prompt", "stream", "stream_options", "echo", "model", "response_format")
"""Arguments of completions that are no sampling parameters."""
TOKENIZE_ARGUMENTS = ("model", "prompt", "add_special_tokens", "return_token_strs")
DETOKENIZE_ARGUMENTS = ("model", "tokens")


def completion_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The body of a completion with the token ids and sampling parameters of a request of
    ``/inference/v1/generate``, and the first token that expert ids are returned for."""
    _check_arguments(body, GENERATE_ARGUMENTS)
    if boolean(body, "stream"):
        raise invalid_argument("stream", "stream=true is not supported here: leave it out.")
    if body.get("priority") not in (None, 0):
        raise invalid_value("priority", body["priority"], "0")
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise invalid_value("cache_salt", salt, "a text")
    parameters = body.get("sampling_params")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid_value("sampling_params", parameters, "an object")
    for name in COMPLETION_ONLY:
        if (parameters or {}).get(name) is not None:
            raise invalid_argument(
                f"sampling_params.{name}", f"sampling_params.{name} is no sampling parameter."
            )
    ids, parameters = ids_of(body, "token_ids"), dict(parameters or {})
    start = integer(parameters, EXPERTS_START, 0, None) or 0
    parameters.pop(EXPERTS_START, None)
    return {**parameters, "model": body.get("model"), "prompt": ids}, start


def text_to_tokenize(body: Mapping[str, Any]) -> tuple[str, bool, bool]:
    """Text of a request of ``/tokenize`` without messages, and whether the beginning of sequence
    precedes it and the strings of the tokens are returned."""
    _check_arguments(body, TOKENIZE_ARGUMENTS)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise invalid_value("prompt", prompt, "a text (or give messages)")
    adds = body.get("add_special_tokens") is None or boolean(body, "add_special_tokens")
    return prompt, adds, boolean(body, "return_token_strs")


def ids_to_detokenize(body: Mapping[str, Any]) -> list[int]:
    """Token ids of a request of ``/detokenize``."""
    _check_arguments(body, DETOKENIZE_ARGUMENTS)
    return ids_of(body, "tokens", empty=True)


def ids_of(body: Mapping[str, Any], name: str, *, empty: bool = False) -> list[int]:
    ids = body.get(name)
    if not isinstance(ids, list) or not (ids or empty):
        raise invalid_value(name, ids, "a list of token ids")
    return list(token_ids(body, name, MAX_IDS))


def _check_arguments(body: Mapping[str, Any], supported: tuple[str, ...]) -> None:
    for name, value in body.items():
        if name not in supported and value is not None:
            raise invalid_argument(
                name, f"{name}={short(value)} is not supported: leave it out.", "unknown_parameter"
            )
