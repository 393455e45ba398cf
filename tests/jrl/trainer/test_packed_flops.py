"""Packed passes do not compute what they do not use: read off the compiled programs."""

import functools
from dataclasses import replace

import jax
import numpy as np
from small_runs import small_recipe, small_run, small_setup
from three_updates import FAST_COMPILE, random_weights

from jrl.recipes import Batch
from jrl.trainer.packing import counts_of, place_rows, plan, without_idle
from jrl.trainer.prepare import targets_of
from jrl.trainer.update import update
from moe.config import ModelConfig

ROWS, PROMPT_LENGTH, RESPONSE_LENGTH, WINDOW = 8, 16, 48, 16
TIME = PROMPT_LENGTH + RESPONSE_LENGTH
D_MODEL, HEADS, HEAD_DIM, D_FF, LAYERS, VOCABULARY = 24, 2, 12, 40, 2, 1024
MODEL = ModelConfig(
    VOCABULARY,
    num_layers=LAYERS,
    d_model=D_MODEL,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
    num_experts=0,
    d_ff=D_FF,
)
# A multiplication and an addition for each weight, forward and twice backward.
OF_A_PLACE = 6 * D_MODEL * VOCABULARY
WIDTH = HEADS * HEAD_DIM
OF_A_TOKEN = 6 * LAYERS * (4 * D_MODEL * WIDTH + 3 * D_MODEL * D_FF + 2 * WIDTH * TIME)


def batch_of(setup, prompts, earlier, window, finished):
    """Rows of so many tokens of prompt, of earlier windows and of this one."""
    time = np.arange(TIME)[None, :]
    prompts, earlier, window = (np.full((ROWS, 1), n) for n in (prompts, earlier, window))
    valid = (time >= PROMPT_LENGTH - prompts) & (time < PROMPT_LENGTH + earlier + window)
    numbers = np.zeros(valid.shape, np.float32)
    batch = Batch(
        tokens=np.zeros(valid.shape, np.int32),
        valid=valid,
        mask=valid & (time >= PROMPT_LENGTH + earlier),
        old_logprobs=numbers,
        behaviour_logprobs=numbers,
        old_values=numbers,
        rewards=numbers[:, 0],
        finished=np.arange(ROWS) < finished,
        correct=np.zeros(ROWS, bool),
        lengths=(earlier + window)[:, 0].astype(np.int32),
    )
    batch = jax.device_put(batch)
    targets = targets_of(setup.recipe, batch)
    return batch.replace(
        mask=targets.mask,
        critic_mask=targets.critic_mask,
        advantages=targets.advantages,
        returns=targets.returns,
    )


@functools.cache
def flops(network, prompts, earlier, window, finished=ROWS, packed=True):
    """Of the update that a step would make, in one micro-batch."""
    recipe = small_recipe("tppo", window=WINDOW, ignore_last=0)
    setup = small_setup(recipe, small_run(), model=MODEL)
    setup = replace(setup, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH)
    batch = batch_of(setup, prompts, earlier, window, finished)
    of_rows = counts_of(batch).of(network, np.arange(ROWS), idle=False)
    if network == "critic":
        batch = batch.replace(mask=batch.critic_mask)
    of = setup.networks.critic if network == "critic" else setup.networks.policy
    rows, objective = without_idle(batch), of.objective
    if packed:
        laid = plan(*of_rows, TIME, 1, setup.mesh)
        rows = place_rows(rows, laid.starts, setup.mesh)
        objective = replace(objective, packed=laid.sizes)
    learner = of.init(random_weights(setup, of.config))
    program = update.lower(objective, of.optimizer, 1, learner, rows).compile(FAST_COMPILE)
    return program.cost_analysis()["flops"]


def test_the_head_sees_the_window_alone():
    """Twice the tokens before the window cost the layers alone; a window twice as long costs the
    head as well."""
    short = flops("actor", 8, 16, 8)  # 32 tokens a row, two in a bin
    long = flops("actor", 16, 40, 8)  # 64 tokens a row
    # What is no product (norms, softmax, masks, rotations) is about a tenth as much at this width.
    more = (long - short) / (4 * TIME)
    assert OF_A_TOKEN < more < 1.2 * OF_A_TOKEN
    wide = flops("actor", 8, 8, 16)  # 32 tokens a row again
    more = (wide - short) / (8 * ROWS)
    assert OF_A_PLACE < more < 1.2 * OF_A_PLACE


def test_the_policy_pays_for_packed_tokens():
    """Against every row at its full length, with a head for the whole response."""
    packed, padded = (flops("actor", 8, 16, 8, packed=packed) for packed in (True, False))
    spared = 4 * TIME * OF_A_TOKEN + ROWS * (RESPONSE_LENGTH - 8) * OF_A_PLACE
    np.testing.assert_allclose(padded - packed, spared, rtol=0.1)


def test_the_critic_pays_for_finished_responses_alone():
    """Each of 64 tokens, a bin of its own."""
    all_rows, half, quarter = (flops("critic", 16, 40, 8, n) for n in (ROWS, 4, 2))
    np.testing.assert_allclose(all_rows - half, 2 * (half - quarter), rtol=0.02)
    of_row = (all_rows - half) / 4
    assert OF_A_TOKEN < of_row / TIME < 1.2 * OF_A_TOKEN
