"""Prefix cache: tokens whose keys and values are in the slots, of rows in flight and of ended rows
until another row takes their slot.

A request that begins with them runs its other tokens only (`jrl.rollout.decoding.extension`), for
example the next turn of a conversation.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jrl.rollout.decoding.requests import Request

MAX_EXTENSION = 4
"""Largest number of new tokens that extend a cached one. Others are packed with other prompts in a
prefill, which runs them faster than the pieces of an extension."""


class Extension(NamedTuple):
    """Admission of a request whose first tokens are in the cache.

    Attributes:
      slot: its slot.
      source: slot of the same rank with the tokens, perhaps the same slot.
      num_cached: first tokens of the request that are in the cache.
    """

    request: Request
    slot: int
    source: int
    num_cached: int


class PrefixCache:
    """Tokens in the slots of an engine.

    Args:
      min_tokens: fewest cached tokens that are worth an extension of their own.
      per_rank: slots of each rank.

    Attributes:
      num_cached: tokens that the row in a slot did not run, if there are any.
    """

    def __init__(self, min_tokens: int, per_rank: int):
        self.min_tokens, self._per_rank = min_tokens, per_rank
        self._rows: dict[int, np.ndarray] = {}
        self.num_cached: dict[int, int] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self._rows.values()), default=0)

    def clear(self) -> None:
        """Forgets all rows, as weights were loaded."""
        self._rows.clear()

    def put(self, slot: int, ids: np.ndarray, num_cached: int = 0) -> None:
        """Notes the tokens of the row that takes a slot."""
        self._rows[slot], self.num_cached[slot] = ids, num_cached

    def append(self, slot: int, ids: np.ndarray) -> None:
        """Notes new tokens of the row in a slot."""
        if slot in self._rows:
            self._rows[slot] = np.concatenate([self._rows[slot], ids])

    def plan(
        self, requests: Sequence[Request], free: Sequence[deque[int]]
    ) -> tuple[list[Extension], list[Request]]:
        """Plans the extensions among requests, and returns the other requests.

        An ended row whose tokens all are the beginning of a request is continued in its slot; other
        rows are copied to the slot that has been free for longest.

        Args:
          free: free slots of each rank, from which the slots of the extensions are taken.
        """
        extensions, others = list[Extension](), list[Request]()
        for request in requests:
            extension = self._plan_one(request, free)
            if extension is None:
                others.append(request)
                continue
            free[extension.slot // self._per_rank].remove(extension.slot)
            self.put(extension.slot, request.ids, extension.num_cached)
            extensions.append(extension)
        return extensions, others

    def _plan_one(self, request: Request, free: Sequence[deque[int]]) -> Extension | None:
        ids = request.ids
        best, num_cached = -1, self.min_tokens - 1
        for slot, row in self._rows.items():
            if not free[slot // self._per_rank]:
                continue
            # The last token of a row was not run, and the last of a request is run by its first
            # step.
            shared = _shared_prefix(row[:-1], ids[:-1])
            if shared > num_cached:
                best, num_cached = slot, shared
        if best < 0 or len(ids) - num_cached > MAX_EXTENSION * num_cached:
            return None
        of_rank = free[best // self._per_rank]
        continues = best in of_rank and num_cached == len(self._rows[best]) - 1
        return Extension(request, best if continues else of_rank[0], best, num_cached)


def _shared_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of first tokens that two rows share."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size
