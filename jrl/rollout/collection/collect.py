"""Collection of a step's training batch: completions are sampled, verified and, depending on the
recipe, filtered by dynamic sampling or continued for a window."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch, over_rows, replicated, required
from jrl.recipes.base.recipe import DynamicSampling, Recipe, Windows
from jrl.rollout.collection.dynamic_sampling import DynamicSampler
from jrl.rollout.collection.windows import sample_windows
from jrl.rollout.decoding.requests import Trajectory, move_to_host
from jrl.rollout.decoding.slots import TokenRows
from jrl.rollout.sampler import (
    Completion,
    Sampler,
    lengths_of,
    sampled_lengths_of,
    sort_completions,
)
from jrl.rollout.sampling import Sampling
from jrl.tasks import REASONS
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_onto

GENERATION = (
    "train/num_gen_batches",
    "dynamic_sampling/prompts_generated",
    "dynamic_sampling/prompts_kept",
    "dynamic_sampling/filtered",
    "dynamic_sampling/gave_up",
)
METRICS = (*(f"verifier/{reason}" for reason in REASONS), *GENERATION)
"""Metrics of sampling except times; the last ones with dynamic sampling only."""


@dataclass
class Collected:
    """Training batch of one step, with the metrics of its collection.

    Attributes:
      completions: those to train on, on the host; samples of one prompt are contiguous.
      batch: the same on the mesh of training.
      prompts_seen: training prompts used so far, including this step's.
      state: the part of the algorithm's state that the collection changed, on the host.
      metrics: metrics of sampling and verification.
      seconds: spent in decoding and in verification.
    """

    completions: list[Completion]
    batch: Batch[Array]
    prompts_seen: int
    state: Mapping[str, Any]
    metrics: dict[str, float]
    seconds: dict[str, float]


def collect(
    sampler: Sampler,
    recipe: Recipe,
    mesh: FoldedMesh,
    prompts_seen: int,
    state: Mapping[str, Any] = MappingProxyType({}),
) -> Collected:
    """Collects the completions of one step, by the recipe's `collection`.

    With dynamic sampling, groups whose scores are all equal have zero advantages and are replaced
    by groups of further prompts, up to `max_rounds` times the prompts of a step. If groups are
    still missing then, the batch is padded with uninformative groups outside of the loss mask, and
    the metrics report it.

    Args:
      sampler: with the policy loaded.
      mesh: mesh of training.
      prompts_seen: training prompts used before.
      state: state of the algorithm (`Recipe.init_state`), on the host.
    """
    collection, sampling = recipe.collection, sampling_of(recipe)
    seconds = {"timing_s/gen": 0.0, "timing_s/reward": 0.0}
    changed: Mapping[str, Any] = {}
    counts, generation = np.ones(recipe.completions, bool), dict[str, float]()
    before = sampler.engine.usage.copy()
    if isinstance(collection, DynamicSampling):
        finder = DynamicSampler(
            sampler,
            recipe,
            sampling,
            first=prompts_seen,
            most=collection.max_rounds * recipe.prompts,
            seconds=seconds,
        )
        sampled, informative = finder.find()
        # Only those that were needed: prompts prefetched beyond are sampled again in the next step.
        prompts_seen += len(informative)
        completions, counts = select_completions(recipe, sampled, informative)
        generation = generation_metrics(recipe, informative, counts)
    elif isinstance(collection, Windows):
        continued, prompts_seen, changed = sample_windows(
            sampler,
            recipe,
            required(collection.window),
            sampling,
            prompts_seen,
            dict(state),
            seconds,
        )
        # They arrive as they finish: sorted, so that the batch does not depend on that order.
        sampled = completions = sort_completions(continued)
    else:
        # Prompt ids count in the order of the task; they determine the RNG keys of a prompt.
        prompts = range(prompts_seen, prompts_seen + recipe.prompts)
        examples = {prompt: sampler.task.train(prompt) for prompt in prompts}
        sampled = completions = sampler.sample(
            examples, sampling, recipe.group_size, seconds=seconds
        )
        prompts_seen = prompts.stop
    used = sampler.engine.usage.since(before)
    return Collected(
        completions=completions,
        batch=batch_of_completions(sampler, completions, counts, mesh),
        prompts_seen=prompts_seen,
        state=changed,
        metrics=verifier_counts(sampled) | generation,
        seconds=seconds | used.metrics(),
    )


def batch_of_completions(
    sampler: Sampler, completions: Sequence[Completion], counts: np.ndarray, mesh: FoldedMesh
) -> Batch[Array]:
    """Batch of the completions as rows, in their order.

    Args:
      sampler: the sampler of the completions.
      counts: ``[completions]`` bool, rows in the loss; the mask of the others is all false.
      mesh: mesh of training.
    """
    trajectories = [completion.trajectory for completion in completions]
    lengths = sampler.prompt_length, sampler.response_length
    if all(trajectory.buffer is not None for trajectory in trajectories):
        return batch_of(trajectories, counts, mesh, *lengths)
    # Conversations are on the host, where their environments are.
    on_host, no_expert = move_to_host(trajectories), 0
    if (choices := on_host[0].sampled.choices) is not None:
        no_expert = int(choices[-1, 0, 0])  # the token that ended it was never run
    pad_id = sampler.format.tokenizer.pad_id
    return batch_from_host(on_host, counts, mesh, *lengths, pad_id, no_expert)


def batch_of(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
) -> Batch[Array]:
    """Batch of the trajectories as rows, in their order, made by one compiled function; no tokens
    move through the host.

    Args:
      counts: ``[trajectories]`` bool, rows in the loss; the mask of the others is all false.
      mesh: mesh of training, over the devices that decoded or more.
      prompt_length: positions that prompts are padded to, on their left.
      response_length: positions of the responses after them.
    """
    buffers = list({id(t.buffer): t.buffer for t in trajectories if t.buffer is not None}.values())
    offsets = dict(zip(map(id, buffers), np.cumsum([0, *map(len, buffers)]), strict=False))
    rows = [offsets[id(t.buffer)] + t.row for t in trajectories]
    row_fields = {
        "rows": np.array(rows, np.int32),
        "prompts": np.array([len(t.request.tokens) for t in trajectories], np.int32),
        "truncated": np.array([t.finish == "length" for t in trajectories], bool),
        "finished": np.array([t.finish != "window" for t in trajectories], bool),
        "counts": np.asarray(counts, bool),
    }
    windows = any(t.request.window is not None for t in trajectories)
    # If XLA chose the sharding, JAX would look for it on the mesh that decoded, and might not find
    # it.
    fields_on_mesh = to_devices(row_fields, replicated(mesh))
    decoder = buffers[0].decoder
    layout = _Layout(
        prompt_length, response_length, decoder.pad_id, decoder.config.num_experts, windows
    )
    make_batch = _compiled_batch(over_rows(mesh), layout)
    return make_batch(
        tuple(_replicate_rows(mesh, buffer.rows) for buffer in buffers), fields_on_mesh
    )


def _replicate_rows(mesh: FoldedMesh, rows: TokenRows[Array]) -> TokenRows[Array]:
    """Copies rows from a subset of the devices of `mesh` to all of them."""
    sharding = replicated(mesh)
    if rows.lengths.sharding.device_set == sharding.device_set:
        return rows
    return jax.device_put(rows, sharding)


def batch_from_host(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    no_expert: int,
) -> Batch[Array]:
    """Batch of trajectories that are stored on the host, bitwise identical to `batch_of`.

    The mask of a conversation selects the policy's tokens; a reward of a turn before the last is on
    the last token of that turn.

    Args:
      pad_id: id of padding.
      no_expert: expert id of tokens without recorded experts.
    """
    shape = len(trajectories), prompt_length + response_length
    choices = trajectories[0].sampled.choices
    if choices is not None:
        choices = np.full((*shape, *choices.shape[1:]), no_expert, choices.dtype)
    tokens = np.full(shape, pad_id, np.int32)
    valid, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    behaviour_logprobs, old_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    turn_rewards = np.zeros(shape, np.float32)
    for row, trajectory in enumerate(trajectories):
        request, sampled = trajectory.request, trajectory.sampled
        begin, end = prompt_length - len(request.tokens), prompt_length + len(sampled.tokens)
        tokens[row, begin:end], valid[row, begin:end] = request.ids, True
        mask[row, prompt_length:end] = counts[row]
        if (conversation := request.conversation) is not None:
            mask[row, prompt_length:end] &= conversation.policy_mask(len(sampled.tokens))
            for position, reward in conversation.rewards_before_end:
                turn_rewards[row, prompt_length + position] = reward
        behaviour_logprobs[row, prompt_length:end] = sampled.behaviour_logprobs
        old_logprobs[row, prompt_length:end] = sampled.old_logprobs
        if choices is not None:
            choices[row, begin:end] = sampled.choices
    batch = Batch(
        tokens=tokens,
        valid=valid,
        mask=mask,
        behaviour_logprobs=behaviour_logprobs,
        old_logprobs=old_logprobs,
        truncated=np.array([t.finish == "length" for t in trajectories]),
        choices=choices,
        turn_rewards=turn_rewards if turn_rewards.any() else None,
    )
    return to_devices(batch, over_rows(mesh))


class _Layout(NamedTuple):
    """Static sizes of a batch, and the padding values of its arrays."""

    prompt_length: int
    response_length: int
    pad_id: int
    no_expert: int
    windows: bool


@cache
def _compiled_batch(
    sharding: NamedSharding, layout: _Layout
) -> Callable[[tuple[TokenRows[Array], ...], dict[str, Array]], Batch[Array]]:
    def make_batch(
        buffers: tuple[TokenRows[Array], ...], row_fields: dict[str, Array]
    ) -> Batch[Array]:
        rows = jax.tree.map(
            lambda *arrays: jnp.take(jnp.concatenate(arrays), row_fields["rows"], axis=0),
            *buffers,
        )
        return _as_batch(rows, row_fields, layout)

    return jit_onto(make_batch, sharding)


def _as_batch(
    rows: TokenRows[Array], row_fields: dict[str, Array], layout: _Layout
) -> Batch[Array]:
    """Converts left-aligned rows to a batch, in which all responses start at the same position."""
    prompts, lengths = row_fields["prompts"][:, None], rows.lengths[:, None]
    # Position of each token of the batch in its row; negative before the prompt.
    in_batch = jnp.arange(layout.prompt_length + layout.response_length)[None]
    in_row = in_batch - (layout.prompt_length - prompts)
    valid = (in_row >= 0) & (in_row < lengths)
    sampled = valid & (in_row >= rows.starts[:, None])
    positions = jnp.clip(in_row, 0, rows.tokens.shape[1] - 1)

    def align(x: Array, where: Array, otherwise: float | int) -> Array:
        index = positions.reshape(*positions.shape, *[1] * (x.ndim - 2))
        where = where.reshape(index.shape)
        return jnp.where(
            where, jnp.take_along_axis(x, index, axis=1), jnp.asarray(otherwise, x.dtype)
        )

    choices = rows.choices
    return Batch(
        tokens=align(rows.tokens, valid, layout.pad_id),
        valid=valid,
        mask=sampled & row_fields["counts"][:, None],
        behaviour_logprobs=align(rows.behaviour_logprobs, sampled, 0.0),
        old_logprobs=align(rows.old_logprobs, sampled, 0.0),
        truncated=row_fields["truncated"],
        finished=row_fields["finished"] if layout.windows else None,
        choices=None if choices is None else align(choices, valid, layout.no_expert),
    )


def add_verdicts(
    batch: Batch[Array],
    completions: Sequence[Completion],
    scores: np.ndarray,
    correct: np.ndarray,
    recipe: Recipe,
    response_length: int,
    mesh: FoldedMesh,
) -> Batch[Array]:
    """Adds results of the verifier to the batch: rewards, correct, groups and lengths.

    Args:
      completions: the rows of `batch`.
      scores: scores of their verdicts.
      correct: mask of the scores with full marks.
      response_length: maximum tokens of a response.
      mesh: mesh of training.
    """
    lengths = lengths_of(completions)
    before_end = sum_earlier_turn_rewards(completions, batch)
    # Rewards of turns before the last are not transformed: the recipe's `rewards` applies to the
    # end.
    final = jnp.asarray(scores if before_end is None else scores - before_end)
    rewards = recipe.rewards(final, jnp.asarray(lengths), response_length)
    verdicts = {
        "rewards": rewards if before_end is None else rewards + before_end,
        "correct": correct,
        "groups": groups_of(completions),
        "lengths": sampled_lengths_of(completions),
    }
    batch = replace(batch, **to_devices(verdicts, over_rows(mesh)))
    return batch if batch.finished is None else _clear_unfinished(batch, batch.finished)


def sum_earlier_turn_rewards(
    completions: Sequence[Completion], batch: Batch[Array]
) -> np.ndarray | None:
    """Sum of the rewards of turns before the last, ``[completions]``; None where the batch has
    none."""
    if batch.turn_rewards is None:
        return None
    conversations = [completion.trajectory.request.conversation for completion in completions]
    earlier_rewards = [
        () if conversation is None else conversation.rewards_before_end
        for conversation in conversations
    ]
    return np.array(
        [sum(reward for _, reward in row_rewards) for row_rewards in earlier_rewards], np.float32
    )


@jax.jit
def _clear_unfinished(batch: Batch[Array], finished: Array) -> Batch[Array]:
    """Sets the rewards of unfinished responses to 0, as they were not verified."""
    rewards = jnp.where(finished, required(batch.rewards), 0.0)
    return replace(batch, rewards=rewards, correct=required(batch.correct) & finished)


def select_completions(
    recipe: Recipe, sampled: list[Completion], informative: np.ndarray
) -> tuple[list[Completion], np.ndarray]:
    """Selects a step's completions, informative groups first; returns them with their loss flags.

    Args:
      sampled: whole groups.
      informative: ``[group]`` true for groups with unequal scores.
    """
    in_loss = np.repeat(informative, recipe.group_size)
    # Stable, so groups stay contiguous and in the order of their prompts.
    order = np.argsort(~in_loss, kind="stable")[: recipe.completions]
    return [sampled[row] for row in order], in_loss[order]


def generation_metrics(
    recipe: Recipe, informative: np.ndarray, counts: np.ndarray
) -> dict[str, float]:
    """Metrics of dynamic sampling.

    Args:
      informative: ``[group]`` true for informative groups, of all sampled ones.
      counts: ``[completions]`` loss flags of the batch.
    """
    generated = len(informative)
    values = (
        generated / recipe.prompts,
        float(generated),
        float(counts.sum() / recipe.group_size),
        1 - int(informative.sum()) / generated,
        float(not counts.all()),
    )
    return dict(zip(GENERATION, values, strict=True))


def verifier_counts(completions: Sequence[Completion]) -> dict[str, float]:
    """Number of verdicts by reason, over all verified completions, dropped groups included."""
    reasons = Counter(each.verdict.reason for each in completions if each.verdict is not None)
    return {f"verifier/{reason}": float(reasons[reason]) for reason in REASONS}


def sampling_of(recipe: Recipe) -> Sampling:
    """Sampling parameters of the training completions."""
    return Sampling(recipe.temperature, recipe.top_k, recipe.top_p, recipe.temperature_rule)


def groups_of(completions: Sequence[Completion]) -> np.ndarray:
    """Prompt id of each completion, ``[completions]``."""
    return np.array([c.trajectory.request.prompt for c in completions], np.int32)


def shown_rows(completions: Sequence[Completion], max_rows: int) -> list[int]:
    """Indices of completions to show, in their order: at most two per prompt while other prompts
    are left."""
    rows = np.arange(len(completions))
    is_first = np.diff(groups_of(completions), prepend=-1) != 0
    rank_in_prompt = rows - np.maximum.accumulate(np.where(is_first, rows, 0))
    return sorted(np.argsort(rank_in_prompt // 2, kind="stable")[:max_rows].tolist())
