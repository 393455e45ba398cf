"""Published speeds, their predictions, and what the page says of them."""

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.evidence import DENSE_AND_LATER, EVIDENCE
from benchmarks.planner.predicted import (
    MEDIAN,
    RANKS,
    WORST,
    accuracy_of,
    cost_of,
    predict,
    rank_correlation,
    system_of,
    tokens_per_second,
)
from benchmarks.planner.validation import (
    accuracy_by_model,
    accuracy_table,
    evidence_table,
)
from moe.planner.models import PRESETS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "results" / "planner.txt").read_text(encoding="utf-8")


def test_results_have_every_row_and_the_page_the_errors():
    assert evidence_table() in RESULTS
    assert accuracy_table() in PAGE
    assert f"compares {len(EVIDENCE)} published speeds" in PAGE


def test_the_goals_hold_or_the_page_says_where_not():
    missed = 0
    for model, found in accuracy_by_model().items():
        if model == "all":
            continue
        if found.verdict != "too few rows":
            assert found.median is not None
            assert found.worst is not None
            holds = found.median < MEDIAN and found.worst < WORST
            ranks = [each for each in (found.correlation, found.on_cluster) if each is not None]
            assert (found.verdict == "holds") == (holds and min(ranks) > RANKS)
            missed += found.verdict != "holds"
        if found.verdict == "do not rank these":
            assert ": do not rank these.**" in PAGE
    assert PAGE.count(": do not rank these.**") + PAGE.count("speeds do not**:") == missed
    total = accuracy_by_model()["all"]
    assert total.rows[1] >= 50
    assert total.median is not None
    assert total.median < MEDIAN


def speed(row):
    found = predict(row)
    assert found is not None
    return found


def ratio(row):
    return speed(row) / row.tokens_per_second


def test_fitted_rows_are_predicted_as_measured_on_average():
    ratios = defaultdict(list)
    for row in EVIDENCE:
        if row.fitted and row.system not in ("Megatron-Core", "Megatron-Core with FSDP"):
            group = row.system, row.hardware, PRESETS[row.model].num_experts > 0
            ratios[group].append(ratio(row))
    assert len(ratios) >= 8
    for group, found in ratios.items():
        assert statistics.geometric_mean(found) == pytest.approx(1, rel=1e-3), group


def test_dense_and_later_rows_are_within_a_quarter_held_out_or_not():
    """And their errors are on the page."""
    held_out = [row for row in DENSE_AND_LATER if not row.fitted]
    assert held_out == list(DENSE_AND_LATER[1::2])
    errors = [abs(ratio(row) - 1) for row in DENSE_AND_LATER]
    assert max(errors) < 0.25
    errors = [abs(ratio(row) - 1) for row in held_out]
    said = f"median {statistics.median(errors):.0%}, largest {max(errors):.0%}"
    assert f"errors of the nine rows held out: {said}" in " ".join(PAGE.split())


def test_dense_and_later_layouts_of_a_cluster_are_in_order():
    clusters = defaultdict(list)
    for row in DENSE_AND_LATER:
        clusters[row.system, row.model, row.hardware, row.num_devices].append(row)
    compared = [rows for rows in clusters.values() if len(rows) > 1]
    assert [len(rows) for rows in compared] == [3, 2]
    for rows in compared:
        by_speed = sorted(rows, key=lambda row: row.measured)
        assert by_speed == sorted(rows, key=speed)
    whole, halves, _ = compared[0]
    gain = speed(whole) / speed(halves)
    assert f"predicted {gain:.2f} times as fast" in " ".join(PAGE.split())


def test_efficiency_is_that_of_program_device_and_kind_of_model():
    def efficiency(*given):
        return system_of(*given).efficiency

    assert efficiency("MaxText", "v5p", False) > 1.5 * efficiency("MaxText", "v5p", True)
    assert efficiency("MaxText", "v6e", False) != efficiency("MaxText", "v5p", False)
    # Of a device and kind without rows: first the kind, then the program.
    assert efficiency("torchtitan", "b200", True) == efficiency("torchtitan", "l40s", False)
    assert efficiency("AutoModel", "h100", False) == efficiency("AutoModel", "h100", True)
    # The share under tensor parallelism of a program whose rows have it, and none above 1.
    assert system_of("KempnerForge", "h200 by 4", False).tensor_share < 0.9
    assert system_of("torchtitan", "h100 500 W", False).tensor_share == 1
    assert system_of("Megatron-Core", "h100", True).tensor_share == 1


def test_the_mapping_that_is_best_is_no_longer_predicted_last():
    """Qwen3-235B on 256 H100: 32 experts' devices over four servers, before eight in one."""
    best, *_, last = (
        predict(row)
        for layout in (
            "tp2 dp16 pp8 vpp4 / ep32",
            "tp2 dp4 pp32 vpp3 / ep8",
            "tp4 dp8 pp8 vpp4 / ep8",
        )
        for row in EVIDENCE
        if row.layout == layout and row.time == 4096 and not row.overlaps_experts
    )
    assert best is not None
    assert last is not None
    assert best > 1.2 * last


def test_shards_of_the_script_are_predicted_as_the_page_says():
    (row,) = (row for row in EVIDENCE if row.layout == "tp2 dp128 / ep8")
    found = predict(row)
    assert found is not None
    assert f"predicted at {found / row.tokens_per_second:.2f} of what was measured" in PAGE
    other = replace(row, layout="dp256 / ep8")
    step = cost_of(other, system_of(other.system, other.hardware, True))
    assert step is not None
    ratio = tokens_per_second(other, step) / row.tokens_per_second
    assert f"the prediction then is {ratio:.2f} of it" in " ".join(PAGE.split())


def test_speeds_follow_from_steps_and_utilisation():
    """Of two rows the source has both: 17.6 s and 276 TFLOP/s, 19.7 s and 245."""
    flops = PRESETS["qwen3-235b-a22b"].training_flops(4096)
    rows = [row for row in EVIDENCE if row.layout == "tp2 dp16 pp8 vpp4 / ep32" and row.unit == "s"]
    found = [row.tokens_per_second * flops / 1e12 for row in rows]
    assert found == pytest.approx([276, 245], rel=0.01)
    # And 5,100 tokens a second for 750 TFLOP/s on GB200.
    (row,) = (row for row in EVIDENCE if row.measured == 750)
    assert row.tokens_per_second == pytest.approx(5100, rel=0.01)


def test_every_row_says_where_it_is_published():
    assert all(row.source and row.measured > 0 for row in EVIDENCE)
    assert {row.hardware for row in EVIDENCE} >= {"h100", "h800", "gb200", "v5p", "v6e"}
    assert len({row.source.split(",")[0] for row in EVIDENCE}) >= 6


def test_rank_correlations_by_hand():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Squares of differences of ranks: 1 - 6 (1 + 1) / (4 (16 - 1)).
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    # Equal values share the mean of their ranks.
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.866, abs=1e-3)


def test_accuracy_leaves_fitted_rows_out_of_errors():
    rows = [(10.0, 10.0, True, "a"), (10.0, 12.0, False, "a"), (20.0, 17.0, False, "b")]
    found = accuracy_of(rows)
    assert found.rows == (3, 2)
    assert found.median == pytest.approx(0.175)
    assert found.worst == pytest.approx(0.2)
    assert found.on_cluster is None
    assert accuracy_of(rows[:2]).verdict == "too few rows"
    close = [(float(n), 1.1 * n, False, "a") for n in range(1, 5)]
    assert accuracy_of(close).verdict == "holds"
    assert accuracy_of([(a, 2 * b, c, d) for a, b, c, d in close]).verdict.startswith("ranks hold")
    swapped = [(1.0, 1.2, False, "a"), (1.1, 1.1, False, "a"), (1.2, 1.0, False, "a")]
    assert accuracy_of(swapped).verdict == "do not rank these"
