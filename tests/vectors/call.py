"""Calls of an objective by the rules for arrays (masks, poison, padding, dtypes, vmap, ...)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Batch = Mapping[str, Any]


class Kind(Enum):
    """Axes of a result: tokens, responses, a number."""

    TOKEN = "one result per token, of which each row depends on that row alone"
    BATCH = "results that depend on the whole batch, those of tokens among them"
    RESPONSE = "one result per response or token, of groups of responses"
    SCALAR = "one result per batch"
    LOSS = "losses: as they are, one per token of which each row depends on that row alone; reduced"
    LOSS_OF_BATCH = "losses: as they are, one per token that depends on the whole batch; reduced"


@dataclass(frozen=True)
class Call:
    """One call on the batch of `tests/jrl/losses/batches.py`.

    Attributes:
      kind: what comes back.
      settings: keywords; those that are functions are given the batch.
      arrays: arguments that a batch does not have under their names: another of its names, or a
        function of the batch.
      aggregations: of a loss, those that are tried; none is the default alone.
    """

    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, str | Callable[[Batch], Any]] = field(default_factory=dict)
    aggregations: Sequence[str] = ()


def token(arrays: Mapping[str, Any] | None = None, **settings: Any) -> Call:
    return Call(Kind.TOKEN, settings, arrays or {})


def batch(arrays: Mapping[str, Any] | None = None, **settings: Any) -> Call:
    return Call(Kind.BATCH, settings, arrays or {})


def response(arrays: Mapping[str, Any] | None = None, **settings: Any) -> Call:
    return Call(Kind.RESPONSE, settings, arrays or {})


def scalar(arrays: Mapping[str, Any] | None = None, **settings: Any) -> Call:
    return Call(Kind.SCALAR, settings, arrays or {})


def loss(
    arrays: Mapping[str, Any] | None = None, *, aggregations: Sequence[str] = (), **settings: Any
) -> Call:
    return Call(Kind.LOSS, settings, arrays or {}, aggregations)


def loss_of_batch(arrays: Mapping[str, Any] | None = None, **settings: Any) -> Call:
    return Call(Kind.LOSS_OF_BATCH, settings, arrays or {})


def of(name: str) -> Callable[[Batch], Any]:
    """An array of the batch as a setting."""
    return lambda b: b[name]
