"""Experts on devices: the published example, and a packing near the best one."""

import itertools

import numpy as np
import pytest

from moe.disaggregated.balance import device_loads, pack, plan_placement, replicate_experts

# The example of EPLB's README: two layers, and the experts of 16 slots on 8 devices of 2 servers.
LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    float,
)
PLACED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example():
    found = [plan_placement(load, 16, 8, num_servers=2, num_groups=4).tolist() for load in LOADS]
    assert found == PLACED


def test_servers_do_not_count_where_they_do_not_divide_the_groups():
    for load in LOADS:
        apart = plan_placement(load, 16, 8, num_servers=2, num_groups=3)
        assert apart.tolist() == plan_placement(load, 16, 8).tolist()
        # Without servers no expert is bound to one, which the example's copies are.
        assert (
            device_loads(load, apart, 8).max() <= device_loads(load, np.array(PLACED[0]), 8).max()
        )


def best_packing(loads, num_bins, capacity=None):
    """The least load of the fullest bin, over all packings."""
    choices = np.array(list(itertools.product(range(num_bins), repeat=len(loads))))
    held = np.stack([choices == one for one in range(num_bins)])
    fits = np.all(held.sum(-1) <= (len(loads) if capacity is None else capacity), axis=0)
    return np.min(np.max(held[:, fits] @ loads, axis=0))


@pytest.mark.parametrize("num_bins", [2, 3])
def test_packing_is_within_its_bound_of_the_best(num_bins):
    rng, worst = np.random.default_rng(num_bins), 0.0
    for _ in range(60):
        loads = rng.integers(1, 20, rng.integers(1, 8)).astype(float)
        held = np.bincount(pack(loads, num_bins), loads, num_bins).max()
        worst = max(worst, held / best_packing(loads, num_bins))
    assert 1 < worst <= 4 / 3 - 1 / (3 * num_bins) + 1e-12


@pytest.mark.parametrize(("num_bins", "capacity"), [(2, 2), (2, 3), (2, 4), (3, 2)])
def test_packing_with_a_capacity_is_within_its_bound_of_the_best(num_bins, capacity):
    rng, worst = np.random.default_rng(num_bins), 1.0
    for number in range(60):
        loads = rng.integers(1, 5, num_bins * capacity) ** rng.integers(1, 4).astype(float)
        if (num_bins, capacity, number) == (2, 3, 0):
            loads = np.array([6, 6, 4, 4, 4, 0.0])
        placed = pack(loads, num_bins, capacity)
        assert np.all(np.bincount(placed) == capacity)
        held = np.bincount(placed, loads, num_bins).max()
        worst = max(worst, held / best_packing(loads, num_bins, capacity))
    assert worst <= 2 - 1 / num_bins + 1e-12
    # With two in each the heaviest stand with the lightest, which is the best there is.
    assert (worst > 1 + 1e-12) == (capacity > 2)
    assert ((num_bins, capacity) == (2, 3)) <= (worst == pytest.approx(7 / 6))


@pytest.mark.parametrize(("experts", "slots", "devices"), [(4, 6, 2), (3, 6, 3), (3, 8, 4)])
def test_placement_is_within_its_bound_of_the_best(experts, slots, devices):
    """Of all copies in all places."""
    placed = np.array(list(itertools.product(range(experts), repeat=slots)))
    counts = np.stack([np.sum(placed == one, axis=1) for one in range(experts)], axis=1)
    placed, counts = (x[np.all(counts > 0, axis=1)] for x in (placed, counts))
    rng, worst = np.random.default_rng(0), 1.0
    for _ in range(100):
        loads = rng.integers(1, 5, experts) ** 3.0
        each = np.take_along_axis(loads / counts, placed, axis=1).reshape(
            -1, devices, slots // devices
        )
        best = each.sum(2).max(1).min()
        found = device_loads(loads, plan_placement(loads, slots, devices), devices).max()
        assert found >= best - 1e-12
        worst = max(worst, found / best)
    # Copies are chosen before places are: the bound of packing with no capacity does not hold.
    assert 4 / 3 - 1 / (3 * devices) < worst <= 2 - 1 / devices + 1e-12


@pytest.mark.parametrize("num_bins", [2, 3, 5])
def test_the_bound_is_met_by_the_known_worst_case(num_bins):
    # Twice each of 2m - 1 ... m + 1, and three times m: 4m - 1 where 3m is possible.
    longest_first = [*itertools.chain(*([n, n] for n in range(2 * num_bins - 1, num_bins, -1)))]
    loads = np.array([*longest_first, *[num_bins] * 3], float)
    held = np.bincount(pack(loads, num_bins), loads, num_bins).max()
    assert held == 4 * num_bins - 1
    assert held / (3 * num_bins) == pytest.approx(4 / 3 - 1 / (3 * num_bins))


def test_copies_are_as_even_as_any_choice_of_copies():
    rng = np.random.default_rng(0)
    for _ in range(30):
        loads = rng.integers(1, 30, 4).astype(float)
        counts = np.bincount(replicate_experts(loads, 7), minlength=4)
        others = [one for one in itertools.product(range(1, 5), repeat=4) if sum(one) == 7]
        assert max(loads / counts) == min(max(loads / np.array(one)) for one in others)


def test_every_expert_has_a_slot_and_every_device_equally_many():
    rng = np.random.default_rng(1)
    for _ in range(20):
        placed = plan_placement(rng.random(6), 10, 5)
        assert set(placed.tolist()) == set(range(6))
        assert device_loads(np.ones(6), placed, 5).shape == (5,)
    loads = rng.random(6)
    assert device_loads(loads, placed, 5).sum() == pytest.approx(loads.sum())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pack(np.ones(5), 2, 2), "num_bins=2 with capacity=2 do not hold 5 items"),
        (lambda: replicate_experts(np.ones(5), 4), "num_slots=4 do not hold 5 experts"),
        (lambda: plan_placement(np.ones(5), 6, 4), "num_devices=4 must divide num_slots=6"),
        (
            lambda: plan_placement(np.ones(6), 6, 3, 2),
            "num_servers=2 must divide num_devices=3",
        ),
        (
            lambda: plan_placement(np.ones(6), 6, 2, 1, 4),
            "num_groups=4 must divide num_experts=6",
        ),
    ],
)
def test_placement_rejects_sizes_that_do_not_fit(call, words):
    with pytest.raises(ValueError, match=words):
        call()
