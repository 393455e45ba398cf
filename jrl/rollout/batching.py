"""Rows of batches on the mesh: where they live, and how some of them are taken."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch
from jrl.rollout.decoding.programs.slots import Rows
from jrl.rollout.decoding.requests import Trajectory
from sharding.folding import FoldedMesh


def over_rows(mesh: FoldedMesh) -> NamedSharding:
    """Where arrays with a row per sequence live."""
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))


def replicated(mesh: FoldedMesh) -> NamedSharding:
    """Where arrays live that every device holds."""
    return NamedSharding(mesh.mesh, PartitionSpec())


def take_rows(batch: Batch[Array], rows: np.ndarray, mesh: FoldedMesh) -> Batch[Array]:
    """Some rows of a batch: one program, nothing meets the host.

    Args:
      rows: their numbers.
    """
    chosen = to_devices(rows.astype(np.int32), replicated(mesh))
    return _taking(over_rows(mesh))(batch, chosen)


@cache
def _taking(sharding: NamedSharding) -> Callable[[Any, Array], Any]:
    def take(batch: Any, rows: Array) -> Any:
        return jax.tree.map(lambda column: jnp.take(column, rows, axis=0), batch)

    return jax.jit(take, out_shardings=sharding)


def batch_of(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
) -> Batch[Array]:
    """The trajectories as rows, in their order: one program, no token of them meets the host.

    Args:
      counts: ``[trajectories]`` bool; the mask of the others is false throughout.
      mesh: of training, over the devices that decoded or more.
      prompt_length: columns that prompts are padded to, on their left.
      response_length: columns of the responses after them.
    """
    shelves = list({id(t.shelf): t.shelf for t in trajectories if t.shelf is not None}.values())
    offsets = dict(zip(map(id, shelves), np.cumsum([0, *map(len, shelves)]), strict=False))
    rows = [offsets[id(t.shelf)] + t.row for t in trajectories]
    columns = {
        "rows": np.array(rows, np.int32),
        "prompts": np.array([len(t.request.tokens) for t in trajectories], np.int32),
        "truncated": np.array([t.finish == "length" for t in trajectories], bool),
        "finished": np.array([t.finish != "window" for t in trajectories], bool),
        "counts": np.asarray(counts, bool),
    }
    windows = any(t.request.window is not None for t in trajectories)
    # Without a place of its own XLA would choose one for them, which JAX then looks for on the mesh
    # that decoded, where it need not be.
    whole = to_devices(columns, replicated(mesh))
    decoder = shelves[0].decoder
    layout = _Layout(
        prompt_length, response_length, decoder.pad_id, decoder.config.num_experts, windows
    )
    making = _making(over_rows(mesh), layout)
    return making(tuple(_on_devices_of(mesh, shelf.rows) for shelf in shelves), whole)


def _on_devices_of(mesh: FoldedMesh, rows: Rows[Array]) -> Rows[Array]:
    """Rows that only some of the devices of `mesh` have, on all of them."""
    there = replicated(mesh)
    if rows.lengths.sharding.device_set == there.device_set:
        return rows
    return jax.device_put(rows, there)


def batch_from_host(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    no_expert: int,
) -> Batch[Array]:
    """`batch_of` for trajectories that were taken off the mesh, bit for bit the same.

    Of conversations the mask is that of the policy's tokens; where turns before the last have
    rewards, they lie on the last token of each.

    Args:
      pad_id: fills what is not a token.
      no_expert: stands where no choice of experts is recorded.
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
        if (turns := request.turns) is not None:
            mask[row, prompt_length:end] &= turns.of_policy(len(sampled.tokens))
            for place, reward in turns.rewards_before_end:
                turn_rewards[row, prompt_length + place] = reward
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
    """The columns of a batch, and what stands in them where no token is."""

    prompt_length: int
    response_length: int
    pad_id: int
    no_expert: int
    windows: bool


@cache
def _making(
    sharding: NamedSharding, layout: _Layout
) -> Callable[[tuple[Rows[Array], ...], dict[str, Array]], Batch[Array]]:
    def make(shelves: tuple[Rows[Array], ...], given: dict[str, Array]) -> Batch[Array]:
        rows = jax.tree.map(
            lambda *columns: jnp.take(jnp.concatenate(columns), given["rows"], axis=0), *shelves
        )
        return _as_batch(rows, given, layout)

    return jax.jit(make, out_shardings=sharding)


def _as_batch(rows: Rows[Array], given: dict[str, Array], layout: _Layout) -> Batch[Array]:
    """Rows that begin in their first column, with prompts that end where responses begin."""
    prompts, lengths = given["prompts"][:, None], rows.lengths[:, None]
    # The column that each token of the batch has in its row; before the prompt it is negative.
    columns = jnp.arange(layout.prompt_length + layout.response_length)[None]
    column = columns - (layout.prompt_length - prompts)
    valid = (column >= 0) & (column < lengths)
    sampled = valid & (column >= rows.starts[:, None])
    place = jnp.clip(column, 0, rows.tokens.shape[1] - 1)

    def moved(x: Array, where: Array, otherwise: float | int) -> Array:
        at = place.reshape(*place.shape, *[1] * (x.ndim - 2))
        where = where.reshape(at.shape)
        return jnp.where(where, jnp.take_along_axis(x, at, axis=1), jnp.asarray(otherwise, x.dtype))

    choices = rows.choices
    return Batch(
        tokens=moved(rows.tokens, valid, layout.pad_id),
        valid=valid,
        mask=sampled & given["counts"][:, None],
        behaviour_logprobs=moved(rows.behaviour_logprobs, sampled, 0.0),
        old_logprobs=moved(rows.old_logprobs, sampled, 0.0),
        truncated=given["truncated"],
        finished=given["finished"] if layout.windows else None,
        choices=None if choices is None else moved(choices, valid, layout.no_expert),
    )
