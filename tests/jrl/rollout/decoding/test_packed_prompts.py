"""Prompts that share rows: their places, and equal results in rows of their own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from policies import CONFIG, PAD, Asked, weights

from jrl.rollout.decoding import packed_prompts as packed
from jrl.rollout.decoding.packed_prompts import CHUNK, make_packing, plan_cache_copies, plan_rows
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling.scheduler import AdmissionPlan, SlotScheduler
from jrl.rollout.decoding.scheduling.sizes import (
    row_count,
    row_sizes,
    row_widths,
    single_row_widths,
)
from jrl.rollout.decoding.slots import Decoder, empty_pool, over_slots, run_prefill
from jrl.rollout.sampling import GREEDY
from moe.cache import ROW, over_columns
from moe.layers.depth import split_groups


def arriving(runs: list[list[int]], per_rank: int) -> AdmissionPlan:
    """Prompts of these lengths on each rank, a slot for each."""
    ids = [[np.full(length, 3, np.int32) for length in own] for own in runs]
    seats = [
        (rank * per_rank + run, Request(100 * rank + run, 0, tokens, 1), run)
        for rank, own in enumerate(ids)
        for run, tokens in enumerate(own)
    ]
    return AdmissionPlan(ids, seats)


def test_sizes_of_rows_are_few():
    assert [row_count(least) for least in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert row_widths(1000, unit=3) == [66, 129, 258, 513, 1002]
    assert row_widths(40, unit=1) == [40] and row_widths(128, unit=2) == [64, 128]
    assert single_row_widths([64, 128]) == [64, 128, 192, 256, 320, 384] and single_row_widths(
        [9, 40], 46
    ) == [54]
    of_few = [(width, 1) for width in single_row_widths([64])]
    of_many = [(128, 4), (128, 8), (256, 2), (256, 4), (500, 1), (500, 2)]
    assert row_sizes(row_widths(500, 1), per_rank=8, most_tokens=1024) == of_few + of_many
    assert row_sizes([9, 2048], per_rank=2, most_tokens=1024)[-2:] == [(54, 1), (2048, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_prompts_stand_beside_each_other_within_rows(seed):
    draw = np.random.default_rng(seed)
    runs = [draw.integers(1, 129, draw.integers(2, 17)).tolist() for _ in range(2)]
    runs[0] += [128, 128, 128]  # no row holds them all
    asked = arriving(runs, per_rank=32)
    plan = plan_rows(asked, [64, 128, 256])
    packing = make_packing(plan, asked, slots=64, pad_id=PAD)
    assert plan.width == 128 and packing.tokens.shape == (2 * plan.num_rows, 128)
    by_rank = [x.reshape(2, -1) for x in (packing.tokens, packing.segments, packing.positions)]
    for rank, (own, starts) in enumerate(zip(runs, plan.starts, strict=True)):
        tokens, segments, positions = (x[rank] for x in by_rank)
        for number, (length, start) in enumerate(zip(own, starts, strict=True), 1):
            assert start // plan.width == (start + length - 1) // plan.width, "over a row's end"
            np.testing.assert_array_equal(
                np.flatnonzero(segments == number)[[0, -1]],
                [
                    start,
                    start + length - 1,
                ],
            )
            np.testing.assert_array_equal(positions[segments == number], np.arange(length))
            assert packing.ends[rank * 32 + number - 1] == start + length - 1
        assert (segments > 0).sum() == (tokens != PAD).sum() == sum(own)
    # First fit leaves no two rows half empty.
    assert plan.num_rows <= row_count(2 * -(-max(map(sum, runs)) // 128) + 1)


def test_prompts_of_all_lengths_are_one_program_where_one_row_holds_them():
    """Short, long and one that two samples share, on two ranks."""
    widths, lengths = row_widths(512, 1), [20, 200, 130, 9, 9]
    scheduler = SlotScheduler(8, 2, most_tokens=1024, row_widths=widths)
    asked = [Request(n, 0, np.full(length, n, np.int32), 1) for n, length in enumerate(lengths)]
    scheduler.waiting.extend([*asked, asked[1]._replace(sample=1)])
    (program,) = scheduler.schedule()
    plan = plan_rows(program, widths)
    packing = make_packing(plan, program, slots=8, pad_id=PAD)
    assert (
        plan.num_rows == 1
        and plan.width == single_row_widths(widths, max(map(len, packing.tokens)))[0]
    )
    rows = packing.tokens.reshape(2, -1)
    for slot, request, _ in program.assignments:
        end = packing.ends[slot]
        own = rows[slot // 4][end + 1 - request.length : end + 1]
        np.testing.assert_array_equal(own, request.ids)
    assert sum(map(len, program.runs)) == 5 and len(program.assignments) == 6
    scheduler = SlotScheduler(8, 1, most_tokens=1024, row_widths=widths)
    scheduler.waiting.extend([*asked, Request(5, 0, np.full(300, 5, np.int32), 1)])
    assert len(scheduler.schedule()) == 3, "more than a row holds: a program for each width"


@pytest.mark.parametrize("longest", [12, 128, 400])
def test_programs_run_so_many_tokens_at_most(longest):
    draw, widths = np.random.default_rng(longest), row_widths(512, 1)
    scheduler = SlotScheduler(64, 1, most_tokens=1024, row_widths=widths)
    lengths = draw.integers(1, longest + 1, 64)
    asked = [Request(n, 0, np.full(length, 3, np.int32), 1) for n, length in enumerate(lengths)]
    scheduler.waiting.extend(asked)
    programs = scheduler.schedule()
    plans = [plan_rows(program, widths) for program in programs]
    known = row_sizes(widths, per_rank=64, most_tokens=1024)
    assert all((plan.width, plan.num_rows) in known for plan in plans)
    assert sum(len(program.runs[0]) for program in programs) == 64
    room = sum(plan.num_rows * plan.width for plan in plans)
    assert room <= 2 * lengths.sum() + 1024, "most of it is padding"


def test_one_row_where_it_holds_them_all():
    widths = row_widths(250, 1)
    sizes = [
        (
            plan_rows(arriving([runs], 8), widths).width,
            plan_rows(arriving([runs], 8), widths).num_rows,
        )
        for runs in ([9, 12], [64], [60, 5], [70], [200, 3, 60], [200, 3, 182])
    ]
    assert sizes == [(64, 1), (64, 1), (128, 1), (128, 1), (320, 1), (250, 2)]


def test_copies_reach_over_each_prompt_and_no_further_than_the_cache():
    asked = arriving([[150], [3]], per_rank=2)
    asked.assignments.append((1, asked.assignments[0][1], 0))  # another sample of the first prompt
    plan = plan_rows(asked, row_widths(512, 1))
    copies = plan_cache_copies(plan, asked, slots=4, max_length=512, cache_length=150)
    assert copies.counts.tolist() == [6, 1]
    first, second = (x.reshape(2, -1) for x in (copies.slots, copies.positions))
    assert first[0, :6].tolist() == [0] * 3 + [1] * 3 and first[1, 0] == 0
    assert second[0, :6].tolist() == [0, 64, 150 - CHUNK] * 2
    np.testing.assert_array_equal(copies.sources, copies.positions)
    one = arriving([[5], []], per_rank=2)  # the other rank gets nothing
    plan = plan_rows(one, row_widths(512, 1))
    assert plan_cache_copies(plan, one, 4, 512, 128).counts.tolist() == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "scanned", "windows"),
    [("dp1", True, True), ("dp2", False, False), ("tp2 / ep2", True, False)],
)
def test_a_prompt_that_shares_a_row_runs_as_in_its_own(layout, scanned, windows, monkeypatch):
    monkeypatch.setattr(packed, "CHUNK", 3)
    mesh = Asked(GREEDY, layout).mesh
    execution = replace(CONFIG.execution, scan_layers=scanned)
    config = replace(CONFIG, num_layers=2, execution=execution)
    if windows:
        # Of four layers every other looks back no further than two tokens.
        config = replace(config, num_layers=4, sliding_window=3, full_attention_layers=(1, 3))
    decoder, own_weights = Decoder(config, mesh, PAD + scanned, (2,)), weights(config)
    ranks, width, columns, per_rank = mesh.size(mesh.dp), 8, 11, 5
    # Of each rank: two prompts in the first row, the longest in the second; a slot takes nothing,
    # and two the same.
    draw, lengths = np.random.default_rng(0), [3, 5, 8]
    runs = [[draw.integers(3, 11, n).astype(np.int32) for n in lengths] for _ in range(ranks)]
    taken = {0: 1, 2: 0, 3: 2, 4: 0}
    seats = [
        (rank * per_rank + slot, Request(run, slot, own[run], 1), run)
        for rank, own in enumerate(runs)
        for slot, run in taken.items()
    ]
    asked, slots = AdmissionPlan(runs, seats), ranks * per_rank
    plan = plan_rows(asked, [2, width])
    assert plan.starts[0] == [0, 3, 8] and plan.num_rows == 2
    rows = NamedSharding(mesh.mesh, over_slots(mesh))
    packing, copies = jax.device_put(
        (
            make_packing(plan, asked, slots, PAD),
            plan_cache_copies(plan, asked, slots, columns, columns),
        ),
        rows,
    )
    ran = packed.run_packed(decoder, own_weights, packing)
    assert ran.overflow is None
    # A choice that finds no room is counted, and the rows have to run again.
    tight = replace(config, execution=replace(execution, buffer_factor=0.01))
    if layout == "dp1":
        assert packed.run_packed(decoder._replace(config=tight), own_weights, packing).overflow > 0
    pool = empty_pool(decoder, slots, columns)
    cache = packed.copy_to_cache(
        decoder, jax.tree.map(lambda x: x - 7, pool.cache), ran.cache, copies
    )

    tokens = np.zeros((ranks * 3, width), np.int32)
    for row, ids in enumerate(ids for own in runs for ids in own):
        tokens[row, : len(ids)] = ids
    own = jnp.asarray(tokens), jnp.asarray(lengths * ranks, jnp.int32)
    plain = run_prefill(decoder, own_weights, *own)

    def compared(got: Any, wanted: Any, axis: int) -> np.ndarray:
        by_token = [np.moveaxis(np.asarray(x), (axis, ROW), (0, 1)) for x in (got, wanted)]
        for slot, request, run in seats:
            length, row = request.length, slot // per_rank * 3 + run
            # float32: the same sums in products of other sizes.
            np.testing.assert_allclose(
                by_token[0][:length, slot], by_token[1][:length, row], atol=1e-5
            )
        assert np.all(by_token[0][:, 1] == -7), "a slot that takes nothing was written"
        return got

    over_columns(compared, cache, plain.cache)  # pyright: ignore
    for slot, _, run in seats:
        np.testing.assert_allclose(
            ran.states[slot], plain.states[slot // per_rank * 3 + run], atol=1e-5
        )


@pytest.mark.parametrize("scanned", [True, False])
def test_layers_of_several_kinds_go_to_their_parts(scanned):
    execution = replace(CONFIG.execution, scan_layers=scanned)
    windows = {"sliding_window": 3, "full_attention_layers": (1, 3)}
    config = replace(CONFIG, num_layers=4, execution=execution, **windows)
    # As a scan gives them: of the first layer of each period, then of the second.
    kept = [(jnp.array([0, 2]),), (jnp.array([1, 3]),)]
    ran = packed._scanned(config)
    parts = [part.tolist() for (part,) in split_groups(kept, ran, config)]
    assert parts == ([[0, 2], [1, 3]] if scanned else [0, 1, 2, 3])
