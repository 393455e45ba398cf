"""Runner of disaggregated decoding: the host enqueues the programs of both sides and the exchanges
between them.

There is one controller per process. The inputs of a program are in flight when it is enqueued: a
single process never blocks, and one of many waits for exchanges of a layer ago. A process with
devices of one side runs the programs of that side and takes part in the exchanges.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as remembered
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from moe.attention.latent import caches_latent
from moe.cache import Cache, StepTokens
from moe.config import ModelConfig
from moe.decoding import for_step
from moe.disaggregated import programs
from moe.disaggregated.layer import Serving, TokenState
from moe.disaggregated.m2n import Arrays, Message, make_exchange, row_sharding
from moe.disaggregated.placement import Placement
from moe.disaggregated.programs import Buffers, Prompts, Steps
from moe.disaggregated.schedule import Enqueued, order_programs
from moe.disaggregated.split import SplitMesh, devices_of, has_local_devices
from moe.disaggregated.weights import SplitWeights
from moe.model import Prefilled, for_prefill


class DecodeLoop(NamedTuple):
    """Functions of the caller of `Runner.decode`: it has the rows, and draws their tokens.

    Attributes:
      begin: maps a micro-batch to the tokens of its rows, sharded over ``dp``.
      end: takes a micro-batch, the logits of its rows, sharded over all attention devices, and
        their expert ids, None if they are not recorded. Returns two counts for `on_counts`,
        replicated over the attention devices; None without `on_counts`.
      should_continue: true if a token of that index is to be decoded; the same in all processes.
      on_counts: in a process without attention, takes the micro-batch and the counts of its `end`,
        ``[1, 2]`` int32, which are sent there. Passed in all processes or in none.
    """

    begin: Callable[[int], StepTokens]
    end: Callable[[int, Array, Array | None], tuple[Array, Array] | None]
    should_continue: Callable[[int], bool]
    on_counts: Callable[[int, Array], None] | None = None


@dataclass
class _MicroBatch:
    """A micro-batch on its way through the layers.

    Attributes:
      serving: configuration of the programs that run it.
      num_tokens: its tokens on an attention device.
      buffers: keys and values of each layer, which all micro-batches share.
      num_positions: number of positions of the cache that are read; None is all.
      inputs, state: None in a process without attention devices, as all below.
      received: sums of the layer before.
      messages: tokens to the experts, from the attention of a layer until they are sent.
    """

    serving: Serving
    num_tokens: int
    buffers: list[Buffers]
    num_positions: int | None = None
    inputs: Any = None
    state: TokenState[Array] | None = None
    received: Arrays | None = None
    messages: Arrays | None = None


class Runner:
    """Disaggregated prefill and decoding, with attention and experts on disjoint devices.

    Args:
      placement: placement of experts on the devices along ``ep``; None is each once, in order.
      m2n: method of the exchanges, see `moe.disaggregated.m2n.make_exchange`.
      records_choices: the expert ids of each token are recorded.

    Attributes:
      placement: the argument, or its default.
      keeps_log: `decode` writes `log`; off by default.
      log: schedule entries that the last `decode` enqueued, if `keeps_log` was set.
      bytes_sent: bytes sent by all exchanges so far, both ways.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: SplitMesh,
        *,
        placement: Placement | None = None,
        m2n: str | None = None,
        records_choices: bool = False,
    ):
        peers = mesh.experts.size(mesh.experts.ep)
        self.placement = placement or Placement.identity(config.num_experts, peers)
        slots = self.placement.num_slots
        self.mesh, self.config = mesh, config
        self._step = Serving(for_step(config), mesh, slots, records_choices)
        self._prefill = Serving(for_prefill(config.for_any_routing()), mesh, slots, records_choices)
        self._out = make_exchange(m2n, mesh.attention, mesh.experts)
        self._back = make_exchange(m2n, mesh.experts, mesh.attention)
        every = (devices_of(side) for side in (mesh.attention, mesh.experts))
        attending, computing = ({d.process_index for d in devices} for devices in every)
        self._sends_counts = not computing <= attending
        self._attends = has_local_devices(mesh.attention)
        self._computes = has_local_devices(mesh.experts)
        self._numbers: dict[int, Array] = {}
        self.keeps_log, self.log, self.bytes_sent = False, list[Enqueued](), 0
        self._is_multi_process = len(attending | computing) > 1
        self._in_flight = deque[Arrays]()

    def prefill(
        self,
        weights: SplitWeights[Array],
        tokens: Int[Array, "row column"],
        lengths: Int[Array, "row"],
    ) -> Prefilled | None:
        """Prefill, as `moe.model.prefill`, alternately on both sides.

        The results are on the attention side, with a buffer for the keys and one for the values of
        each layer; None in a process without attention devices.

        Args:
          tokens: rows sharded over ``dp``; in a process without attention any array of that shape.
        """
        layout, num_tokens = self.mesh.attention.layout, tokens.shape[0] * tokens.shape[1]
        buffers = [Buffers(None, None)] * self.config.num_layers
        batch = _MicroBatch(self._prefill, num_tokens // (layout.dp * layout.tp), buffers)
        self._begin(batch, weights, Prompts(tokens, lengths))
        for layer in range(self.config.num_expert_layers):
            self._attention(batch, weights, layer)
            self._experts(batch, weights, layer)
            self._wait(1)
        if not self._attends:
            return None
        assert weights.rest is not None and batch.state is not None and batch.received is not None
        states, choices = programs.end_prefill(
            batch.serving, weights.rest, batch.state, batch.received, batch.inputs
        )
        return Prefilled(_join_buffers(buffers, self.config), states, choices)

    def decode(
        self,
        weights: SplitWeights[Array],
        cache: Cache[Array] | None,
        num_rows: int,
        micro_batches: int,
        loop: DecodeLoop,
        num_positions: int | None = None,
    ) -> Cache[Array] | None:
        """Decode loop: token after token of all rows, in the order of
        `moe.disaggregated.schedule.order_programs`.

        Args:
          cache: a buffer for each layer, donated; None in a process without attention.
          num_rows: rows of all micro-batches on all devices; a multiple of ``dp x tp`` of the
            attention side times `micro_batches`. Micro-batch i is the i-th part of each device's
            rows.
          loop: gives the tokens of each step and takes its logits.
          num_positions: number of positions of the cache that are read, more than are decoded; None
            is all.

        Returns:
          The cache.
        """
        layout = self.mesh.attention.layout
        check_micro_batches(num_rows, micro_batches, self.mesh)
        num_tokens = num_rows // (layout.num_devices * micro_batches)
        buffers = [] if cache is None else _split_cache(cache, self.config)
        batches = [
            _MicroBatch(self._step, num_tokens, buffers, num_positions)
            for _ in range(micro_batches)
        ]
        self.log.clear()
        num_layers = self.config.num_expert_layers
        for entry in order_programs(num_layers, micro_batches, loop.should_continue):
            if self.keeps_log:
                self.log.append(entry)
            i, batch = entry.micro_batch, batches[entry.micro_batch]
            if entry.role == "begin":
                inputs = None
                if self._attends:
                    first = self._replicated_int(i * num_rows // (layout.dp * micro_batches))
                    inputs = Steps(loop.begin(i), first)
                self._begin(batch, weights, inputs)
            elif entry.role == "attention":
                self._attention(batch, weights, entry.layer)
            elif entry.role == "experts":
                self._experts(batch, weights, entry.layer)
                self._wait(micro_batches)
            else:
                self._end(batch, weights, i, loop)
        self._wait(0)
        return _join_buffers(buffers, self.config) if self._attends else None

    def connect(self) -> None:
        """Sends a message each way and waits for it, so that the processes are connected before
        they run different code; all of them call this at the same time."""
        for exchange, mesh, others in (
            (self._out, self.mesh.attention, self._step.num_targets),
            (self._back, self.mesh.experts, self._step.num_sources),
        ):
            arrays, message = None, Message(1, 1, jnp.dtype(jnp.int32))
            if has_local_devices(mesh):
                shape = mesh.layout.num_devices, 1
                arrays = (_zeros_program(row_sharding(mesh), shape, message.dtype)(),) * others
            jax.block_until_ready(exchange(arrays, message))

    def _send_counts(self, counts: tuple[Array, Array] | None) -> Arrays | None:
        """Sends two counts from the attention side to each expert device."""
        arrays, message = None, Message(1, 2, jnp.dtype(jnp.int32))
        if self._attends:
            assert counts is not None
            broadcast = _broadcast_program(
                row_sharding(self.mesh.attention), self._step.num_sources
            )
            arrays = (broadcast(*counts),) * self._step.num_targets
        self.bytes_sent += self._step.num_sources * self._step.num_targets * message.num_bytes
        return self._out(arrays, message)

    def _wait(self, exchanges: int) -> None:
        """Waits until at most `exchanges` layers' exchanges are in flight; does nothing in a single
        process.

        Errors of the finished ones are raised here. On CPU an error must be noticed while few
        programs are enqueued: beyond 32 of them JAX waits for the first to end, and keeps waiting
        if that one spans multiple devices and cannot run because of an error (JAX 0.10).
        """
        while len(self._in_flight) > exchanges:
            jax.block_until_ready(self._in_flight.popleft())

    def _begin(self, batch: _MicroBatch, weights: SplitWeights[Array], inputs: Any) -> None:
        """Embeds tokens and runs the leading dense layers."""
        if not self._attends:
            return
        assert weights.rest is not None
        serving, buffers, batch.inputs = batch.serving, batch.buffers, inputs
        message = serving.message_back(batch.num_tokens)
        shape = serving.num_sources * message.rows, message.width
        zeros = _zeros_program(row_sharding(self.mesh.attention), shape, message.dtype)()
        batch.received = (zeros,) * serving.num_targets
        state = programs.begin(serving, weights.rest, inputs)
        for index, layer in enumerate(weights.first):
            layer_index = self._replicated_int(index)
            state, buffers[index] = programs.dense_layer(
                serving, batch.num_positions, layer, layer_index, buffers[index], state, inputs
            )
        batch.state = state

    def _attention(self, batch: _MicroBatch, weights: SplitWeights[Array], layer: int) -> None:
        """Runs the attention half of a layer."""
        if not self._attends:
            return
        index = self.config.num_dense_layers + layer
        assert batch.state is not None and batch.received is not None
        batch.state, batch.buffers[index], batch.messages = programs.attention_half(
            batch.serving,
            batch.num_positions,
            weights.attention_half(layer),
            self._replicated_int(index),
            batch.buffers[index],
            batch.state,
            batch.inputs,
            batch.received,
        )

    def _experts(self, batch: _MicroBatch, weights: SplitWeights[Array], layer: int) -> None:
        """Runs the exchanges of a layer, and its experts between them."""
        serving = batch.serving
        out, back = serving.message_out(batch.num_tokens), serving.message_back(batch.num_tokens)
        messages, batch.messages = batch.messages, None
        received_rows, sums = self._out(messages, out), None
        if self._computes:
            assert received_rows is not None
            sums = programs.experts_half(serving, weights.experts[layer], received_rows)
        pairs = serving.num_sources * serving.num_targets
        self.bytes_sent += pairs * (out.num_bytes + back.num_bytes)
        batch.received = self._back(sums, back)
        if self._is_multi_process:
            last_arrays = sums if batch.received is None else batch.received
            assert last_arrays is not None
            self._in_flight.append(last_arrays)

    def _end(
        self, batch: _MicroBatch, weights: SplitWeights[Array], i: int, loop: DecodeLoop
    ) -> None:
        """Runs the end of a step, and sends the counts of its rows."""
        counts = None
        if self._attends:
            state, batch.state = batch.state, None
            assert weights.rest is not None and state is not None and batch.received is not None
            logits, choices = programs.end_step(batch.serving, weights.rest, state, batch.received)
            del state
            counts = loop.end(i, logits, choices)
        if loop.on_counts is not None and self._sends_counts:
            received_counts = self._send_counts(counts)
            if not self._attends:
                assert received_counts is not None
                loop.on_counts(i, received_counts[0].addressable_data(0))

    def _replicated_int(self, integer: int) -> Array:
        """An integer replicated over the attention devices; cached."""
        if integer not in self._numbers:
            sharding = NamedSharding(self.mesh.attention.mesh, PartitionSpec())
            value = np.asarray(integer, np.int32)
            self._numbers[integer] = jax.make_array_from_callback((), sharding, lambda _: value)
        return self._numbers[integer]


@remembered
def _broadcast_program(sharding: NamedSharding, num_rows: int) -> Callable[[Array, Array], Array]:
    def broadcast(first: Array, second: Array) -> Array:
        return jnp.broadcast_to(jnp.stack([first, second])[None], (num_rows, 2))

    return jax.jit(broadcast, out_shardings=sharding)


@remembered
def _zeros_program(
    sharding: NamedSharding, shape: tuple[int, int], dtype: Any
) -> Callable[[], Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def check_micro_batches(num_rows: int, micro_batches: int, mesh: SplitMesh) -> None:
    """Raises ValueError unless micro-batches and attention devices divide the rows."""
    layout = mesh.attention.layout
    unit = layout.num_devices * micro_batches
    if micro_batches < 1 or num_rows < 1 or num_rows % unit:
        raise ValueError(
            f"{num_rows} rows cannot be split over micro_batches={micro_batches} and dp="
            f"{layout.dp} x tp={layout.tp} attention devices: use a multiple of "
            f"{max(unit, 1)} rows."
        )


def _join_buffers(buffers: list[Buffers], config: ModelConfig) -> Cache[Array]:
    keys: Any = tuple(b.keys for b in buffers)
    values: Any = () if caches_latent(config) else tuple(b.values for b in buffers)
    return Cache(keys, values)


def _split_cache(cache: Cache[Array], config: ModelConfig) -> list[Buffers]:
    values: Any = (None,) * len(cache.keys) if caches_latent(config) else cache.values
    return [Buffers(*pair) for pair in zip(cache.keys, values, strict=True)]
