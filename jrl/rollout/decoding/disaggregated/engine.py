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
from jrl.rollout.decoding.disaggregated.expert_balancer import ExpertBalancer
from jrl.rollout.decoding.disaggregated.scheduler import MicroBatchScheduler
from jrl.rollout.decoding.engine import SlotEngine
from jrl.rollout.decoding.output_buffer import make_output_buffer, write_to_buffer
from jrl.rollout.decoding.programs.admission import AdmissionArrays, admit_prefilled
from jrl.rollout.decoding.programs.advance import Advanced
from jrl.rollout.decoding.programs.micro_batches import (
    add_expert_loads,
    read_step_inputs,
    sample_micro_batch,
)
from jrl.rollout.decoding.programs.slots import SlotPool, TokenRows
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduler import SlotScheduler, bucket
from jrl.rollout.sampling import Sampling
from jrl.rollout.split import SplitPolicy
from moe.cache.buffers import Cache
from moe.config import ModelConfig
from moe.disaggregated.runner import Runner, check_micro_batches
from moe.disaggregated.schedule import AttentionTime
from moe.disaggregated.split import SplitMesh, has_local_devices
from moe.disaggregated.weights import SplitWeights
from moe.router.routing import choices_dtype
from sharding.folding import FoldedMesh

STEPS_BEFORE_COUNT = 2
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
        self.expert_balancer = ExpertBalancer(
            plain, split, expert_slots, replan, decays=not self._restarts
        )
        self.runner = Runner(
            plain,
            split,
            placement=self.expert_balancer.placements[0],
            m2n=m2n,
            # Loads are counted from expert ids, recorded for a replay or not.
            records_choices=records_choices or replan is not None,
        )
        if is_multiprocess():
            any_of(False)  # a barrier: all processes have compiled what came before
            self.runner.connect()
        self._split_policy = SplitPolicy(config, training, split, self.expert_balancer.placements)
        self._resharding = self._split_policy
        self._loads = self._no_loads()
        self._has_attention = has_local_devices(split.attention)

    def _make_scheduler(self, slots: int, ranks: int) -> SlotScheduler:
        predicted = AttentionTime.from_config(self.decoder.config)

        def context(slot: int) -> int:
            return int(self._lengths[slot])

        num_micro_batches = self._micro_batches
        return MicroBatchScheduler(
            slots, ranks, self.most_tokens, num_micro_batches, predicted, context
        )

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._restarts and not (self._scheduler.running or self._scheduler.waiting):
            self._restart()
        super().submit(requests, sampling)

    def _restart(self) -> None:
        moved = self.expert_balancer.has_moved
        self.expert_balancer.restart()
        self._loads = self._no_loads()
        if moved:
            self._split_policy.move_experts(self.expert_balancer.placements)
            # The KV cache in the slots was computed with another placement, and rounded otherwise.
            self._scheduler.clear_prefix_cache()

    def _no_loads(self) -> Array:
        config = self.decoder.config
        return self._replicate(np.zeros((config.num_expert_layers, config.num_experts), np.int32))

    def _rebalance_experts(self) -> None:
        """Re-balances the experts by the loads since the last call."""
        loads = self._to_host(self._loads)
        self._loads = self._no_loads()
        if self.expert_balancer.rebalance(loads):
            self._split_policy.move_experts(self.expert_balancer.placements)

    def _ensure_split_weights(self) -> SplitWeights[Array]:
        return self._split_policy.sync(self._loaded_weights())

    def take_pool(self) -> SlotPool[Array]:
        raise NotImplementedError(
            "disaggregated decoding does not keep the KV cache when weights change"
        )

    def _run_admission(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
    ) -> SlotPool[Array]:
        weights, prefilled = self._ensure_split_weights(), None
        if tokens.shape[0]:
            prefilled = self.runner.prefill(weights, tokens, lengths)
        if not self._has_attention:
            return pool
        assert weights.rest is not None
        if prefilled is not None and prefilled.choices is not None:
            dtype = choices_dtype(self.decoder.config.num_experts)
            choices = prefilled.choices.astype(dtype) if self.decoder.records_choices else None
            prefilled = prefilled._replace(choices=choices)
        return admit_prefilled(
            self.decoder,
            self._compiled_sampling,
            weights.rest,
            pool,
            prefilled,
            tokens,
            admission,
            self._ensure_sampler_state(),
        )

    @property
    def step_sizes(self) -> list[int]:
        # Micro-batches are of one size.
        return [self._scheduler.per_rank]

    def _run_decoding(
        self,
        pool: SlotPool[Array],
        columns: int,
        window: int,
        min_live: int,
        slots: np.ndarray | None,
    ) -> tuple[SlotPool[Array], Advanced]:
        num_micro_batches, sampler_state = self._micro_batches, self._ensure_sampler_state()
        window = self.expert_balancer.limit_tokens(window)
        indices = [self._replicate(np.int32(i)) for i in range(num_micro_batches)]
        cache = None
        if self._has_attention:
            # The runner donates the cache layer by layer, `sample_micro_batch` the rest.
            cache, pool = pool.cache, replace(pool, cache=Cache((), ()))
        # For each token and micro-batch, the number of rows that got it and of those still live.
        counts: list[list[Any]] = [[] for _ in range(num_micro_batches)]
        totals = list[np.ndarray]()

        def begin(i: int) -> tuple[Array, Array, Array]:
            return read_step_inputs(self.decoder, num_micro_batches, pool, indices[i])

        def end(i: int, logits: Array, choices: Array | None) -> tuple[Array, Array]:
            nonlocal pool
            if self.expert_balancer.every is not None:
                self._loads = add_expert_loads(
                    self.decoder, num_micro_batches, self._loads, pool.live, choices, indices[i]
                )
            if not self.decoder.records_choices:
                choices = None
            pool, num_sampled, num_live = sample_micro_batch(
                self.decoder,
                self._compiled_sampling,
                num_micro_batches,
                pool,
                logits,
                choices,
                sampler_state,
                indices[i],
            )
            counts[i].append((num_sampled, num_live))
            return num_sampled, num_live

        def count(token: int) -> int:
            """Number of live rows after `token`, the first token that was not counted yet."""
            each = jax.device_get([tokens_of_batch[token] for tokens_of_batch in counts])
            totals.append(
                np.sum([np.reshape(tokens_of_batch, -1) for tokens_of_batch in each], axis=0)
            )
            return int(totals[-1][1])

        # Enqueued steps run on; counts are read `STEPS_BEFORE_COUNT` tokens later.
        def continues(token: int) -> bool:
            num_live = (
                count(token - STEPS_BEFORE_COUNT) if token >= STEPS_BEFORE_COUNT else min_live + 1
            )
            return token < window and num_live > min_live

        cache = self.runner.decode(
            self._ensure_split_weights(),
            cache,
            self.slots,
            num_micro_batches,
            begin,
            end,
            continues,
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
        if self.expert_balancer.is_due(steps):
            self._rebalance_experts()
        advanced = Advanced(jnp.asarray(steps), jnp.asarray(grew.sum()))
        return pool if cache is None else replace(pool, cache=cache), advanced

    def _make_output_buffer(self, size: int) -> TokenRows[Array]:
        if not is_multiprocess():
            return super()._make_output_buffer(size)
        return make_output_buffer(self._ensure_pool().rows, size, replicated(self._training))

    def _write_to_buffer(
        self, buffer: TokenRows[Array], destinations: np.ndarray
    ) -> TokenRows[Array]:
        if not is_multiprocess():
            return super()._write_to_buffer(buffer, destinations)
        # The output buffer is on all processes: rows move through their hosts, finished ones only.
        (slots,) = np.nonzero(destinations < buffer.lengths.shape[0])
        num_rows = bucket(len(slots), self.slots, least=1)
        sources = np.zeros(num_rows, np.int32)
        targets = buffer.lengths.shape[0] + np.arange(num_rows, dtype=np.int32)
        sources[: len(slots)], targets[: len(slots)] = slots, destinations[slots]
        finished = _gather_rows(self._ensure_pool().rows, self._replicate(sources), self.mesh)
        sharding = replicated(self._training)
        rows, targets = to_devices((self._to_host(finished), targets), sharding)
        return write_to_buffer(buffer, rows, targets, sharding)

    def _to_host(self, tree: Any) -> Any:
        return to_every_host(tree, self.mesh)


@partial(jax.jit, static_argnums=2)
def _gather_rows(rows: TokenRows[Array], slots: Array, mesh: FoldedMesh) -> TokenRows[Array]:
    """Rows of the given slots, replicated on every device."""
    gathered = jax.tree.map(lambda column: jnp.take(column, slots, axis=0), rows)
    return lax.with_sharding_constraint(gathered, replicated(mesh))
