"""Asynchronous rollouts: the next batch is finished while rows of later batches are started.

The schedule of sampling depends on counts and never on the clock: a run has the same result whether
it samples and trains alternately or concurrently, and when it is resumed after a kill.
Between two steps the rows are a part of the state of the run (`AsyncBuffer`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from flax import struct

from jrl.recipes.base.recipe import DynamicSampling, Recipe
from jrl.rollout.collection.collect import (
    METRICS,
    generation_metrics,
    sampling_of,
    select_completions,
    verifier_counts,
)
from jrl.rollout.collection.dynamic_sampling import Groups
from jrl.rollout.decoding.prefill import no_choices
from jrl.rollout.decoding.requests import Finish, Request, Sampled, Trajectory, move_to_host
from jrl.rollout.sampler import Completion, Sampler
from jrl.tasks import REASONS, Example, Verdict
from jrl.text.prompt_format import text_of
from moe.config import ModelConfig

Leaf = TypeVar("Leaf")
# No "window": recipes with partial rollouts in windows do not sample ahead.
FINISH_REASONS: tuple[Finish, ...] = ("stop", "length")
"""Finish reasons of a response, by number."""


@dataclass
class AsyncRollouts:
    """Rows sampled ahead of training: the complete next batch, and rows of later batches.

    Attributes:
      ready: the completions that the next step trains on, all on the host.
      counts: ``[ready]`` bool; true if their tokens are in the loss mask.
      prompts_seen: training prompts used so far, including theirs.
      metrics: metrics of their sampling and verification.
      pending: rows of prompts after those, in the order of prompts and samples: completions, and
        unfinished requests.
    """

    ready: list[Completion]
    counts: np.ndarray
    prompts_seen: int
    metrics: dict[str, float]
    pending: list[Completion | Request]


@struct.dataclass
class AsyncBuffer(Generic[Leaf]):
    """`AsyncRollouts` as arrays of fixed size: an entry for each completion of the next step,
    then entries of the pending rows.

    Attributes:
      prompts_seen: ``[]`` as in `AsyncRollouts`.
      metrics: ``[metric, 2]`` values of `jrl.rollout.collection.collect.METRICS`, NaN if missing.
        Float64 values are stored exactly, as two int32 words.
      prompts: ``[entry]`` id of the prompt.
      samples: ``[entry]`` sample id, the index of the response to its prompt.
      lengths: ``[entry]`` tokens so far, 0 if it was not started; -1 if the entry is empty.
      finishes: ``[entry]`` index of the finish reason in `FINISH_REASONS`; -1 for unfinished rows.
      slots: ``[entry]`` the slot that a row in flight keeps; -1 if it keeps none.
      reasons: ``[entry]`` index of the verdict's reason; -1 before the verdict.
      scores: ``[entry, 2]`` scores of the verdict, stored as `metrics` are.
      parts: ``[entry, 1 + component, 2]`` likewise: 1 where the verdict has reward components, else
        0, and their values, NaN for missing ones; None if no verdict can have any.
      counts: ``[entry]`` true if its tokens are in the loss mask.
      tokens, behaviour_logprobs, old_logprobs, versions: ``[entry, response]`` as in
        `jrl.rollout.decoding.requests.Sampled`, 0 after its tokens.
      choices: ``[entry, position, layer, k]`` expert ids, likewise, `num_experts` for a token that
        did not run; None if they are not recorded.
    """

    prompts_seen: Leaf
    metrics: Leaf
    prompts: Leaf
    samples: Leaf
    lengths: Leaf
    finishes: Leaf
    slots: Leaf
    reasons: Leaf
    scores: Leaf
    counts: Leaf
    tokens: Leaf
    behaviour_logprobs: Leaf
    old_logprobs: Leaf
    versions: Leaf
    choices: Leaf | None
    parts: Leaf | None = None


class AsyncBufferSpec(NamedTuple):
    """Sizes of `AsyncBuffer`, and the conversion from and to `AsyncRollouts`.

    Attributes:
      recipe: determines the rows of a batch.
      batches: maximum number of batches sampled ahead.
      prompt_length, response_length: maximum tokens of a row.
      config: the policy network if expert ids are recorded, else None.
      reward_components: names of the reward components that a verdict can have.
    """

    recipe: Recipe
    batches: int
    prompt_length: int
    response_length: int
    config: ModelConfig | None
    reward_components: tuple[str, ...] = ()

    @property
    def num_entries(self) -> int:
        return self.batches * self.recipe.completions

    def empty(self) -> AsyncBuffer[np.ndarray]:
        """Initial arrays, before anything was sampled."""
        num_entries, response = self.num_entries, self.response_length

        def full(value: int, *shape: int) -> np.ndarray:
            return np.full(shape, value, np.int32)

        choices = parts = None
        if self.config is not None:
            choices = no_choices(self.config, num_entries, self.prompt_length + response)
        if self.reward_components:
            no_components = [0.0, *[np.nan] * len(self.reward_components)]
            parts = _to_words(np.tile(no_components, (num_entries, 1)))
        return AsyncBuffer(
            prompts_seen=np.zeros((), np.int32),
            metrics=_to_words(np.full(len(METRICS), np.nan)),
            prompts=full(0, num_entries),
            samples=full(0, num_entries),
            lengths=full(-1, num_entries),
            finishes=full(-1, num_entries),
            slots=full(-1, num_entries),
            reasons=full(-1, num_entries),
            scores=_to_words(np.zeros(num_entries)),
            counts=np.zeros(num_entries, bool),
            tokens=full(0, num_entries, response),
            behaviour_logprobs=np.zeros((num_entries, response), np.float32),
            old_logprobs=np.zeros((num_entries, response), np.float32),
            versions=full(0, num_entries, response),
            choices=choices,
            parts=parts,
        )

    def pack(self, rollouts: AsyncRollouts) -> AsyncBuffer[np.ndarray]:
        """Converts sampled rows to arrays."""
        # Of fixed size: a checkpoint is restored into arrays of known shapes.
        buffer, rows = self.empty(), [*rollouts.ready, *rollouts.pending]
        assert len(rows) <= self.num_entries, (
            f"{len(rows)} rows exceed the {self.num_entries} entries of the buffer"
        )
        buffer.prompts_seen[...] = rollouts.prompts_seen
        _as_floats(buffer.metrics)[:] = [rollouts.metrics.get(name, np.nan) for name in METRICS]
        buffer.counts[: len(rollouts.counts)] = rollouts.counts
        for entry, row in enumerate(rows):
            _write(buffer, entry, row, self.reward_components)
        return buffer

    def unpack(self, buffer: AsyncBuffer[np.ndarray], sampler: Sampler) -> AsyncRollouts | None:
        """Restores the argument of `pack`; None if nothing was sampled yet."""
        # The first entry is the next step's, whose batch is complete except before the first step.
        if buffer.lengths[0] < 0:
            return None
        entries = np.flatnonzero(buffer.lengths >= 0).tolist()
        # Prompts and answers are not stored: the task returns them again by their ids.
        prompts = np.unique(buffer.prompts[entries]).tolist()
        examples = {prompt: sampler.task.train(prompt) for prompt in prompts}
        ids = {prompt: sampler.encoded(example) for prompt, example in examples.items()}
        rows = [
            _read(buffer, entry, sampler, examples, ids, self.reward_components)
            for entry in entries
        ]
        # The entries of the next step come first: their number separates them from pending rows.
        ready = [row for row in rows[: self.recipe.completions] if isinstance(row, Completion)]
        metrics = zip(METRICS, _as_floats(buffer.metrics).tolist(), strict=True)
        return AsyncRollouts(
            ready=ready,
            counts=buffer.counts[: len(ready)],
            prompts_seen=int(buffer.prompts_seen),
            metrics={name: value for name, value in metrics if not math.isnan(value)},
            pending=rows[self.recipe.completions :],
        )


def row_of(row: Completion | Request) -> Request:
    """Request of a row, finished or not."""
    return row if isinstance(row, Request) else row.trajectory.request


def check_staleness(completions: Sequence[Completion], version: int, bound: int) -> np.ndarray:
    """Staleness of each token, in versions of the weights, over all completions; checks its bound.

    Args:
      completions: the batch that updates the weights of `version`.
      bound: the maximum staleness.

    Raises:
      RuntimeError: for a token that is staler, or whose version is later than `version`.
    """
    sampled = [completion.trajectory.versions for completion in completions]
    # Per token, not per row: a row in flight has tokens of multiple versions.
    staleness = version - np.concatenate(sampled)
    if staleness.min() < 0 or staleness.max() > bound:
        raise RuntimeError(
            f"step {version + 1} would train on tokens that are {staleness.min()} to "
            f"{staleness.max()} versions behind, and max_staleness={bound} allows 0 to {bound}: "
            "the checkpoint is not of this run, or the rollout engine mixes up its versions."
        )
    return staleness


def _write(
    buffer: AsyncBuffer[np.ndarray],
    entry: int,
    row: Completion | Request,
    reward_components: Sequence[str],
) -> None:
    request = row_of(row)
    buffer.prompts[entry], buffer.samples[entry] = request.prompt, request.sample
    # 0 is a request that was not started; -1 would be an empty entry.
    buffer.lengths[entry], sampled = 0, request.sampled
    if isinstance(row, Completion):
        assert row.verdict is not None
        buffer.finishes[entry] = FINISH_REASONS.index(row.trajectory.finish)
        buffer.reasons[entry] = REASONS.index(row.verdict.reason)
        _as_floats(buffer.scores)[entry] = row.score
        if buffer.parts is not None and row.verdict.parts is not None:
            values = dict(row.verdict.parts)
            parts = [values.get(name, np.nan) for name in reward_components]
            _as_floats(buffer.parts)[entry] = [1, *parts]
    if request.slot is not None:
        buffer.slots[entry] = request.slot
    if sampled is None:
        return
    length = buffer.lengths[entry] = len(sampled.tokens)
    buffer.tokens[entry, :length] = sampled.tokens
    buffer.behaviour_logprobs[entry, :length] = sampled.behaviour_logprobs
    buffer.old_logprobs[entry, :length] = sampled.old_logprobs
    buffer.versions[entry, :length] = sampled.versions
    if buffer.choices is not None and sampled.choices is not None:
        buffer.choices[entry, : len(sampled.choices)] = sampled.choices


def _read(
    buffer: AsyncBuffer[np.ndarray],
    entry: int,
    sampler: Sampler,
    examples: Mapping[int, Example],
    ids: Mapping[int, np.ndarray],
    reward_components: Sequence[str],
) -> Completion | Request:
    """Row of one entry; `examples` and token ids of prompts are by prompt id."""
    prompt, sample = int(buffer.prompts[entry]), int(buffer.samples[entry])
    tokens, length, sampled = ids[prompt], int(buffer.lengths[entry]), None
    if length:
        sampled = Sampled(
            buffer.tokens[entry, :length],
            buffer.behaviour_logprobs[entry, :length],
            buffer.old_logprobs[entry, :length],
            buffer.versions[entry, :length],
            None if buffer.choices is None else buffer.choices[entry, : len(tokens) + length],
        )
    request = Request(prompt, sample, tokens, sampler.response_length, sampled=sampled)
    # Still in flight: requested again, with its tokens so far, and its slot if that was kept.
    if buffer.finishes[entry] < 0 or sampled is None:
        slot = int(buffer.slots[entry])
        return request._replace(slot=None if slot < 0 else slot)
    finish = FINISH_REASONS[buffer.finishes[entry]]
    trajectory = Trajectory(request, sampled.tokens, finish, buffer=None, row=0)
    # The text is decoded again from the tokens; the verdict was stored.
    text, parts = text_of(sampler.format.tokenizer, sampled.tokens), None
    if buffer.parts is not None and (values := _as_floats(buffer.parts[entry]).tolist())[0]:
        pairs = zip(reward_components, values[1:], strict=True)
        parts = tuple((name, value) for name, value in pairs if not math.isnan(value))
    score = float(_as_floats(buffer.scores[entry]))
    verdict = Verdict(score, REASONS[buffer.reasons[entry]], parts)
    return Completion(trajectory, examples[prompt], text, verdict)


def _to_words(values: np.ndarray) -> np.ndarray:
    """Float64 numbers as pairs of int32 words, which no device rounds."""
    return values.astype(np.float64).view(np.int32).reshape(*values.shape, 2)


def _as_floats(words: np.ndarray) -> np.ndarray:
    """Inverse of `_to_words`: float64 numbers, a view of contiguous words."""
    return np.ascontiguousarray(words, np.int32).view(np.float64)[..., 0]


class AsyncCollector(Groups):
    """Samples until the next batch is complete, and rows of later batches in the meantime.

    Prompts are started in their order: first those that the next batch needs in any case. Beyond
    the first prompt that the batch can end with, as many prompts are started as the further batches
    in flight have: whatever the verdicts are, none of them belongs to a later batch.

    Args:
      sampler, recipe, seconds: as of `Groups`.
      batches: maximum number in flight, the next one included.
      first: id of the first prompt of the next batch.
      keep_pool: true if rows in flight keep their KV cache.
    """

    def __init__(
        self,
        sampler: Sampler,
        recipe: Recipe,
        *,
        batches: int,
        first: int,
        keep_pool: bool = False,
        seconds: dict[str, float],
    ):
        collection = recipe.collection
        self._compares = isinstance(collection, DynamicSampling)
        rounds = collection.max_rounds if isinstance(collection, DynamicSampling) else 1
        most = rounds * recipe.prompts
        super().__init__(sampler, recipe, sampling_of(recipe), first, most, seconds)
        self._keep_pool, self._num_beyond = keep_pool, (batches - 1) * recipe.prompts
        self._ended = Counter[int]()

    def collect_batch(self, pending: list[Completion | Request]) -> AsyncRollouts:
        """Samples the next batch.

        Args:
          pending: rows of its prompts and later ones that an earlier call left over.
        """
        # The oldest rows first: they are in the queue before all requests below.
        self._resume_rows(pending)
        self._submit_prompts()
        # Requests after each poll follow from counts, and so do the weights that sample them.
        while not self._is_complete():
            self._ended.update(trajectory.request.prompt for trajectory in self._poll())
            self._submit_prompts()
        self._add_verified(self._unverified.wait())
        # Rows of later batches are suspended, and continue with the next weights.
        return self._split_batch(self._sampler.engine.suspend(self._keep_pool))

    def _resume_rows(self, pending: list[Completion | Request]) -> None:
        """Restores the rows that an earlier call left over."""
        prompts = sorted({row_of(row).prompt for row in pending})
        self._examples = {prompt: self._sampler.task.train(prompt) for prompt in prompts}
        done = [row for row in pending if isinstance(row, Completion)]
        self._ended.update(row_of(row).prompt for row in done)
        self._add_verified(done)
        requests = [row for row in pending if isinstance(row, Request)]
        self._sampler.engine.submit(requests, self._sampling)

    def _submit_prompts(self) -> None:
        """Submits the prompts that may be started."""
        self._submit_until(self._needed().stop + self._num_beyond)

    def _is_complete(self) -> bool:
        """True if the next batch is complete; its last prompt is then determined."""
        if self._compares:
            return self._is_decided()
        # Without dynamic sampling the batch does not depend on verdicts: they are awaited once, at
        # the end.
        return all(self._ended[prompt] == self._recipe.group_size for prompt in self._needed())

    def _split_batch(self, suspended: list[Request]) -> AsyncRollouts:
        """Splits the rows into the next batch and pending rows, which include unfinished ones."""
        prompts = self._needed()
        assert all(request.prompt >= prompts.stop for request in suspended), (
            "the next batch has unfinished rows"
        )
        completions, informative = self._sampled(prompts)
        ready, counts = select_completions(self._recipe, completions, informative)
        metrics = verifier_counts(completions)
        if self._compares:
            metrics |= generation_metrics(self._recipe, informative, counts)
        later = [each for n, group in self._groups.items() if n not in prompts for each in group]
        # To the host: they become a part of the state, which outlives the engine's output buffers.
        sampled = [*ready, *later]
        pairs = zip(sampled, move_to_host([each.trajectory for each in sampled]), strict=True)
        on_host = [replace(each, trajectory=trajectory) for each, trajectory in pairs]
        pending: list[Completion | Request] = [*on_host[len(ready) :], *suspended]
        pending.sort(key=lambda row: (row_of(row).prompt, row_of(row).sample))
        return AsyncRollouts(on_host[: len(ready)], counts, prompts.stop, metrics, pending)
