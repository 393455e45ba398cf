"""Packed passes do not compute what they do not use: read off the compiled programs."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import small_recipe, small_run, small_setup
from three_updates import FAST_COMPILE, random_weights

from jrl.recipes import Batch
from jrl.rollout.packing import PackedSizes, clear_idle_rows, counts_of, pack_rows, plan
from jrl.trainer.learner.update import update
from jrl.trainer.step import targets_of
from moe.config import ModelConfig

ROWS, PROMPT_LENGTH, RESPONSE_LENGTH, WINDOW = 8, 16, 48, 16
TIME = PROMPT_LENGTH + RESPONSE_LENGTH
D_MODEL, HEADS, HEAD_DIM, D_FF, LAYERS, VOCABULARY = 24, 2, 12, 40, 1, 1024
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


class Program(NamedTuple):
    """An update that a step would make: its operations, of them one pass's and the optimizer's,
    and how many passes it makes."""

    flops: float
    passes: int
    sizes: PackedSizes
    text: str


@functools.cache
def compiled(network, prompts, earlier, window, *, finished=ROWS, bins=2, packed=True):
    recipe = small_recipe("tppo", window=WINDOW, ignore_last=0)
    setup = small_setup(recipe, small_run(), model=MODEL)
    setup = replace(setup, prompt_length=PROMPT_LENGTH, response_length=RESPONSE_LENGTH)
    batch = batch_of(setup, prompts, earlier, window, finished)
    of_rows = counts_of(batch).for_network(network, np.arange(ROWS), idle=False)
    if network == "critic":
        batch = batch.replace(mask=batch.critic_mask)
    of = setup.networks.critic if network == "critic" else setup.networks.policy
    laid = plan(*of_rows, TIME, bins, setup.mesh)
    rows, objective, num_micro, passes = clear_idle_rows(batch), of.objective, 1, None
    if packed:
        rows, passes = pack_rows(rows, laid, setup.mesh), jnp.int32(laid.passes)
        objective, num_micro = replace(objective, packed=laid.sizes), laid.num_micro_batches
    learner = of.init(random_weights(setup, of.config))
    given = objective, of.optimizer, num_micro, learner, rows, None, passes
    program = update.lower(*given).compile(FAST_COMPILE)
    # Of a loop the analysis counts one iteration.
    return Program(program.cost_analysis()["flops"], laid.passes, laid.sizes, program.as_text())


@pytest.mark.slow
def test_the_head_sees_the_window_alone():
    """Of rows with twice as many tokens before it as well."""
    short = compiled("actor", 8, 16, 8)  # 32 tokens a row, two in a bin
    long = compiled("actor", 16, 40, 8)  # 64 tokens a row
    wide = compiled("actor", 8, 8, 16)  # 32 tokens a row again
    assert [p.passes for p in (short, long, wide)] == [2, 4, 2]
    # The window's tokens and no place more.
    counted = [p.passes * p.sizes.max_scored for p in (short, long, wide)]
    assert counted == [8 * ROWS, 8 * ROWS, 16 * ROWS]
    # Softmax and entropy of a place, and their gradients, come on top of products.
    for more, less in ((short, long), (wide, short)):
        of_a_place = (more.flops - less.flops) / (more.sizes.max_scored - less.sizes.max_scored)
        assert OF_A_PLACE < of_a_place < 1.2 * OF_A_PLACE


@pytest.mark.slow
def test_the_policy_pays_for_packed_tokens():
    two, four = (compiled("actor", 16, 40, 8, bins=bins) for bins in (2, 4))
    assert [p.passes * p.sizes.bins * p.sizes.length for p in (two, four)] == [ROWS * TIME] * 2
    short = compiled("actor", 8, 16, 8)
    assert short.passes * short.sizes.bins * short.sizes.length == ROWS * TIME // 2
    # What is no product (norms, softmax, masks, rotations) is about a tenth as much at this width.
    of_a_token = (four.flops - two.flops - 16 * OF_A_PLACE) / (2 * TIME)
    assert OF_A_TOKEN < of_a_token < 1.25 * OF_A_TOKEN
    # Every row at its full length, and a head for the whole response.
    padded = compiled("actor", 8, 16, 8, packed=False)
    more = 6 * TIME * OF_A_TOKEN + (ROWS * RESPONSE_LENGTH - 32) * OF_A_PLACE
    np.testing.assert_allclose(padded.flops - short.flops, more, rtol=0.1)


@pytest.mark.slow
def test_the_critic_pays_for_finished_responses_alone():
    """One program for any number of them, of which each has a bin of its own."""
    some = [compiled("critic", 16, 40, 8, finished=number) for number in (ROWS, 4, 2)]
    assert [p.passes for p in some] == [4, 2, 1]
    assert len({(p.flops, p.sizes) for p in some}) == 1
    # A pass that is not made is not computed: its loop has a branch around it.
    assert all(" conditional(" in p.text for p in some)
    four = compiled("critic", 16, 40, 8, bins=4)
    of_a_token = (four.flops - some[0].flops) / (2 * TIME)
    assert OF_A_TOKEN < of_a_token < 1.25 * OF_A_TOKEN
