"""Rows of batches on the mesh, taken without the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.recipes import Batch
from jrl.recipes.base.batch import over_rows, take_rows
from jrl.rollout.collection.collect import batch_of
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.decoding.slots import Decoder, OutputBuffer, TokenRows
from jrl.rollout.resharding import rollout_mesh
from moe.config import tiny
from sharding.folding import Layout, fold

LAYOUTS = ["dp1", "tp2 dp2 cp2 / ep8", "tp2 dp2 cp2 / ep4", "pp2 dp2"]
PROMPT, RESPONSE, PAD = 4, 5, 99


def training_mesh(layout):
    layout = Layout.parse(layout)
    return fold(layout, jax.devices()[: layout.num_devices])


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_rows_of_a_batch(layout):
    mesh = training_mesh(layout)
    numbers = jnp.arange(8, dtype=jnp.int32)
    tokens, mask = jnp.tile(numbers[:, None], (1, 5)), jnp.ones((8, 5), bool)
    batch = jax.device_put(Batch(tokens, mask, mask, truncated=numbers > 3), over_rows(mesh))
    rows = np.array([0, 7, 3, 3])
    found = take_rows(batch, rows, mesh)
    assert found.tokens.sharding.is_equivalent_to(over_rows(mesh), 2)
    np.testing.assert_array_equal(found.tokens, np.tile(rows[:, None], (1, 5)))
    np.testing.assert_array_equal(found.truncated, rows > 3)
    assert found.advantages is None


def shelf_on(mesh, first, size):
    """Rows of a prompt of 1 + n % 4 tokens and a response of 1 + n % 5, both numbered on."""
    n = np.arange(first, first + size)
    prompts, lengths = 1 + n % 4, 2 + n % 4 + n % 5
    columns = np.arange(10)[None]
    tokens = np.where(columns < lengths[:, None], 100 * n[:, None] + columns, 7)
    numbers = jnp.asarray(tokens / 4, jnp.float32)
    rows = TokenRows(lengths, prompts, tokens, -numbers, 2 * numbers, tokens, None)
    decoder = Decoder(tiny(11), mesh, PAD, (0,))
    return OutputBuffer(decoder, jax.device_put(jax.tree.map(jnp.asarray, rows), over_rows(mesh)))


def trajectory(shelf, row, n, finish="stop", window=None):
    request = Request(n, 0, np.zeros(1 + n % 4, np.int32), 9, window=window)
    return Trajectory(request, np.zeros(1 + n % 5, np.int32), finish, shelf, row)


# Where the rollout has other axes over the same devices, rows lie on four ranks in place of two.
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trajectories_become_rows_on_the_mesh_of_training(layout):
    training = training_mesh(layout)
    rollout = rollout_mesh(None, training)
    one, other = shelf_on(rollout, 0, 8), shelf_on(rollout, 8, 16)
    order = [15, 0, 8, 7, 3, 22, 12, 9]
    shelves = [(one, n) if n < 8 else (other, n - 8) for n in order]
    given = [
        trajectory(shelf, row, n, "length" if n == 7 else "stop")
        for (shelf, row), n in zip(shelves, order, strict=True)
    ]
    counts = np.array([n != 9 for n in order])
    batch = batch_of(given, counts, training, PROMPT, RESPONSE)
    assert batch.tokens.sharding.is_equivalent_to(over_rows(training), 2)
    assert batch.finished is None
    np.testing.assert_array_equal(batch.truncated, [n == 7 for n in order])
    for row, n in enumerate(order):
        prompt, response = 1 + n % 4, 1 + n % 5
        ids = [100 * n + column for column in range(prompt + response)]
        valid = [False] * (PROMPT - prompt) + [True] * len(ids) + [False] * (RESPONSE - response)
        sampled = np.arange(PROMPT + RESPONSE) >= PROMPT
        np.testing.assert_array_equal(batch.valid[row], valid)
        np.testing.assert_array_equal(batch.mask[row], valid & sampled & (n != 9))
        np.testing.assert_array_equal(batch.tokens[row], padded(ids, prompt, PAD))
        zeros = np.where(valid & sampled, np.asarray(batch.tokens[row]) / 4, 0)
        np.testing.assert_array_equal(batch.behaviour_logprobs[row], -zeros)
        np.testing.assert_array_equal(batch.old_logprobs[row], 2 * zeros)


def padded(ids, prompt, fill):
    before = [fill] * (PROMPT - prompt)
    return before + ids + [fill] * (PROMPT + RESPONSE - len(before) - len(ids))


def test_of_a_window_the_mask_is_what_was_sampled_now():
    mesh = training_mesh("dp1")
    shelf = shelf_on(mesh, 0, 8)
    # The third row's prompt has three tokens; its response begins in an earlier window.
    rows = shelf.rows
    shelf.rows = TokenRows(**{**vars(rows), "starts": rows.starts.at[2].add(2)})
    going_on = trajectory(shelf, 2, 2, "window", window=1)
    batch = batch_of([going_on], np.ones(1, bool), mesh, PROMPT, RESPONSE)
    np.testing.assert_array_equal(batch.mask[0], np.arange(9) == 6)
    np.testing.assert_array_equal(batch.valid[0], (np.arange(9) >= 1) & (np.arange(9) < 7))
    assert batch.finished.tolist() == [False]
    assert batch.truncated.tolist() == [False]
