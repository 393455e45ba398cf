"""The order in which the host enqueues."""

import itertools

import pytest

from benchmarks.planner.serving import pingpong
from moe.disaggregated.schedule import Enqueued, order_programs


def until(tokens):
    return lambda token: token < tokens


@pytest.mark.parametrize(
    ("layers", "micro_batches", "tokens"),
    list(itertools.product((1, 2, 3), (1, 2, 4), (1, 3))),
)
def test_each_side_works_layer_by_layer_and_micro_batch_by_micro_batch(
    layers, micro_batches, tokens
):
    log = list(order_programs(layers, micro_batches, until(tokens)))
    numbers = list(itertools.product(range(tokens), range(layers), range(micro_batches)))
    for role in ("attention", "experts"):
        assert [tuple(one[1:]) for one in log if one.role == role] == numbers
    ends = list(itertools.product(range(tokens), range(micro_batches)))
    for role in ("begin", "end"):
        found = [(one.token, one.micro_batch) for one in log if one.role == role]
        assert found == ends
    place = {one: number for number, one in enumerate(log)}
    for token, layer, i in numbers:
        came = place[Enqueued("experts", token, layer, i)]
        assert place[Enqueued("attention", token, layer, i)] < came
        if layer + 1 < layers:
            after = Enqueued("attention", token, layer + 1, i)
        else:
            after = Enqueued("end", token, layer, i)
        assert place[after] == came + 1


@pytest.mark.parametrize(("layers", "micro_batches"), [(1, 1), (2, 3), (3, 4)])
def test_each_side_works_in_the_order_that_the_planner_counts_with(layers, micro_batches):
    """After attention the rows go out, and after the experts they come back."""
    log = list(order_programs(layers, micro_batches, until(1)))
    planned = list(pingpong.order_visits(layers, micro_batches))
    roles = ("attention", "attention", "experts", "experts")
    for station, role in zip(pingpong.STATIONS, roles, strict=True):
        assert [(one.layer, one.micro_batch) for one in planned if one.station == station] == [
            (one.layer, one.micro_batch) for one in log if one.role == role
        ]


def test_attention_works_on_the_others_while_one_is_with_the_experts():
    """Between the rows of a micro-batch that go out and those that come back lies the attention of
    all others."""
    log = list(order_programs(3, 3, until(2)))
    for number, one in enumerate(log):
        # At the end nothing is left to work on.
        if one.role != "experts" or (one.token, one.layer) == (1, 2):
            continue
        out = log.index(one._replace(role="attention"))
        passed = {other.micro_batch for other in log[out + 1 : number] if other.role == "attention"}
        assert passed == {0, 1, 2} - {one.micro_batch}


def test_whether_a_token_is_begun_is_asked_once_before_anything_of_it():
    asked, log = [], []

    def goes_on(token):
        asked.append((token, len(log)))
        return token < 2

    for one in order_programs(2, 2, goes_on):
        log.append(one)
    assert [token for token, _ in asked] == [0, 1, 2]
    for token, length in asked[:2]:
        assert all(one.token < token for one in log[:length])
        assert log[length].token == max(token - 1, 0)
    assert not list(order_programs(2, 2, until(0)))
