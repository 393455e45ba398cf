"""Times of attention and experts, messages of a size, and plans on one kind of device."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner.serving import colocated, times
from benchmarks.planner.serving.plan import Load
from benchmarks.planner.serving.times import Utilisation, model_utilisation, read_network
from moe.planner.models import PRESETS
from sharding.costs.hardware import HARDWARE, LINK_EFFICIENCY

MIXTRAL = PRESETS["mixtral-8x22b"]
H100 = HARDWARE["h100"]


def test_the_line_through_measurements():
    batches = [8, 16, 64, 256]
    found = times.fit_line(batches, [2e-6 * n + 3e-4 for n in batches])
    assert found.slope == pytest.approx(2e-6)
    assert found(np.array([0, 100])) == pytest.approx([3e-4, 5e-4])
    with pytest.raises(ValueError, match="4 batches and 3 times cannot be fitted"):
        times.fit_line(batches, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="the fitted time per token is -1 s"):
        times.fit_line([1, 2], [3.0, 2.0])


def test_experts_wait_for_memory_or_for_products():
    h, hidden = MIXTRAL.d_model, MIXTRAL.d_expert
    few, many = 1, 100_000
    found = times.experts(MIXTRAL, H100, 1, 2, 0.5)
    memory = H100.memory_bandwidth * times.MEMORY_EFFICIENCY
    assert found(few) == pytest.approx(2 * 2 * 3 * h * hidden / memory)
    assert found(many) == pytest.approx(many * 6 * h * hidden / (0.5 * H100.peak))
    # Two devices take half, and sum their outputs: each sends and receives one whole.
    halved = times.experts(MIXTRAL, H100, 2, 2, 0.5)
    sums = many * 2 * h / (H100.inside * LINK_EFFICIENCY) + 2 * H100.latency_inside
    assert halved(many) == pytest.approx(found(many) / 2 + sums)


def test_attention_reads_the_cache_of_every_sequence():
    short, long = (times.attention(MIXTRAL, H100, 4, context, 0.5) for context in (100, 900))
    memory = H100.memory_bandwidth * times.MEMORY_EFFICIENCY
    # Keys and values of 8 heads of 128 in two bytes.
    assert long(7) - short(7) == pytest.approx(7 * 800 * 2 * 8 * 128 * 2 / (4 * memory))
    assert times.attention_matrices(replace(MIXTRAL, d_ff=10)) == (
        times.attention_matrices(MIXTRAL) + 30 * MIXTRAL.d_model
    )


def test_a_measured_curve_is_kept_at_its_points_and_beyond():
    curve = Utilisation((1e3, 1e5, 1e7), (0.1, 0.5, 0.8))
    assert curve.seconds(np.array([1e3, 1e5, 1e7]), 1e9) == pytest.approx([1e-5, 2e-4, 1.25e-2])
    assert curve.seconds(10.0, 1e9) == pytest.approx(1e-5)  # a latency
    assert curve.seconds(1e8, 1e9) == pytest.approx(0.125)  # a rate
    between = curve.seconds(np.geomspace(1e3, 1e7, 50), 1e9)
    assert np.all(np.diff(between) > 0)


def test_without_measurements_there_are_a_latency_and_a_rate():
    sizes = np.geomspace(300, 1e8, 40)
    found = model_utilisation(H100).seconds(sizes, H100.outside)
    exact = sizes / (H100.outside * LINK_EFFICIENCY) + H100.latency_outside
    # Between powers of two it is a power of the size.
    np.testing.assert_allclose(found, exact, rtol=0.02)


def test_a_curve_is_read(tmp_path):
    path = tmp_path / "curve.csv"
    path.write_text("# bytes,fraction\n1024,0.1\n\n4096, 0.25\n")
    assert read_network(path) == Utilisation((1024.0, 4096.0), (0.1, 0.25))
    path.write_text("1024,0.1\n4096\n")
    with pytest.raises(ValueError, match=r"curve\.csv:2: '4096' is not a size and a fraction"):
        read_network(path)
    path.write_text("1024,nan\n")
    with pytest.raises(ValueError, match="must be two finite numbers"):
        read_network(path)


@pytest.mark.parametrize(
    ("sizes", "fractions", "words"),
    [
        ((1.0, 2.0), (0.5,), "2 sizes and 1 fractions must be equally many"),
        ((2.0, 1.0), (0.5, 0.5), "must be above 0 and ascending"),
        ((1.0,), (1.5,), r"must be in \(0, 1\]"),
        ((1.0, 2.0), (0.1, 0.9), "2 bytes at 0.9 of the rate would arrive before 1 bytes"),
    ],
)
def test_what_is_no_curve_is_refused(sizes, fractions, words):
    with pytest.raises(ValueError, match=words):
        Utilisation(sizes, fractions)


def test_a_colocated_plan_is_what_its_parts_take():
    found = colocated.best_colocated(
        MIXTRAL, Load(), H100, devices=(8,), kind=colocated.PlanKind(wide=False)
    )
    assert found is not None
    assert found.layout.tp * found.layout.pp == 8 and found.token_latency <= 0.15
    attention = times.attention(MIXTRAL, H100, found.layout.tp, Load().cached, 0.6)
    etp = found.layout.etp
    experts = times.experts(MIXTRAL, H100, etp, MIXTRAL.num_experts // found.layout.ep, 0.6)
    layer = attention(found.batch) + experts(found.batch * 2 / found.layout.ep)
    assert 56 * layer < found.token_latency < 1.25 * 56 * layer  # the rest is sent
    # One more token for every stage would be late, or would not fit.
    cache = 4 * Load().cached * MIXTRAL.keys * 56 * found.batch * found.layout.pp
    used = (cache + 2 * MIXTRAL.parameters) / 8
    assert found.token_latency > 0.149 or used > 0.9 * H100.memory


def test_more_choices_are_never_worse_and_too_little_time_is_none():
    load = Load(slo=0.06)
    narrow, wide = (
        colocated.best_colocated(
            MIXTRAL, load, H100, devices=(8, 16), kind=colocated.PlanKind(wide=choice)
        )
        for choice in (False, True)
    )
    assert narrow and wide
    assert wide.per_device >= narrow.per_device
    assert colocated.best_colocated(MIXTRAL, Load(slo=1e-4), H100) is None
