"""Scoring: forward passes over given tokens for log-probabilities, entropies and critic values.

`Scorer` runs rows and reads the last hidden states of the network, inside the `jax.shard_map`; the
losses of the updates are `Scorer`s too (`jrl.trainer.learner.update`). Rows run as they are,
except that rows that share a prompt run it once; or packed into bins, without computation on
padding (`jrl.rollout.packing`).

The functions below are whole passes over global arrays. Under
`moe.execution.Execution.buffer_factor` the buffers of the experts of a device hold a multiple of
the rows of even routing. A pass counts its overflow; if there is any, its result is discarded, and
the same pass is run with buffers for any routing (`RetryOnOverflow`). Both functions are compiled
once, the second when it is first needed. So only time and memory depend on the balance of the
routing, and no result does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Integer

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch, replicated, required, take_rows
from jrl.rollout.packing import PackedSizes, counts_of, pack_rows, plan
from jrl.rollout.sampling import Sampling, sampler_logits
from jrl.rollout.sampling import logprobs_of as logprobs_in
from jrl.trainer.learner.accumulation import scan_first
from moe import model, placement, stages
from moe.config import Model, ModelConfig
from moe.head import is_argmax, logits_of, logprobs_and_entropy, value_of
from moe.ops.zigzag import ZigzagLayout
from moe.router.routing import choices_dtype
from moe.router.statistics import RouterStatistics, overflow_of, run_with_fallback
from moe.tokens.packing import (
    PackedBatch,
    expand_responses,
    pack_segments,
    pack_shared_prompts,
    positions_of,
    response_states,
    response_tokens,
    unpack_shared_prompts,
    zigzag_of_rows,
)
from moe.weights import Transformer
from sharding.collectives import gather_tokens, join_shards, local_shard, vary
from sharding.folding import FoldedMesh
from sharding.sharded_jit import MeshJit

Choices = Integer[Array, "batch time layer k"]
Read = Callable[[Any, Any, Batch[Array]], Any]
"""(weights, last hidden states, rows) -> arrays with a row for each."""
Pass = Callable[..., tuple[Any, Array | None]]
"""(scorer, weights, arrays with a row per sequence) -> its result, and the expert buffers'
overflow."""
ScorerT = TypeVar("ScorerT", bound="Scorer")


class RetryOnOverflow:
    """Compiled forward pass, with no gradient, that is recomputed with dropless buffers on
    overflow; also a decorator. A call returns the result without the overflow.

    Args:
      function: the pass, ``(scorer, *args) -> (result, overflow)`` of a `Scorer`, see
        `moe.router.statistics.overflow_of`.
      num_static: number of leading static arguments, the scorer first.
      least_effort: true for a pass that runs rarely on a few rows, see
        `sharding.sharded_jit.LEAST_EFFORT`.
    """

    def __init__(self, function: Pass, num_static: int = 1, least_effort: bool = False):
        options: Any = {"static_argnums": tuple(range(num_static)), "least_effort": least_effort}
        self.with_overflow = MeshJit(function, **options)

        def without_overflow(*args: Any) -> Any:
            return function(*args)[0]  # dropless buffers count none

        without_overflow.__name__ = function.__name__  # by which compilations are reported
        self.dropless = MeshJit(without_overflow, **options)
        self.__doc__ = function.__doc__

    def __call__(self, scorer: Any, *args: Any) -> Any:
        if scorer.config.execution.buffer_factor is None:
            return self.dropless(scorer, *args)
        result, _ = run_with_fallback(
            lambda: self.with_overflow(scorer, *args),
            lambda _: self.dropless(scorer.for_any_routing(), *args),
        )
        return result

    def lower(self, scorer: Any, *args: Any) -> Any:
        """Lowers the pass with dropless buffers."""
        return self.dropless.lower(scorer.for_any_routing(), *args)


class PromptLayout(NamedTuple):
    """Layout of prompts and responses in rows of tokens.

    Attributes:
      prompt_length: positions of the padded prompt.
      group_size: number of consecutive rows that share a prompt.
    """

    prompt_length: int
    group_size: int

    def sections(self, rows: int, response_length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Number and length of the prompts that run for these rows, and of their responses."""
        return (rows // self.group_size, self.prompt_length), (rows, response_length)


class Scores(NamedTuple):
    """Log-probabilities and entropies of given response tokens, aligned to them; prompts get 0, and
    in packed rows all tokens outside of the mask.

    Attributes:
      logprobs: ``[batch, time]`` in the full policy at the sampling temperature, nats.
      behaviour_logprobs: ``[batch, time]`` in the distribution that is sampled from at the base
        temperature (top-k and top-p applied), nats, with no gradient: not the distribution of an
        adaptive temperature.
      entropy: ``[batch, time]`` entropy of the policy's distribution over the token, nats.
      router: this device's router sums, None without experts.
      choices: ``[batch, time, layer, k]`` expert ids of each token, prompts too, as in
        `jrl.recipes.base.batch.Batch`; None if they were not requested.
    """

    logprobs: Array
    behaviour_logprobs: Array
    entropy: Array
    router: RouterStatistics[Array] | None = None
    choices: Array | None = None


@dataclass(frozen=True)
class Scorer:
    """Network on a mesh that scores rows of tokens.

    Attributes:
      config: the network.
      mesh: the mesh that it runs on.
      layout: layout of prompts and responses in rows.
      sampling: distribution of `Scores`; by default the plain softmax, at temperature 1.
      packed: sizes of a packed micro-batch; None runs rows as they are.
    """

    config: ModelConfig
    mesh: FoldedMesh
    layout: PromptLayout
    sampling: Sampling = field(default=Sampling(), kw_only=True)
    packed: PackedSizes | None = field(default=None, kw_only=True)

    fields: ClassVar[tuple[str, ...]] = ("logprobs",)
    """Fields of a `Batch` that get the first of the `outputs`, by the role of a frozen network."""

    @property
    def model(self) -> Model:
        return Model(self.config, self.mesh)

    @property
    def overlaps(self) -> bool:
        """True if its programs may overlap communication (`sharding.sharded_jit.MeshJit`)."""
        return self.config.execution.overlaps

    @property
    def weight_specs(self) -> Any:
        """Shardings of the weights of its passes."""
        return placement.specs(self.model)

    def for_any_routing(self: ScorerT) -> ScorerT:
        """The same with dropless expert buffers, for any routing."""
        return replace(self, config=self.config.for_any_routing())

    def for_separate_rows(self: ScorerT) -> ScorerT:
        """The same for rows that share no prompt, not packed."""
        return replace(self, layout=self.layout._replace(group_size=1), packed=None)

    def replayed(self, batch: Batch[Array]) -> Array | None:
        """Expert ids that a pass over `batch` replays; None routes."""
        return None

    def pack(self, batch: Batch[Array]) -> PackedBatch:
        """Input of the network."""
        return self.pack_with(batch, self.replayed(batch))

    def pack_with(self, batch: Batch[Array], choices: Choices | None) -> PackedBatch:
        """Input of the network, with expert ids to replay. A shared prompt's ids are taken from the
        first of its rows; tokens that have no record are routed normally."""
        if self.packed is None:
            # Layer axis first, for the scan over layers.
            replay = None if choices is None else jnp.moveaxis(choices, 2, 0)
            return pack_shared_prompts(batch.tokens, batch.valid, *self.layout, self.model, replay)
        bins, length, _ = self.packed
        positions = _bin_positions(batch, self.packed)
        # Segment ids count from 1; 0 is padding.
        segment_ids = jnp.broadcast_to(1 + jnp.arange(positions.shape[0])[:, None], positions.shape)

        def to_bins(x: Int[Array, "batch time *_"]) -> Int[Array, "bin length *_"]:
            flat = jnp.zeros_like(x, shape=(bins * length, *x.shape[2:]))
            filled = flat.at[positions].set(x, mode="drop")
            return filled.reshape(bins, length, *x.shape[2:])

        return pack_segments(
            to_bins(batch.tokens),
            to_bins(segment_ids),
            positions.shape[0],
            self.model,
            None if choices is None else jnp.moveaxis(to_bins(choices), 2, 0),
            positions=to_bins(positions_of(batch.valid)),
        )

    def states(
        self, weights: Transformer[Array], batch: Batch[Array]
    ) -> tuple[Array, RouterStatistics[Array] | None]:
        """Last hidden states of packed rows, and the router's sums."""
        return model.run(weights, self.pack(batch), self.model)

    def scores(self, weights: Transformer[Array], x: Array, batch: Batch[Array]) -> Scores:
        """Scores from the last hidden states `x` of packed rows, without `router`."""
        sampling = self.sampling
        x, tokens, to_rows = self.predicting_states(x, batch)
        # At the base temperature, even if each token has its own: sampler and trainer must agree
        # on the policy, not on the distribution that a token was sampled from.
        logprobs, entropy = logprobs_and_entropy(
            weights, x, tokens, self.model, sampling.policy_temperature
        )
        # Without top-k, top-p and greedy the two are equal: no second pass over the head.
        sampled = jax.lax.stop_gradient(logprobs)
        if sampling.truncates:
            # They need all logits; as there is no gradient, none of them is kept in memory.
            logits = logits_of(*jax.lax.stop_gradient((weights, x)), self.model)
            sampled = logprobs_in(sampler_logits(logits, sampling), tokens)
        return Scores(to_rows(logprobs), to_rows(sampled), to_rows(entropy))

    def values(self, critic: Transformer[Array], x: Array, batch: Batch[Array]) -> Array:
        """Critic values of the state before each token, from the last hidden states `x` of packed
        rows."""
        # Of the state before the token, so that V does not depend on the action of its advantage.
        x, _, to_rows = self.predicting_states(x, batch)
        return to_rows(value_of(critic, x, self.config))

    def logprobs_and_argmax(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array]
    ) -> tuple[Array, Array]:
        """Log-probabilities, and 1 for each token that is the argmax of its distribution, 0 for the
        others, from the last hidden states `x` of packed rows."""
        x, tokens, to_rows = self.predicting_states(x, batch)
        # The argmax is that of the full policy, at any temperature.
        temperature = self.sampling.policy_temperature
        logprobs, _ = logprobs_and_entropy(weights, x, tokens, self.model, temperature)
        matches = is_argmax(weights, x, tokens, self.model).astype(jnp.float32)
        return to_rows(logprobs), to_rows(matches)

    def outputs(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array]
    ) -> tuple[Array, ...]:
        """Outputs of a scoring pass from the last hidden states `x` of packed rows: critic values,
        or log-probabilities in the full policy and in the distribution sampled from."""
        if self.config.head == "value":
            return (self.values(weights, x, batch),)
        scores = self.scores(weights, x, batch)
        return scores.logprobs, scores.behaviour_logprobs

    def predicting_states(
        self, x: Float[Array, "local d_model"], batch: Batch[Array]
    ) -> tuple[
        Float[Array, "shard d_model"],
        Int[Array, "shard"],
        Callable[[Float[Array, "shard"]], Float[Array, "batch time"]],
    ]:
        """States that predict the tokens to score, and these tokens, this rank's shard of both; and
        the function that scatters values of them to ``[batch, time]``.

        Of packed rows these are the tokens under the mask: prompts, and responses that only provide
        context, never reach the LM head. Unused entries have an arbitrary state.

        Communication per device over ``cp x tp`` of packed rows: one `gather_tokens` of the states,
        ``tokens x d_model (n - 1) / n`` elements; backward one `scatter_tokens` as large.
        """
        mesh, shape = self.mesh, batch.tokens.shape
        prompt_length, group_size = self.layout
        if self.packed is None:
            x = response_states(x, shape, prompt_length, group_size, self.model)
            # State t - 1 predicts token t: both in the order of responses, one shard each.
            responses = response_tokens(batch.tokens, prompt_length, self.model)

            def expand(values: Float[Array, "shard"]) -> Float[Array, "batch time"]:
                return expand_responses(values, shape, prompt_length, self.model)

            return x, vary(responses, mesh.axes), expand
        bins, length, max_scored = self.packed
        flat_mask = batch.mask.reshape(-1)
        # Unused entries have an index past the end.
        (index,) = jnp.nonzero(flat_mask, size=max_scored, fill_value=flat_mask.size)
        before = _bin_positions(batch, self.packed).reshape(-1) - 1
        source = jnp.maximum(before.at[index].get(mode="fill", fill_value=0), 0)
        # Bins are sharded over `cp`, in zig-zag order or not: an index of the gathered batch.
        zigzag = zigzag_of_rows((bins, length), self.model)
        (order,) = zigzag.restore(jnp.arange(zigzag.num_tokens, dtype=jnp.int32))
        source = vary(order.reshape(-1)[source], mesh.axes)
        x = gather_tokens(x, mesh.sequence)[local_shard(source, mesh.sequence)]
        tokens = batch.tokens.reshape(-1).at[index].get(mode="fill", fill_value=0)

        def scatter(values: Float[Array, "shard"]) -> Float[Array, "batch time"]:
            gathered = join_shards(values, mesh.sequence)
            flat = jnp.zeros_like(gathered, shape=flat_mask.size)
            return flat.at[index].set(gathered, mode="drop").reshape(shape)

        return x, local_shard(vary(tokens, mesh.axes), mesh.sequence), scatter

    def score(
        self,
        weights: Transformer[Array],
        tokens: Int[Array, "batch time"],
        valid: Bool[Array, "batch time"],
        choices: Choices | None = None,
        *,
        record_choices: bool = False,
    ) -> Scores:
        """Scores whole sequences by one forward pass over rows that are not packed.

        Args:
          choices: expert ids to replay.
          record_choices: true to return the expert ids of this pass.
        """
        inputs = tokens, valid, choices
        scores, router = self.run(weights, inputs, self.scores, record_choices)
        # None if it has no experts, and if not requested: it is the largest array of all.
        if router is None or router.choices is None:
            return scores._replace(router=router)
        recorded = self._gather_choices(router.choices, tokens.shape)
        # Removed from the sums: those are summed over ranks, expert ids must not be.
        return scores._replace(router=replace(router, choices=None), choices=recorded)

    def run(
        self,
        weights: Transformer[Array],
        inputs: tuple[Array, Array, Array | None],
        read: Read,
        record_choices: bool = False,
    ) -> tuple[Any, RouterStatistics[Array] | None]:
        """Runs the network on rows that are not packed, on a pipeline `num_micro_batches` of them,
        and applies `read` to the last hidden states. Returns its result, rows in the order given,
        and the router's sums.

        Args:
          inputs: tokens, their valid mask, and expert ids to replay.
          record_choices: true to add `choices` to the sums, ``[layer, token, k]`` or, of a
            pipeline's micro-batches, ``[layer, micro_batch, token, k]``.
        """
        mesh = self.mesh

        def pack(inputs: tuple[Array, Array, Array | None]) -> PackedBatch:
            packed = self.pack_with(_rows(inputs), inputs[2])
            return packed._replace(record_choices=record_choices)

        # Without pipeline stages all rows run in one batch, for the largest GEMMs.
        if mesh.layout.pp == 1:
            x, router = model.run(weights, pack(inputs), self.model)
            return read(weights, x, _rows(inputs)), router
        num_rows, time = inputs[0].shape
        num_batches = num_micro_batches(num_rows, time, self.layout, mesh)
        # Consecutive rows: a group that shares its prompt stays in one micro-batch.
        micro_batches = jax.tree.map(lambda x: x.reshape(num_batches, -1, *x.shape[1:]), inputs)
        outs, router = stages.scan_micro_batches(
            weights,
            micro_batches,
            stages.Ends(pack, lambda weights, x, micro_batch: read(weights, x, _rows(micro_batch))),
            self.model,
        )
        # The stages agree; if there is no pipeline, a size-1 axis would still mark the result as
        # varying.
        outs = vary(outs, mesh.pp)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outs), router

    def _gather_choices(
        self, choices: Int[Array, "layer *micro_batch token k"], shape: tuple[int, ...]
    ) -> Choices:
        """Gathers the expert ids of this device's tokens, as `run` returns them, into the rows of
        all tokens."""
        mesh = self.mesh
        # [token, micro_batch, layer, k]: shards of tokens are concatenated on the first axis.
        by_token = choices.reshape(choices.shape[0], -1, *choices.shape[-2:]).transpose(2, 1, 0, 3)
        # Gathered on every rank: a row has tokens of all shards.
        by_token = join_shards(by_token, mesh.sequence)
        num_batches = by_token.shape[1]
        batch_shape = shape[0] // num_batches, shape[1]
        rows = [
            unpack_shared_prompts(by_token[:, n], batch_shape, *self.layout, self.model)
            for n in range(num_batches)
        ]
        # Typed as varying over `pp`, as the other results of a pipeline.
        return vary(jnp.concatenate(rows).astype(choices_dtype(self.config.num_experts)), mesh.pp)


@dataclass(frozen=True)
class ArgmaxScorer(Scorer):
    """Scorer whose passes return log-probabilities, and 1 for the tokens that are the argmax."""

    fields = (*Scorer.fields, "argmax")

    def outputs(
        self, weights: Transformer[Array], x: Array, batch: Batch[Array]
    ) -> tuple[Array, ...]:
        return self.logprobs_and_argmax(weights, x, batch)


def _rows(inputs: tuple[Array, Array, Array | None]) -> Batch[Array]:
    """Rows of a pass that scores all responses, whatever their mask."""
    tokens, valid, _ = inputs
    return Batch(tokens=tokens, valid=valid, mask=valid)


def _bin_positions(batch: Batch[Array], sizes: PackedSizes) -> Int[Array, "batch time"]:
    """Position of each token in the concatenated bins; past the end for tokens in no bin."""
    starts = required(batch.starts)[:, None]
    position = starts + positions_of(batch.valid)
    return jnp.where(batch.valid & (starts >= 0), position, sizes.bins * sizes.length)


def num_micro_batches(num_rows: int, time: int, layout: PromptLayout, mesh: FoldedMesh) -> int:
    """Number of micro-batches that scoring splits its rows into on a pipeline: at most four per
    stage, with a bubble of a fifth of the time, if groups of `PromptLayout.group_size` and tokens
    divide.

    Args:
      num_rows: on this device.
      time: prompt and response, in tokens.
    """
    cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)

    def fits(count: int) -> bool:
        # Whole groups: a split group would run its prompt in each micro-batch.
        sections = layout.sections(num_rows // count, time - layout.prompt_length)
        # Equal shards of either section on every rank: one compiled function runs on all.
        divides = (ZigzagLayout((section,), cp).num_tokens % ranks == 0 for section in sections)
        return num_rows % (count * layout.group_size) == 0 and all(divides)

    # The largest valid number: more micro-batches mean a smaller pipeline bubble.
    return max((n for n in range(1, 4 * mesh.layout.pp + 1) if fits(n)), default=1)


def mark_replicated(tree, mesh: FoldedMesh):
    """Types `tree` as varying over ``dp`` only, by a maximum over the other axes, whose ranks have
    equal values."""
    others = tuple(axis for axis in mesh.except_sequence if axis not in mesh.dp)

    def maximum(x: Array) -> Array:
        # The maximum of equal values is exact; a mean would round.
        as_number = x.astype(jnp.int8) if x.dtype == bool else x
        return jax.lax.pmax(as_number, others).astype(x.dtype)

    return jax.tree.map(maximum, tree)


def _run_sharded(
    forward: Callable[..., tuple[Any, RouterStatistics[Array] | None]],
    scorer: Scorer,
    weights: Any,
    *inputs: Array | None,
) -> tuple[Any, Array | None]:
    """Runs `forward` on each device, with the weights and arrays with a row per sequence. It
    returns such arrays and the router's sums; the result is the arrays and the expert buffers'
    overflow."""
    config, mesh = scorer.config, scorer.mesh
    rows = PartitionSpec(mesh.dp)

    def local(weights, *inputs):
        results, router = forward(weights, *inputs)
        # Ranks of cp and tp have the same values; `out_specs` needs that in their type.
        return mark_replicated(results, mesh), overflow_of(router, config)

    # Sharded weights (`Execution.fsdp`) are gathered by `in_specs`: a pass has full layers.
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(scorer.weight_specs, *(rows for _ in inputs)),
        out_specs=(rows, PartitionSpec()),
    )(weights, *inputs)


def _scoring_pass(*names: str, record_choices: bool = False) -> Pass:
    """Pass of a policy that returns fields of its `Scores`."""

    def score_rows(scorer: Scorer, policy: Transformer[Array], *inputs: Array | None) -> Any:
        def forward(policy, *inputs):
            scores = scorer.score(policy, *inputs, record_choices=record_choices)
            return tuple(getattr(scores, name) for name in names), scores.router

        return _run_sharded(forward, scorer, policy, *inputs)

    return score_rows


def _reading_pass(read: Callable[[Scorer, Any, Any, Batch[Array]], Any]) -> Pass:
    """Pass that returns what `read` computes from the last hidden states."""

    def read_rows(scorer: Scorer, weights: Any, tokens: Array, valid: Array) -> Any:
        def forward(weights, tokens, valid):
            return scorer.run(weights, (tokens, valid, None), partial(read, scorer))

        return _run_sharded(forward, scorer, weights, tokens, valid)

    return read_rows


logprobs_of = RetryOnOverflow(_scoring_pass("logprobs", "behaviour_logprobs"))
"""Log-probabilities of all response tokens: in the full policy, and in the distribution that tokens
are sampled from. Takes scorer, policy, tokens, their valid mask and, optionally, expert ids to
replay."""

logprobs_and_choices_of = RetryOnOverflow(_scoring_pass("logprobs", "choices", record_choices=True))
"""Log-probabilities of all response tokens in the policy, and the expert ids of its routers for all
tokens, ``[batch, time, layer, k]`` as in `Batch.choices`. Takes scorer, policy, tokens, valid."""

logprobs_and_entropy_of = RetryOnOverflow(_scoring_pass("logprobs", "entropy"))
"""Log-probabilities of all response tokens, and the policy's entropy before each of them, both in
the full policy at the base temperature. For the arguments see `logprobs_of`."""

logprobs_and_entropy_of_few = RetryOnOverflow(
    _scoring_pass("logprobs", "entropy"), least_effort=True
)
"""The same pass, for rare calls with a few rows."""

logprobs_and_argmax_of = RetryOnOverflow(_reading_pass(Scorer.logprobs_and_argmax))
"""Log-probabilities of all response tokens in the policy, and 1 for those that are its argmax, 0
for the others. Takes scorer, policy, tokens, valid."""

outputs_of = RetryOnOverflow(_reading_pass(lambda scorer, *args: scorer.outputs(*args)))
"""`Scorer.outputs` of all response tokens. Takes scorer, weights, tokens, valid."""

values_of = RetryOnOverflow(_reading_pass(Scorer.values))
"""Critic values of all response tokens. Takes scorer, critic, tokens, valid."""


def packed_scores(scorer: Scorer, weights: Any, batch: Batch[Array], bins: int) -> list[Array]:
    """`Scorer.outputs` of the tokens in the mask, by passes over packed rows; all others get 0."""
    mesh = scorer.mesh
    # Only the arrays that the pass reads: rows move between devices on their way into bins.
    batch = Batch(batch.tokens, batch.valid, batch.mask, choices=batch.choices)
    num_rows, time = batch.tokens.shape
    # This batch has only one mask, for either network; rows that have no token in it are left out.
    tokens, loss_tokens = counts_of(batch).for_network("actor", np.arange(num_rows), idle=False)
    plan_of_batch = plan(tokens, loss_tokens, time, bins, mesh)
    rows = pack_rows(batch, plan_of_batch, mesh)
    # In the static argument, as sizes are shapes; `passes` is an array, without recompilation.
    scorer = replace(scorer, packed=plan_of_batch.sizes)
    passes = to_devices(np.int32(plan_of_batch.passes), replicated(mesh))
    packed_arrays = _score_packed(scorer, plan_of_batch.num_micro_batches, weights, rows, passes)
    # `old_values` is used as a carrier, to gather them.
    # A row that is in no bin gets the values of an empty slot: zeros.
    slots = plan_of_batch.slots(num_rows)
    scores = [take_rows(replace(rows, old_values=x), slots, mesh).old_values for x in packed_arrays]
    return [required(column) for column in scores]


@partial(RetryOnOverflow, num_static=2)
def _score_packed(
    scorer: Scorer,
    num_micro_batches: int,
    weights: Any,
    rows: Batch[Array],
    passes: Array,
) -> tuple[tuple[Array, ...], Array | None]:
    """`Scorer.outputs` of packed rows."""
    config, mesh = scorer.config, scorer.mesh

    def local(weights, rows, passes):
        # No carry: there is no gradient to sum over micro-batches.
        def score_micro_batch(_, micro_batch):
            x, router = scorer.states(weights, micro_batch)
            return (), (
                mark_replicated(scorer.outputs(weights, x, micro_batch), mesh),
                overflow_of(router, config),
            )

        # Slots of a micro-batch are contiguous, so that a reshape splits them.
        micro_batches = jax.tree.map(lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), rows)
        _, (results, overflow) = scan_first(score_micro_batch, (), micro_batches, passes)
        # Micro-batches that `passes` skipped are zeros, and have no row.
        scores_of_rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        # Summed over passes: an overflow in one recomputes all of them.
        return scores_of_rows, None if overflow is None else jnp.sum(overflow)

    row_spec = PartitionSpec(mesh.dp)
    return jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(scorer.weight_specs, row_spec, PartitionSpec()),
        out_specs=(row_spec, PartitionSpec()),
    )(weights, rows, passes)
