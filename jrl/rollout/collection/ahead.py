"""Buffer of asynchronous rollouts: completions sampled ahead of training, on the host and as arrays
in the state of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from flax import struct

from jrl.recipes.base.recipe import Recipe
from jrl.rollout.collection.collect import METRICS
from jrl.rollout.decoding.carried import no_choices
from jrl.rollout.decoding.requests import Finish, Request, Sampled, Trajectory
from jrl.rollout.sampler import Completion, Sampler
from jrl.tasks import REASONS, Example, Verdict
from jrl.text.prompts import text_of
from moe.config import ModelConfig

Leaf = TypeVar("Leaf")
# No "window": recipes with partial rollouts in windows do not sample ahead.
FINISHES: tuple[Finish, ...] = ("stop", "length")
"""Finish reasons of a response, by number."""


@dataclass
class Drawn:
    """Rows sampled ahead of training: the complete next batch, and rows of later batches.

    Attributes:
      ready: the completions that the next step trains on, all on the host.
      counts: ``[ready]`` bool; true if their tokens are in the loss mask.
      prompts_seen: training prompts used so far, including theirs.
      metrics: of their sampling and verification.
      pending: rows of prompts after those, in the order of prompts and samples: completions, and
        unfinished requests.
    """

    ready: list[Completion]
    counts: np.ndarray
    prompts_seen: int
    metrics: dict[str, float]
    pending: list[Completion | Request]


@struct.dataclass
class Ahead(Generic[Leaf]):
    """`Drawn` as arrays of fixed size: an entry for each completion of the next step, then those of
    the pending rows.

    Attributes:
      prompts_seen: ``[]`` as in `Drawn`.
      metrics: ``[metric, 2]`` those of `jrl.rollout.collection.collect.METRICS`, NaN where there is
        none. Float64 values are stored exactly, as two int32 words.
      prompts: ``[place]`` id of the prompt.
      samples: ``[place]`` sample id, the index of the response to its prompt.
      lengths: ``[place]`` tokens so far, 0 where it was not started; -1 where the entry is empty.
      finishes: ``[place]`` index of the finish reason in `FINISHES`; -1 for unfinished rows.
      slots: ``[place]`` the slot that a row in flight keeps; -1 where it keeps none.
      reasons: ``[place]`` index of the verdict's reason; -1 without a verdict.
      scores: ``[place, 2]`` of the verdict, stored as `metrics` are.
      parts: ``[place, 1 + part, 2]`` likewise: 1 where the verdict has reward components, else 0,
        and their values, NaN for missing ones; None where no verdict can have any.
      counts: ``[place]`` true if its tokens are in the loss mask.
      tokens, behaviour_logprobs, old_logprobs, versions: ``[place, response]`` as in
        `jrl.rollout.decoding.requests.Sampled`, 0 after its tokens.
      choices: ``[place, position, layer, k]`` expert ids, likewise, `num_experts` where there is
        none; None where they are not recorded.
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


class AheadSpec(NamedTuple):
    """Sizes of `Ahead`, and the conversion from and to `Drawn`.

    Attributes:
      recipe: determines the rows of a batch.
      batches: maximum number of batches sampled ahead.
      prompt_length, response_length: maximum tokens of a row.
      config: the policy network if expert ids are recorded, else None.
      reward_parts: names of the reward components that a verdict can have.
    """

    recipe: Recipe
    batches: int
    prompt_length: int
    response_length: int
    config: ModelConfig | None
    reward_parts: tuple[str, ...] = ()

    @property
    def places(self) -> int:
        return self.batches * self.recipe.completions

    def empty(self) -> Ahead[np.ndarray]:
        """Initial arrays, before anything was sampled."""
        places, response = self.places, self.response_length

        def filled(value: int, *shape: int) -> np.ndarray:
            return np.full(shape, value, np.int32)

        choices = None
        if self.config is not None:
            choices = no_choices(self.config, places, self.prompt_length + response)
        return Ahead(
            prompts_seen=np.zeros((), np.int32),
            metrics=_halves(np.full(len(METRICS), np.nan)),
            prompts=filled(0, places),
            samples=filled(0, places),
            lengths=filled(-1, places),
            finishes=filled(-1, places),
            slots=filled(-1, places),
            reasons=filled(-1, places),
            scores=_halves(np.zeros(places)),
            counts=np.zeros(places, bool),
            tokens=filled(0, places, response),
            behaviour_logprobs=np.zeros((places, response), np.float32),
            old_logprobs=np.zeros((places, response), np.float32),
            versions=filled(0, places, response),
            choices=choices,
            parts=_halves(_parts([], places, self.reward_parts)) if self.reward_parts else None,
        )

    def packed(self, drawn: Drawn) -> Ahead[np.ndarray]:
        """Converts sampled rows to arrays."""
        # Of fixed size: a checkpoint is restored into arrays of known shapes.
        packed, rows = self.empty(), [*drawn.ready, *drawn.pending]
        assert len(rows) <= self.places, f"{len(rows)} rows ahead and {self.places} places"
        scores = np.zeros(self.places)
        scores[: len(rows)] = [0.0 if isinstance(row, Request) else row.score for row in rows]
        packed = replace(
            packed,
            prompts_seen=np.asarray(drawn.prompts_seen, np.int32),
            metrics=_halves(np.array([drawn.metrics.get(name, np.nan) for name in METRICS])),
            scores=_halves(scores),
        )
        if self.reward_parts:
            parts = _parts(rows, self.places, self.reward_parts)
            packed = replace(packed, parts=_halves(parts))
        packed.counts[: len(drawn.counts)] = drawn.counts
        for place, row in enumerate(rows):
            _write(packed, place, row)
        return packed

    def unpacked(self, ahead: Ahead[np.ndarray], sampler: Sampler) -> Drawn | None:
        """Restores the argument of `packed`; None where nothing was sampled yet."""
        # The first entry is the next step's, whose batch is complete except before the first step.
        if ahead.lengths[0] < 0:
            return None
        places = np.flatnonzero(ahead.lengths >= 0).tolist()
        numbers = {int(number) for number in ahead.prompts[places]}
        # Prompts and answers are not stored: the task returns them again by their ids.
        examples = {number: sampler.task.train(number) for number in sorted(numbers)}
        ids = {number: sampler.encoded(example) for number, example in examples.items()}
        rows = [_read(ahead, place, sampler, examples, ids, self.reward_parts) for place in places]
        # The entries of the next step come first: their number separates them from pending rows.
        ready = [row for row in rows[: self.recipe.completions] if isinstance(row, Completion)]
        metrics = dict(zip(METRICS, _whole(ahead.metrics).tolist(), strict=True))
        return Drawn(
            ready=ready,
            counts=ahead.counts[: len(ready)],
            prompts_seen=int(ahead.prompts_seen),
            metrics={name: value for name, value in metrics.items() if not math.isnan(value)},
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
            f"step {version + 1} was to learn from tokens that are {staleness.min()} to "
            f"{staleness.max()} versions behind, and max_staleness={bound} allows 0 to {bound}: "
            "the checkpoint is not of this run, or the rollout engine mixes up its versions."
        )
    return staleness


def _parts(rows: Sequence[Completion | Request], places: int, names: tuple[str, ...]) -> np.ndarray:
    """Reward components ``[place, 1 + part]`` as `Ahead.parts`, in float64."""
    found = np.full((places, 1 + len(names)), np.nan)
    found[:, 0] = 0
    for place, row in enumerate(rows):
        verdict = row.verdict if isinstance(row, Completion) else None
        if verdict is not None and verdict.parts is not None:
            parts = dict(verdict.parts)
            found[place] = [1, *(parts.get(name, np.nan) for name in names)]
    return found


def _write(into: Ahead[np.ndarray], place: int, row: Completion | Request) -> None:
    request = row_of(row)
    into.prompts[place], into.samples[place] = request.prompt, request.sample
    # 0 is a request that was not started; -1 would be an empty entry.
    into.lengths[place], sampled = 0, request.sampled
    if isinstance(row, Completion):
        assert row.verdict is not None
        into.finishes[place] = FINISHES.index(row.trajectory.finish)
        into.reasons[place] = REASONS.index(row.verdict.reason)
    if request.slot is not None:
        into.slots[place] = request.slot
    if sampled is None:
        return
    length = into.lengths[place] = len(sampled.tokens)
    into.tokens[place, :length] = sampled.tokens
    into.behaviour_logprobs[place, :length] = sampled.behaviour_logprobs
    into.old_logprobs[place, :length] = sampled.old_logprobs
    into.versions[place, :length] = sampled.versions
    if into.choices is not None and sampled.choices is not None:
        into.choices[place, : len(sampled.choices)] = sampled.choices


def _read(
    ahead: Ahead[np.ndarray],
    place: int,
    sampler: Sampler,
    examples: Mapping[int, Example],
    prompts: Mapping[int, np.ndarray],
    names: tuple[str, ...],
) -> Completion | Request:
    """Row of one entry.

    Args:
      examples, prompts: by prompt id; `prompts` are token ids.
      names: of the reward components of verdicts.
    """
    prompt, sample = int(ahead.prompts[place]), int(ahead.samples[place])
    ids, length = prompts[prompt], int(ahead.lengths[place])
    sampled = None
    if length:
        sampled = Sampled(
            ahead.tokens[place, :length],
            ahead.behaviour_logprobs[place, :length],
            ahead.old_logprobs[place, :length],
            ahead.versions[place, :length],
            None if ahead.choices is None else ahead.choices[place, : len(ids) + length],
        )
    request = Request(prompt, sample, ids, sampler.response_length, sampled=sampled)
    # Still in flight: requested again, with its tokens so far, and its slot if that was kept.
    if ahead.finishes[place] < 0 or sampled is None:
        slot = int(ahead.slots[place])
        return request._replace(slot=None if slot < 0 else slot)
    finish = FINISHES[ahead.finishes[place]]
    trajectory = Trajectory(request, sampled.tokens, finish, shelf=None, row=0)
    # The text is decoded again from the tokens; the verdict was stored.
    text = text_of(sampler.format.tokenizer, sampled.tokens)
    score = float(_whole(ahead.scores[place]))
    parts = None
    if ahead.parts is not None and (values := _whole(ahead.parts[place]).tolist())[0]:
        pairs = zip(names, values[1:], strict=True)
        parts = tuple((name, value) for name, value in pairs if not math.isnan(value))
    verdict = Verdict(score, REASONS[ahead.reasons[place]], parts)
    return Completion(trajectory, examples[prompt], text, verdict)


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Float64 numbers as pairs of int32 words, which no device rounds."""
    return numbers.astype(np.float64).view(np.int32).reshape(*numbers.shape, 2)


def _whole(halves: np.ndarray) -> np.ndarray:
    """Inverse of `_halves`: float64 numbers from pairs of int32 words."""
    whole = np.ascontiguousarray(halves, np.int32).view(np.float64)
    return whole.reshape(halves.shape[:-1])
