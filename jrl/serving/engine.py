"""Interface of the decoding engine that a service drives."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.stream import StreamChunk


@runtime_checkable
class Engine(Protocol):
    """Engine that decodes rows a few tokens per call; `StreamEngine` documents the methods."""

    @property
    def slots(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def prefill_sizes(self) -> list[tuple[int, int]]: ...

    @property
    def step_sizes(self) -> list[int]: ...

    @property
    def cache_sizes(self) -> list[int]: ...

    @property
    def num_idle(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    @property
    def busy(self) -> bool: ...

    def load(self, weights: Any, version: int) -> None: ...

    def ask(self, requests: Sequence[Request]) -> None: ...

    def drop(self, rows: Collection[tuple[int, int]]) -> None: ...

    def tick(self, window: int) -> list[StreamChunk]: ...
