"""Moving experts while a server runs: seldom, for a gain, and as few as possible."""

import numpy as np
import pytest

from moe.disaggregated.balance import (
    RebalancingPolicy,
    Sizes,
    device_loads,
    initial_balance,
    observe,
)

SIZES = Sizes(num_slots=10, num_devices=5)
POLICY = RebalancingPolicy(every=4, decay=0.5, threshold=0.05)
EVEN = np.full((2, 7), 10)
HOT = EVEN.copy()
HOT[1, 3] = 90


def run(steps, policy=POLICY, sizes=SIZES):
    balance, told = initial_balance(2, 7, sizes), []
    for tokens in steps:
        balance, moves = observe(balance, tokens, sizes, policy)
        told.append(moves)
    return balance, told


def fullest(balance, layer):
    return device_loads(balance.loads[layer], balance.slot_experts[layer], SIZES.num_devices).max()


def test_a_hot_expert_gets_copies_when_it_is_looked_at():
    before, _ = run([HOT] * 3)
    after, told = run([HOT] * 4)
    assert [bool(moves) for moves in told] == [False, False, False, True]
    assert {move.layer for move in told[3]} == {1}  # the other layer is even
    assert fullest(after, 1) < 0.6 * fullest(before, 1)
    assert np.sum(after.slot_experts[1] == 3) > np.sum(before.slot_experts[1] == 3)


def test_moves_are_the_difference_of_placements():
    before, after, told = initial_balance(2, 7, SIZES), *run([HOT] * 4)
    placed = before.slot_experts.copy()
    for move in told[3]:
        assert placed[move.layer, move.slot] != move.expert
        placed[move.layer, move.slot] = move.expert
    assert np.array_equal(placed, after.slot_experts)
    # Of ten slots, those that got other experts.
    assert len(told[3]) <= 6


def test_devices_take_over_from_the_ones_they_share_most_with():
    other = np.random.default_rng(0).integers(1, 60, (2, 7))
    _, told = run([HOT] * 4 + [other] * 4)
    # Device by device as they are planned, all 20 slots would change.
    assert 0 < len(told[7]) <= 12


def test_nothing_moves_for_less_than_the_threshold_or_twice():
    _, told = run([HOT] * 4, RebalancingPolicy(every=4, decay=0.5, threshold=0.95))
    assert not any(told)
    _, told = run([HOT] * 40)
    assert [bool(moves) for moves in told].count(True) == 1


def test_loads_are_the_mean_of_few_steps_and_then_decay():
    rng = np.random.default_rng(0)
    steps = [rng.integers(0, 9, (2, 7)) for _ in range(3)]
    assert run(steps, RebalancingPolicy(decay=0.9))[0].loads == pytest.approx(
        np.mean(steps, axis=0)
    )
    expected = 0.5 * (0.5 * steps[0] + 0.5 * steps[1]) + 0.5 * steps[2]
    assert run(steps)[0].loads == pytest.approx(expected)


def test_experts_stay_in_their_servers_where_groups_do():
    sizes = Sizes(num_slots=8, num_devices=4, num_servers=2, num_groups=2)
    balance = initial_balance(1, 6, sizes)
    tokens = np.array([[5, 6, 50, 7, 8, 9]])
    balance, moves = observe(balance, tokens, sizes, RebalancingPolicy(every=1))
    assert moves
    halves = balance.slot_experts[0].reshape(2, 4)
    assert {frozenset(half // 3) for half in halves} == {frozenset({0}), frozenset({1})}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RebalancingPolicy(every=0), "every=0 must be at least 1"),
        (lambda: RebalancingPolicy(decay=1.0), r"decay=1.0 must be in \[0, 1\)"),
        (lambda: RebalancingPolicy(threshold=-0.1), r"threshold=-0.1 must be in \[0, 1\)"),
        (lambda: run([np.ones((2, 6))]), r"tokens has shape \(2, 6\)"),
    ],
)
def test_replanning_rejects_invalid_settings(call, words):
    with pytest.raises(ValueError, match=words):
        call()
