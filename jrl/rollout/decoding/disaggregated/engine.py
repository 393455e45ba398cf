"""Rollout engine with attention and experts on separate device groups.

Slots, requests and sampling are those of `SlotEngine`, and so are the tokens; rows are stored on
the attention devices. Only the network's implementation differs: `moe.disaggregated`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jrl.processes.agreement import any_of, is_multiprocess, to_devices, to_every_host
from jrl.rollout.batching import replicated
from jrl.rollout.decoding.disaggregated.batches import BatchedSeating
from jrl.rollout.decoding.disaggregated.expert_places import ExpertPlaces
from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.programs.admission import Arrivals, admit_known
from jrl.rollout.decoding.programs.advance import Advanced
from jrl.rollout.decoding.programs.micro_batches import counted, sample_part, standing
from jrl.rollout.decoding.programs.slots import Pool, Rows
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.seating import Seating, bucket
from jrl.rollout.decoding.shelves import empty_shelf, shelve
from jrl.rollout.sampling import Sampling
from jrl.rollout.split import SplitPolicy
from moe.cache.buffers import Cache
from moe.config import ModelConfig
from moe.disaggregated.batches import AttentionTime
from moe.disaggregated.runner import Runner, check_micro_batches
from moe.disaggregated.split import SplitMesh, has_local_devices
from moe.disaggregated.weights import SplitWeights
from moe.router.replay import choices_dtype
from sharding.folding import FoldedMesh

AHEAD = 2
"""Decoding steps that the host enqueues before it checks that rows are left to decode."""


class DisaggregatedEngine(SlotEngine):
    """`SlotEngine` on two groups of devices.

    Args:
      config: the policy network, an MoE model.
      training: the mesh that weights come from.
      split: of the devices that decode.
      micro_batches: micro-batches of the slots in flight: while one is with the experts, attention
        works on another.
      m2n: see `moe.disaggregated.runner.Runner`.
      expert_slots: experts that an expert device can hold, with replicas of hot experts; None is
        its share.
      replan: tokens of a row after which experts are re-balanced by their loads; None keeps the
        placement. Restarts with equal loads where no row is in flight, so that samples depend on
        the requests only, bit for bit.

    The other arguments are those of `SlotEngine`; `slots` divide over the devices of attention and
    `micro_batches`.

    Raises:
      ValueError: on sizes that do not divide.
    """

    _restarts = True  # resets the placement to equal loads where no row is in flight

    def __init__(
        self,
        config: ModelConfig,
        training: FoldedMesh,
        split: SplitMesh,
        *,
        slots: int,
        columns: int,
        pad_id: int,
        stop_ids: tuple[int, ...],
        key: Array,
        records_choices: bool = False,
        top_logprobs: int = 0,
        micro_batches: int = 2,
        m2n: str | None = None,
        expert_slots: int | None = None,
        replan: int | None = None,
    ):
        check_micro_batches(slots, micro_batches, split)
        self._micro_batches = micro_batches
        # Each layer's KV cache in a buffer of its own, which its compiled function donates.
        config = replace(config, execution=replace(config.execution, scan_layers=False))
        super().__init__(
            config,
            training,
            split.attention,
            slots=slots,
            columns=columns,
            pad_id=pad_id,
            stop_ids=stop_ids,
            key=key,
            records_choices=records_choices,
            top_logprobs=top_logprobs,
        )
        plain = config.without_adapters()
        self.places = ExpertPlaces(plain, split, expert_slots, replan, fades=not self._restarts)
        self.runner = Runner(
            plain,
            split,
            placement=self.places.placements[0],
            m2n=m2n,
            # Loads are counted from expert ids, recorded for a replay or not.
            records_choices=records_choices or replan is not None,
        )
        if is_multiprocess():
            any_of(False)  # a barrier: all processes have compiled what came before
            self.runner.connect()
        self._sides = SplitPolicy(config, training, split, self.places.placements)
        self._resharding = self._sides
        self._loads = self._no_loads()
        self._attends = has_local_devices(split.attention)

    def _made_seating(self, slots: int, ranks: int) -> Seating:
        predicted = AttentionTime.from_config(self.decoder.config)

        def context(slot: int) -> int:
            return int(self._lengths[slot])

        parts = self._micro_batches
        return BatchedSeating(slots, ranks, self.most_tokens, parts, predicted, context)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._restarts and not (self._seating.sitting or self._seating.waiting):
            self._restart()
        super().submit(requests, sampling)

    def _restart(self) -> None:
        moved = self.places.has_moved
        self.places.restart()
        self._loads = self._no_loads()
        if moved:
            self._sides.place(self.places.placements)
            # The KV cache in the slots was computed with another placement, and rounded otherwise.
            self._seating.forget()

    def _no_loads(self) -> Array:
        config = self.decoder.config
        return self._everywhere(np.zeros((config.num_expert_layers, config.num_experts), np.int32))

    def _look(self) -> None:
        """Re-balances the experts by the loads since the last call."""
        loads = self._to_host(self._loads)
        self._loads = self._no_loads()
        if self.places.look(loads):
            self._sides.place(self.places.placements)

    def _both_sides(self) -> SplitWeights[Array]:
        return self._sides.of(self._loaded())

    def take_pool(self) -> Pool[Array]:
        raise NotImplementedError("rows of two sides are not kept over a change of weights")

    def _admitted(
        self,
        pool: Pool[Array],
        tokens: Array,
        lengths: Array,
        arrivals: Arrivals[Array],
    ) -> Pool[Array]:
        weights, known = self._both_sides(), None
        if tokens.shape[0]:
            known = self.runner.prefill(weights, tokens, lengths)
        if not self._attends:
            return pool
        assert weights.rest is not None
        if known is not None and known.choices is not None:
            dtype = choices_dtype(self.decoder.config.num_experts)
            kept = known.choices.astype(dtype) if self.decoder.records_choices else None
            known = known._replace(choices=kept)
        given = pool, known, tokens, arrivals, self._draws()
        return admit_known(self.decoder, self._compiled_sampling, weights.rest, *given)

    @property
    def step_sizes(self) -> list[int]:
        # Micro-batches are of one size.
        return [self._seating.per_rank]

    def _advanced(
        self,
        pool: Pool[Array],
        columns: int,
        window: int,
        min_live: int,
        some: np.ndarray | None,
    ) -> tuple[Pool[Array], Advanced]:
        parts, draws, window = self._micro_batches, self._draws(), self.places.within(window)
        numbers = [self._everywhere(np.int32(i)) for i in range(parts)]
        cache = None
        if self._attends:
            # The runner donates the cache layer by layer, `sample_part` the rest.
            cache, pool = pool.cache, replace(pool, cache=Cache((), ()))
        # For each token and micro-batch, the number of rows that got it and of those still live.
        counts: list[list[Any]] = [[] for _ in range(parts)]
        totals = list[np.ndarray]()

        def begin(i: int) -> tuple[Array, Array, Array]:
            return standing(self.decoder, parts, pool, numbers[i])

        def end(i: int, logits: Array, choices: Array | None) -> tuple[Array, Array]:
            nonlocal pool
            if self.places.every is not None:
                chosen = pool.live, choices, numbers[i]
                self._loads = counted(self.decoder, parts, self._loads, *chosen)
            if not self.decoder.records_choices:
                choices = None
            given = pool, logits, choices, draws, numbers[i]
            pool, *rows = sample_part(self.decoder, self._compiled_sampling, parts, *given)
            counts[i].append((rows[0], rows[1]))
            return rows[0], rows[1]

        def count(token: int) -> int:
            """Number of live rows after `token`, the first token that was not counted yet."""
            each = jax.device_get([own[token] for own in counts])
            totals.append(np.sum([np.reshape(own, -1) for own in each], axis=0))
            return int(totals[-1][1])

        # Enqueued steps run on; counts are read `AHEAD` tokens later.
        def goes_on(token: int) -> bool:
            left = count(token - AHEAD) if token >= AHEAD else min_live + 1
            return token < window and left > min_live

        cache = self.runner.decode(
            self._both_sides(),
            cache,
            self.slots,
            parts,
            begin,
            end,
            goes_on,
            columns,
            # A process without attention receives the counts, and decides as the others do.
            lambda i, heard: counts[i].append(heard),
        )
        # Tokens that were enqueued after the last count.
        for token in range(len(totals), len(counts[0])):
            count(token)
        grew = np.array(totals)[:, 0]
        # An enqueued token that no row got is not a step.
        steps = int((grew > 0).sum())
        if self.places.is_due(steps):
            self._look()
        advanced = Advanced(jnp.asarray(steps), jnp.asarray(grew.sum()))
        return pool if cache is None else replace(pool, cache=cache), advanced

    def _empty_shelf(self, size: int) -> Rows[Array]:
        if not is_multiprocess():
            return super()._empty_shelf(size)
        return empty_shelf(self._there().rows, size, replicated(self._training))

    def _on_shelf(self, shelf: Rows[Array], places: np.ndarray) -> Rows[Array]:
        if not is_multiprocess():
            return super()._on_shelf(shelf, places)
        # The output buffer is on all processes: rows move through their hosts, finished ones only.
        (slots,) = np.nonzero(places < shelf.lengths.shape[0])
        number = bucket(len(slots), self.slots, least=1)
        chosen = np.zeros(number, np.int32)
        where = shelf.lengths.shape[0] + np.arange(number, dtype=np.int32)
        chosen[: len(slots)], where[: len(slots)] = slots, places[slots]
        some = _taken(self._there().rows, self._everywhere(chosen), self.mesh)
        place = replicated(self._training)
        rows, where = to_devices((self._to_host(some), where), place)
        return shelve(shelf, rows, where, place)

    def _to_host(self, tree: Any) -> Any:
        return to_every_host(tree, self.mesh)


@partial(jax.jit, static_argnums=2)
def _taken(rows: Rows[Array], slots: Array, mesh: FoldedMesh) -> Rows[Array]:
    """Rows of the given slots, replicated on every device."""
    taken = jax.tree.map(lambda column: jnp.take(column, slots, axis=0), rows)
    return lax.with_sharding_constraint(taken, replicated(mesh))
