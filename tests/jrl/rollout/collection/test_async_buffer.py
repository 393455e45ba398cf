"""What was sampled ahead, as arrays and back."""

from dataclasses import replace

import chex
import pytest
from small_runs import GROUP_SIZE, PROMPTS, fresh_weights, small_recipe, small_run, small_setup

from jrl.rollout.collection.async_collector import AsyncCollector, check_staleness, row_of
from jrl.rollout.collection.collect import METRICS
from jrl.rollout.sampler import Completion
from jrl.tasks import Verdict


@pytest.fixture(scope="module")
def drawn():
    """A setup, and what is ahead after its sampler drew the first batch."""
    setup = small_setup(
        small_recipe(router_replay="R3"), small_run(max_staleness=3, slots=4, seed=3)
    )
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), 7)
    ahead = AsyncCollector(sampler, setup.recipe, batches=3, first=8, seconds={})
    return setup, sampler, ahead.collect_batch([])


@pytest.mark.slow
def test_the_next_batch_is_whole_and_later_ones_are_begun(drawn):
    _, sampler, found = drawn
    assert found.prompts_seen == 8 + PROMPTS and found.counts.all()
    rows = [*found.ready, *found.pending]
    requests = [row_of(row) for row in rows]
    expected = [(n, s) for n in range(8, 8 + 3 * PROMPTS) for s in range(GROUP_SIZE)]
    assert [(request.prompt, request.sample) for request in requests] == expected
    # Some of them are finished, some in flight and some not begun.
    later = requests[len(found.ready) :]
    flags = [(isinstance(row, Completion), row_of(row).has_response) for row in found.pending]
    assert set(flags) == {(True, True), (False, True), (False, False)}
    assert {v for request in later if request.has_response for v in request.sampled.versions} == {7}
    assert sampler.engine.num_idle == sampler.engine.slots


@pytest.mark.slow
def test_arrays_and_back(drawn):
    setup, sampler, found = drawn
    spec = setup.networks.ahead_spec
    assert spec.unpack(spec.empty(), sampler) is None
    # A score that 32 bits cannot hold.
    odd = replace(found.ready[0], verdict=Verdict(0.1, "partial"))
    found = replace(found, ready=[odd, *found.ready[1:]])
    packed = spec.pack(found)
    empty = spec.empty()
    chex.assert_trees_all_equal_shapes_and_dtypes(packed, empty)
    again = spec.unpack(packed, sampler)
    assert again.ready[0].score == 0.1
    assert again.metrics == found.metrics and found.metrics.keys() <= set(METRICS)
    assert len(again.pending) == len(found.pending)
    for one, other in zip(again.ready, found.ready, strict=True):
        assert (one.example, one.text, one.verdict) == (other.example, other.text, other.verdict)
        assert one.trajectory.finish == other.trajectory.finish
        chex.assert_trees_all_equal(one.trajectory.sampled, other.trajectory.sampled)
    chex.assert_trees_all_equal(spec.pack(again), packed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "bound", "message"),
    [
        (10, 2, r"step 11 would .* 3 to 3 versions behind, and max_staleness=2 allows 0 to 2"),
        (6, 2, r"-1 to -1 versions behind"),
    ],
)
def test_what_is_too_old_is_refused(drawn, version, bound, message):
    ready = drawn[2].ready
    with pytest.raises(RuntimeError, match=message):
        check_staleness(ready, version, bound)
    assert set(check_staleness(ready, 9, 2)) == {2}
