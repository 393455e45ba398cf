"""An engine whose rows are looked at while they are written, each drawn as its request asks."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jrl.processes.agreement import to_host
from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.programs.slots import Likeliest, Rows, halt
from jrl.rollout.decoding.programs.tokens import Draws
from jrl.rollout.decoding.requests import Finish, Request
from jrl.rollout.row_sampling import OwnSampling, RowSampling
from jrl.rollout.sampling import Sampling

WORD = 2**32 - 1
"""The low word of a seed."""
SPREAD = 4
"""Sizes of programs that run prompts are powers of this: few of them are compiled."""
IDLE = OwnSampling(temperature=0.0)
"""Of a slot without a row: no noise is made for it."""


@dataclass(frozen=True)
class Written:
    """What was sampled of a row since it was looked at last.

    Attributes:
      request: what was asked for.
      tokens: ``[token]`` ids, a stop token that ended it included.
      logprobs: ``[token]`` in the policy at temperature 1, nats.
      likeliest: ``[token, k]``; None where the request did not want it.
      finish: what ended it; None where it goes on.
    """

    request: Request
    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: Likeliest[np.ndarray] | None
    finish: Finish | None


class _Recent(NamedTuple):
    """``[slot, width]`` columns of rows, from those on that nobody has looked at."""

    tokens: Array
    logprobs: Array
    likeliest: Likeliest[Array] | None


class StreamEngine(SlotEngine):
    """Slots that requests of any kind share, written on a few tokens at a time.

    A row's tokens depend on the weights, the engine's key, the seed of its request, the number of
    its sample and the tokens so far: neither on the number of its prompt nor on what else runs.
    Requests come by `ask` and go by `drop`; `tick` writes them on. Arguments are those of
    `SlotEngine`.
    """

    # Those whose rows are being written wait no longer than for so many.
    most_tokens = 2048

    @property
    def ranks(self) -> int:
        """Ranks of ``dp``, which have an equal part of the slots each."""
        return self._seating.ranks

    @property
    def num_live(self) -> int:
        """Slots that have a row."""
        return len(self._seating.sitting)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._seating.sitting or self._seating.waiting)

    def ask(self, requests: Sequence[Request]) -> None:
        """Asks for responses, each drawn as its `own` says. Those with the same number of their
        prompt are samples of one prompt, which runs once.

        Raises:
          ValueError: for a request that does not say how it is drawn, or has no room in a slot.
        """
        for request in requests:
            if request.own is None:
                raise ValueError(
                    f"request {request.prompt, request.sample} does not say how it is drawn: give "
                    "it an own=OwnSampling(...)."
                )
        self.submit(requests, Sampling())

    def drop(self, rows: Collection[tuple[int, int]]) -> None:
        """Ends rows where they stand, known by the numbers of prompt and sample; their slots are
        free from here on."""
        seating, dropped = self._seating, set(rows)
        if not dropped:
            return
        kept = [r for r in seating.waiting if (r.prompt, r.sample) not in dropped]
        seating.waiting.clear()
        seating.waiting.extend(kept)
        sitting = seating.sitting.items()
        slots = [slot for slot, r in sitting if (r.prompt, r.sample) in dropped]
        if slots:
            goes_on = np.ones(self.slots, bool)
            goes_on[slots] = False
            self._pool = halt(self._there(), self._over_slots(goes_on))
        for slot in slots:
            seating.leave(slot)
        self._placed_draws = None

    def tick(self, window: int) -> list[Written]:
        """Seats those who wait, as far as there are free slots, and writes all rows on.

        Args:
          window: tokens at most that a row gets beside the first of its response.
        """
        seating = self._seating
        if seating.waiting and seating.num_free:
            arrivals = seating.arrivals()
            self._placed_draws = None
            for arriving in arrivals:
                self._admit(arriving)
        sitting = sorted(seating.sitting)
        if not sitting:
            return []
        # Of rows that have just come, the first token is there already.
        before = self._lengths.copy()
        still = self._sampled(sitting, window, 0)
        recent = self._recent(before, window + 1)
        written = [self._written(s, int(before[s]), recent, bool(still[s])) for s in sitting]
        for slot in sitting:
            if not still[slot]:
                seating.leave(slot)
                self._placed_draws = None
        return written

    def _written(self, slot: int, begin: int, recent: _Recent, goes_on: bool) -> Written:
        request = self._seating.sitting[slot]
        assert request.own is not None
        count = int(self._lengths[slot] - begin)
        tokens, logprobs = (np.array(x[slot, :count]) for x in recent[:2])
        likeliest = None
        if request.own.wants_likeliest and recent.likeliest is not None:
            likeliest = jax.tree.map(lambda x: np.array(x[slot, :count]), recent.likeliest)
        finish = None
        if not goes_on:
            finish = "stop" if tokens[-1] in self.decoder.stop_ids else "length"
        return Written(request, tokens, logprobs, likeliest, finish)

    def _recent(self, begins: np.ndarray, width: int) -> _Recent:
        rows, sitting = self._there().rows, self._seating.sitting.values()
        if not any(request.own is not None and request.own.wants_likeliest for request in sitting):
            rows = replace(rows, likeliest=None)
        return to_host(_columns(rows, width, self._over_slots(begins)))

    def _rows_to_run(self, most: int) -> int:
        size = 1
        while size < most:
            size *= SPREAD
        return size

    def _draws(self) -> Draws:
        if self._placed_draws is None:
            own = [IDLE] * self.slots
            for slot, request in self._seating.sitting.items():
                assert request.own is not None
                own[slot] = request.own
            rows = RowSampling(
                temperatures=np.array([each.temperature for each in own], np.float32),
                top_ps=np.array([each.top_p for each in own], np.float32),
                seeds=np.array([(each.seed & WORD, each.seed >> 32) for each in own], np.uint32),
                wants_likeliest=np.array([each.wants_likeliest for each in own]),
            )
            version = self._everywhere(np.int32(self._version))
            self._placed_draws = Draws(self._key, version, None, self._over_slots(rows))
        return self._placed_draws


@partial(jax.jit, static_argnums=1)
def _columns(rows: Rows[Array], width: int, begins: Int[Array, "slot"]) -> _Recent:
    """So many columns of each row, from its own on; past the end the last one again."""
    places = begins[:, None] + jnp.arange(width)[None]

    def of(column: Array) -> Array:
        there = places.reshape(*places.shape, *[1] * (column.ndim - 2))
        return jnp.take_along_axis(column, there, axis=1, mode="clip")

    return _Recent(of(rows.tokens), of(rows.old_logprobs), jax.tree.map(of, rows.likeliest))
