"""Ping-pong: the closed form, the events, the order, and the published gains."""

import numpy as np
import pytest

from benchmarks.planner.serving.pingpong import (
    STATIONS,
    gain,
    makespan,
    micro_batches_needed,
    order_visits,
    simulate,
)
from tests.oracles.serving import token_step

# Zhu et al., "MegaScale-Infer", 2025: the gain of a third micro-batch, by T_c / T_f.
PUBLISHED = {"mixtral-8x22b": (0.10, 1.10), "dbrx": (0.28, 1.28), "scaled-moe": (0.38, 1.38)}
SIZES = [(m, layers) for m in (1, 2, 3, 4, 6) for layers in (1, 2, 5, 11)]


def cases(number, seed):
    """Times over four decades, and in part equal or zero."""
    times = 10 ** np.random.default_rng(seed).uniform(-3, 1, (3, number))
    times[1, ::7] = times[0, ::7]
    times[2, ::5] = times[0, ::5]
    times[2, ::11] = 0.0
    return times


def test_the_closed_form_is_what_events_give_in_20000_cases():
    busy = 0
    for number, (m, layers) in enumerate(SIZES):
        times = cases(20_000 // len(SIZES), number)
        closed = makespan(*times, m, layers)
        # A sum of at most some 300 rounded numbers.
        finish = simulate(*times, m, layers)[-1, -1, -1] + times[2]
        np.testing.assert_allclose(finish, closed, rtol=1e-12)
        busy += np.sum(m * times.max(0) >= times[0] + times[1] + 2 * times[2])
    assert 4_000 < busy < 16_000  # both cases are among them


def test_the_stations_need_not_be_told_the_order():
    for number, (m, layers) in enumerate(SIZES):
        attention, experts, sending = cases(3, number)[:, 1]
        ends, log = token_step(attention, experts, sending, m, layers)
        assert ends == pytest.approx(float(makespan(attention, experts, sending, m, layers)))
        listed = list(order_visits(layers, m))
        for station, worked in zip(STATIONS, log, strict=True):
            visits = [(one.layer, one.micro_batch) for one in listed if one.station == station]
            assert worked == visits


def test_the_order_is_layer_by_layer_and_micro_batch_by_micro_batch():
    assert [(one.layer, one.micro_batch, one.station) for one in order_visits(2, 3)] == [
        (layer, number, station) for layer in (0, 1) for number in (0, 1, 2) for station in STATIONS
    ]


def test_equation_5_where_2_and_3_hold():
    attention, experts, sending, m, layers = 3.0, 5.0, 1.0, 3, 7
    assert makespan(attention, experts, sending, m, layers) == 10 + 5 * (3 * 7 - 1)
    # One micro-batch: between the two ends of (4), which is its lower one.
    assert simulate(attention, experts, sending, m, layers)[-1, 0, -1] + sending == 10 + 3 * 5 * 6


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_published_ablation(model):
    ratio, third = PUBLISHED[model]
    layers = {"mixtral-8x22b": 56, "dbrx": 40, "scaled-moe": 48}[model]
    # Measured is "about 1.9"; if a launch cost nothing it would be two but for the ends.
    assert gain(ratio, 2, layers) == pytest.approx(1.9, rel=0.05)
    assert gain(ratio, 3, layers) == pytest.approx(third, rel=0.01)
    assert gain(ratio, 4, layers) == pytest.approx(1.0, rel=0.01)
    assert micro_batches_needed(1.0, 1.0, ratio) == 3


def test_how_many_micro_batches_are_needed():
    for attention, experts, sending in cases(200, 0).T:
        m = micro_batches_needed(attention, experts, sending)
        once, pace = attention + experts + 2 * sending, max(attention, experts, sending)
        assert m * pace >= once * (1 - 1e-9) and (m - 1) * pace < once
    assert micro_batches_needed(1.0, 1.0, 0.5) == 3
    assert micro_batches_needed(0.1, 0.1, 0.05) == 3  # 0.3 / 0.1 is above 3


def test_nothing_to_do_is_refused():
    with pytest.raises(ValueError, match="num_layers=0 must be at least 1"):
        makespan(1.0, 1.0, 0.1, 2, 0)
    with pytest.raises(ValueError, match="num_micro_batches=0 must be at least 1"):
        simulate(1.0, 1.0, 0.1, 0, 2)
