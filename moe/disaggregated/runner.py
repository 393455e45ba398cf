"""Runner of disaggregated decoding: the host enqueues the programs of both sides and the exchanges
between them.

There is one controller per process. The inputs of a program are in flight when it is enqueued: a
single process never blocks, and one of many waits for exchanges of a layer ago. A process with
devices of one side runs the programs of that side and takes part in the exchanges.
"""

from collections import deque
from collections.abc import Callable
from functools import cache as remembered
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from moe.attention.latent import caches_latent
from moe.cache.buffers import Cache
from moe.config import ModelConfig
from moe.decoding import Prefilled, for_prefill, for_step
from moe.disaggregated import programs
from moe.disaggregated.halves import Flight, Serving
from moe.disaggregated.m2n import Arrays, Message, exchange_of, spread_over
from moe.disaggregated.placement import Placement
from moe.disaggregated.programs import Buffers, Prompts, Steps
from moe.disaggregated.schedule import Enqueued, order
from moe.disaggregated.sides import SplitWeights
from moe.disaggregated.split import SplitMesh, devices_of, is_here


class Runner:
    """Disaggregated prefill and decoding, with attention and experts on disjoint devices.

    Args:
      config: the network.
      mesh: meshes of both sides.
      placement: placement of experts on the devices along ``ep``; None is each once, in order.
      m2n: method of the exchanges, see `moe.disaggregated.m2n.exchange_of`.
      records_choices: the expert ids of each token are recorded.

    Attributes:
      log: entries that `decode` enqueued when it last ran, if `keeps_log` is set.
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
        self._out = exchange_of(m2n, mesh.attention, mesh.experts)
        self._back = exchange_of(m2n, mesh.experts, mesh.attention)
        every = (devices_of(side) for side in (mesh.attention, mesh.experts))
        attending, computing = ({d.process_index for d in devices} for devices in every)
        self._must_tell = not computing <= attending
        self._attends, self._computes = is_here(mesh.attention), is_here(mesh.experts)
        self._numbers: dict[int, Array] = {}
        self.keeps_log, self.log, self.bytes_sent = False, list[Enqueued](), 0
        self._several = len(attending | computing) > 1
        self._under_way = deque[Arrays]()

    def prefill(
        self,
        weights: SplitWeights[Array],
        tokens: Int[Array, "row column"],
        lengths: Int[Array, "row"],
    ) -> Prefilled | None:
        """`moe.decoding.prefill` alternately on both sides, for arrays on the attention side; the
        keys and values of each layer are buffers of their own. None in a process without attention
        devices.

        Args:
          tokens: rows sharded over ``dp``; in a process without attention any array of that shape.
        """
        serving, given, flight, cache = self._prefill, Prompts(tokens, lengths), None, []
        ranks, rows = self.mesh.attention.layout, tokens.shape[0]
        num_tokens = rows * tokens.shape[1] // (ranks.dp * ranks.tp)
        received = self._nothing(serving, num_tokens)
        if self._attends:
            assert weights.rest is not None
            flight = programs.begin(serving, weights.rest, given)
            for number, layer in enumerate(weights.first):
                arguments = layer, self._number(number), Buffers(None, None), flight, given
                flight, kept = programs.dense_layer(serving, None, *arguments)
                cache.append(kept)
        for layer in range(self.config.num_expert_layers):
            parts = None
            if self._attends:
                flight, kept, parts = self._attention(
                    serving, None, weights, layer, Buffers(None, None), flight, given, received
                )
                cache.append(kept)
            received = self._experts(serving, weights, layer, parts, num_tokens)
            self._wait(1)
        if not self._attends:
            return None
        assert weights.rest is not None and flight is not None and received is not None
        states, choices = programs.end_prefill(serving, weights.rest, flight, received, given)
        return Prefilled(_cache_of(cache, self.config), states, choices)

    def decode(
        self,
        weights: SplitWeights[Array],
        cache: Cache[Array] | None,
        num_rows: int,
        micro_batches: int,
        begin: Callable[[int], tuple[Array, Array, Array]],
        end: Callable[[int, Array, Array | None], tuple[Array, Array] | None],
        goes_on: Callable[[int], bool],
        columns: int | None = None,
        told: Callable[[int, Array], None] | None = None,
    ) -> Cache[Array] | None:
        """Decode loop: token after token of all rows, in the order of
        `moe.disaggregated.schedule.order`.

        Args:
          cache: a buffer for each layer, donated; None in a process without attention.
          num_rows: rows of all micro-batches on all devices; a multiple of ``dp x tp`` of the
            attention side times `micro_batches`. Micro-batch i is the i-th part of each device's
            rows.
          begin: from a micro-batch to the tokens of its rows, their positions and which rows are
            live, sharded over ``dp``.
          end: takes a micro-batch, the logits of its rows, sharded over all attention devices, and
            their expert ids. Returns two counts for `told`, replicated over the attention devices;
            None without `told`.
          goes_on: true if a token of that index is to be decoded; the same in all processes.
          columns: number of columns of the cache that are read, more than are decoded; None is all.
          told: in a process without attention, takes the micro-batch and the counts of its `end`,
            ``[1, 2]`` int32, which are sent there. Passed in all processes or in none.

        Returns:
          The cache.
        """
        serving, layout = self._step, self.mesh.attention.layout
        check_micro_batches(num_rows, micro_batches, self.mesh)
        num_tokens = num_rows // (layout.num_devices * micro_batches)
        buffers = [] if cache is None else _buffers_of(cache, self.config)
        flights: dict[int, Flight[Array]] = {}
        givens: dict[int, Steps] = {}
        received: dict[int, Arrays | None] = {}
        parts: dict[int, Arrays | None] = {}
        self.log.clear()

        def start(i: int) -> None:
            received[i] = self._nothing(serving, num_tokens)
            if not self._attends:
                return
            assert weights.rest is not None
            first = self._number(i * num_rows // (layout.dp * micro_batches))
            given = givens[i] = Steps(*begin(i), first)
            flights[i] = programs.begin(serving, weights.rest, given)
            for number, layer in enumerate(weights.first):
                arguments = layer, self._number(number), buffers[number], flights[i], given
                flights[i], buffers[number] = programs.dense_layer(serving, columns, *arguments)

        def attend(i: int, layer: int) -> None:
            parts[i] = None
            if self._attends:
                number = self.config.num_dense_layers + layer
                given = buffers[number], flights[i], givens[i], received[i]
                flights[i], buffers[number], parts[i] = self._attention(
                    serving, columns, weights, layer, *given
                )

        def finish(i: int) -> None:
            counts = None
            if self._attends:
                assert weights.rest is not None
                made = programs.end_step(serving, weights.rest, flights.pop(i), received[i])
                counts = end(i, *made)
            if told is not None and self._must_tell:
                heard = self._tell(counts)
                if not self._attends:
                    assert heard is not None
                    told(i, heard[0].addressable_data(0))

        for one in order(self.config.num_expert_layers, micro_batches, goes_on):
            if self.keeps_log:
                self.log.append(one)
            i = one.micro_batch
            if one.role == "begin":
                start(i)
            elif one.role == "attention":
                attend(i, one.layer)
            elif one.role == "experts":
                received[i] = self._experts(serving, weights, one.layer, parts.pop(i), num_tokens)
                self._wait(micro_batches)
            else:
                finish(i)
        self._wait(0)
        return _cache_of(buffers, self.config) if self._attends else None

    def meet(self) -> None:
        """Sends a message each way and waits for it, so that the processes are connected before
        they run different code; all of them call this at the same time."""
        for exchange, mesh, others in (
            (self._out, self.mesh.attention, self._step.num_targets),
            (self._back, self.mesh.experts, self._step.num_sources),
        ):
            parts, message = None, Message(1, 1, jnp.dtype(jnp.int32))
            if is_here(mesh):
                shape = mesh.layout.num_devices, 1
                parts = (_clearing(spread_over(mesh), shape, message.dtype)(),) * others
            jax.block_until_ready(exchange(parts, message))

    def _tell(self, counts: tuple[Array, Array] | None) -> Arrays | None:
        """Sends two counts from the attention side to each expert device."""
        parts, message = None, Message(1, 2, jnp.dtype(jnp.int32))
        if self._attends:
            assert counts is not None
            spread = _on_each(spread_over(self.mesh.attention), self._step.num_sources)
            parts = (spread(*counts),) * self._step.num_targets
        self.bytes_sent += self._step.num_sources * self._step.num_targets * message.num_bytes
        return self._out(parts, message)

    def _wait(self, exchanges: int) -> None:
        """Waits until at most `exchanges` layers' exchanges are in flight; does nothing in a single
        process.

        Errors of the finished ones are raised here. On CPU an error must be noticed while few
        programs are enqueued: beyond 32 of them JAX waits for the first to end, and keeps waiting
        if that one spans multiple devices and cannot run because of an error (JAX 0.10).
        """
        while len(self._under_way) > exchanges:
            jax.block_until_ready(self._under_way.popleft())

    def _attention(
        self,
        serving: Serving,
        columns: int | None,
        weights: SplitWeights[Array],
        layer: int,
        buffers: Buffers,
        flight: Flight[Array] | None,
        given: Any,
        received: Arrays | None,
    ) -> tuple[Flight[Array], Buffers, Arrays]:
        number = self._number(self.config.num_dense_layers + layer)
        assert flight is not None and received is not None
        arguments = weights.attention[layer], number, buffers, flight, given, received
        return programs.attention_half(serving, columns, *arguments, weights.copies[layer])

    def _experts(
        self,
        serving: Serving,
        weights: SplitWeights[Array],
        layer: int,
        parts: Arrays | None,
        num_tokens: int,
    ) -> Arrays | None:
        """Runs the exchanges of a layer, and its experts between them."""
        out, back = serving.message_out(num_tokens), serving.message_back(num_tokens)
        came, sums = self._out(parts, out), None
        if self._computes:
            assert came is not None
            sums = programs.experts_half(serving, weights.experts[layer], came)
        pairs = serving.num_sources * serving.num_targets
        self.bytes_sent += pairs * (out.num_bytes + back.num_bytes)
        received = self._back(sums, back)
        if self._several:
            ends = sums if received is None else received
            assert ends is not None
            self._under_way.append(ends)
        return received

    def _nothing(self, serving: Serving, num_tokens: int) -> Arrays | None:
        """Received sums before the first layer: zeros."""
        if not self._attends:
            return None
        message = serving.message_back(num_tokens)
        shape = serving.num_sources * message.rows, message.width
        zeros = _clearing(spread_over(self.mesh.attention), shape, message.dtype)()
        return (zeros,) * serving.num_targets

    def _number(self, number: int) -> Array:
        """An integer replicated over the attention devices; cached."""
        if number not in self._numbers:
            place = NamedSharding(self.mesh.attention.mesh, PartitionSpec())
            value = np.asarray(number, np.int32)
            self._numbers[number] = jax.make_array_from_callback((), place, lambda _: value)
        return self._numbers[number]


@remembered
def _on_each(place: NamedSharding, number: int) -> Callable[[Array, Array], Array]:
    def spread(first: Array, second: Array) -> Array:
        return jnp.broadcast_to(jnp.stack([first, second])[None], (number, 2))

    return jax.jit(spread, out_shardings=place)


@remembered
def _clearing(place: NamedSharding, shape: tuple[int, int], dtype: Any) -> Callable[[], Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)


def check_micro_batches(num_rows: int, micro_batches: int, mesh: SplitMesh) -> None:
    """Checks that micro-batches and attention devices divide the rows.

    Raises:
      ValueError: if they do not.
    """
    layout = mesh.attention.layout
    unit = layout.num_devices * micro_batches
    if micro_batches < 1 or num_rows < 1 or num_rows % unit:
        raise ValueError(
            f"{num_rows} rows cannot be shared by micro_batches={micro_batches} on dp={layout.dp} "
            f"x tp={layout.tp} devices of attention: choose rows in multiples of {max(unit, 1)}."
        )


def _cache_of(buffers: list[Buffers], config: ModelConfig) -> Cache[Array]:
    keys: Any = tuple(b.keys for b in buffers)
    values: Any = () if caches_latent(config) else tuple(b.values for b in buffers)
    return Cache(keys, values)


def _buffers_of(cache: Cache[Array], config: ModelConfig) -> list[Buffers]:
    values: Any = (None,) * len(cache.keys) if caches_latent(config) else cache.values
    return [Buffers(*pair) for pair in zip(cache.keys, values, strict=True)]
