"""Prompts that share rows: where they stand, and that each is run as in a row of its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from policies import CONFIG, PAD, Asked, weights
from tiers import full_but

from jrl.rollout.decoding.packing import FEWEST_RUNS, plan_rows, row_count
from jrl.rollout.decoding.programs.packed import Packing, prefilled_packed
from jrl.rollout.decoding.programs.slots import Decoder, over_slots, prefilled_local
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.seating import NARROWEST_ROW, RUNS_PER_ROW, Arriving, Seating
from jrl.rollout.sampling import GREEDY
from moe.cache.buffers import over_columns
from moe.decoding import Prefilled
from moe.placement import specs
from sharding.collectives import vary


def arriving(runs: list[list[int]], per_rank: int) -> Arriving:
    """Prompts of these lengths on each rank, a slot for each."""
    ids = [[np.full(length, 3, np.int32) for length in own] for own in runs]
    seats = [
        (rank * per_rank + run, Request(100 * rank + run, 0, tokens, 1), run)
        for rank, own in enumerate(ids)
        for run, tokens in enumerate(own)
    ]
    return Arriving(ids, seats)


def test_row_counts_are_few():
    counts = [row_count(least) for least in range(1, 18)]
    assert counts == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16, 16, 16, 16, 24]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_stand_beside_each_other_within_rows(seed):
    draw = np.random.default_rng(seed)
    runs = [draw.integers(1, 129, draw.integers(1, 17)).tolist() for _ in range(2)]
    plan = plan_rows(arriving(runs, per_rank=32), columns=512, unit=1, per_rank=32)
    assert plan.width == 128 and plan.starts.shape == (2, plan.num_runs)
    for own, starts in zip(runs, plan.starts, strict=True):
        taken = np.zeros(plan.num_rows * plan.width, int)
        for length, start in zip(own, starts, strict=False):
            assert start // plan.width == (start + length - 1) // plan.width, "over a row's end"
            taken[start : start + length] += 1
        assert taken.max() == 1 and taken.sum() == sum(own)
    # First fit leaves no two rows half empty.
    assert plan.num_rows <= row_count(2 * -(-max(map(sum, runs)) // 128) + 1)


@pytest.mark.parametrize("longest", [12, 128, 400])
def test_programs_run_so_many_tokens_at_most(longest):
    draw = np.random.default_rng(longest)
    seating = Seating(64, 1, most_tokens=1024, shares_rows=True, lowest_first=True)
    lengths = draw.integers(1, longest + 1, 64)
    asked = [Request(n, 0, np.full(length, 3, np.int32), 1) for n, length in enumerate(lengths)]
    seating.waiting.extend(asked)
    programs = seating.arrivals()
    plans = [plan_rows(program, 512, 1, 64) for program in programs]
    assert all(plan.num_rows * plan.width <= 1024 for plan in plans)
    assert sum(len(program.runs[0]) for program in programs) == 64
    room = sum(plan.num_rows * plan.width for plan in plans)
    least = 64 // RUNS_PER_ROW * NARROWEST_ROW
    assert room <= max(2 * lengths.sum() + 512, least), "most of it is padding"
    # Who comes next sits in the first slot that is free.
    for slot in (9, 40, 3):
        seating.leave(slot)
    seating.waiting.append(asked[0]._replace(prompt=99))
    assert [slot for slot, *_ in seating.arrivals()[0].seats] == [3] and seating.reach == 64


def test_one_row_is_as_wide_as_what_stands_in_it_and_samples_need_room():
    assert plan_rows(arriving([[9, 12]], 8), 512, 1, 8).width == 32
    assert plan_rows(arriving([[70]], 8), 512, 1, 8).width == 128
    assert plan_rows(arriving([[200, 3]], 8), 250, 1, 8).width == 250
    alone = arriving([[9]], 32)
    assert plan_rows(alone, 512, 1, 32).num_runs == FEWEST_RUNS
    alone.seats *= FEWEST_RUNS + 1  # samples of one prompt, each with a slot
    assert plan_rows(alone, 512, 1, 32).num_runs == 32


@pytest.mark.parametrize("layout", full_but(["dp1", "dp2", "tp2 / ep2"], "dp1"))
def test_a_prompt_that_shares_a_row_runs_as_in_its_own(layout):
    mesh = Asked(GREEDY, layout).mesh
    decoder = Decoder(CONFIG, mesh, PAD, (2,), records_choices=True)
    ranks, width = mesh.size(mesh.dp), 8
    # Of each rank: two prompts in the first row, the longest in the second, and one that is none.
    lengths = jnp.array([3, 5, 8, 0] * ranks, jnp.int32)
    starts = jnp.array([5, 0, 8, 0] * ranks, jnp.int32)
    ids = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (4 * ranks, width))
    rows, whole = over_slots(mesh), PartitionSpec(mesh.except_sequence, mesh.sequence)
    spread: Any = rows

    def run(local: Any, *given: Any) -> Prefilled:
        mapped = jax.shard_map(
            lambda weights, *given: local(decoder, vary(weights, mesh.axes), *given),
            mesh=mesh.mesh,
            in_specs=(specs(CONFIG, mesh), *[rows] * len(given)),
            out_specs=Prefilled(whole, spread, spread),  # pyright: ignore
        )
        return jax.jit(mapped)(weights(), *given)

    tokens = jnp.asarray(ids, jnp.int32)
    packed = run(prefilled_packed, tokens, lengths, Packing(starts, num_rows=2))
    plain = run(prefilled_local, tokens, lengths)
    there = np.arange(width)[None] < np.asarray(lengths)[:, None]
    for got, wanted in zip(
        jax.tree.leaves(packed.cache), jax.tree.leaves(plain.cache), strict=True
    ):
        assert got.shape == wanted.shape

    def compared(got: Any, wanted: Any, axis: int) -> np.ndarray:
        assert got.shape == wanted.shape
        by_token = partial(np.moveaxis, source=axis, destination=1)
        # float32: the same sums in products of other sizes.
        np.testing.assert_allclose(by_token(got)[there], by_token(wanted)[there], atol=1e-5)
        return got

    over_columns(compared, packed.cache, plain.cache)  # pyright: ignore
    some = np.asarray(lengths) > 0
    np.testing.assert_allclose(packed.states[some], plain.states[some], atol=1e-5)
    np.testing.assert_array_equal(packed.choices[there], plain.choices[there])
