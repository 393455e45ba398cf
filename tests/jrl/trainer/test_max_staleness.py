"""Runs whose sampler is ahead of the updates."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from small_runs import (
    GROUP_SIZE,
    PROMPTS,
    begin_or_go_on,
    metrics_of,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.rollout.decoding import engine as slot_engine
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.resharding import are_disjoint
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.records import Appender, read
from jrl.trainer import loop
from jrl.trainer.learner import update as of_update


class Kill(BaseException):
    """Ends a run at once, as a kill would."""


def stale_setup(name="grpo", bound=3, slots=8, stale_cache=False, replay=None, **changes):
    run = small_run(
        warm_start_steps=0,
        **{"steps": 6, **changes},
        max_staleness=bound,
        slots=slots,
        stale_cache=stale_cache,
        drift_alarm=None,
    )
    return small_setup(small_recipe(name, router_replay=replay), run)


class Watched:
    """A run of which it is written down what its steps learned from.

    Attributes:
      batches: by step, of each completion its prompt, its sample, where the tokens begin that were
        sampled, what ended them, and their versions.
      unfinished: after the last step, of each response under way its prompt, its sample and how
        many tokens it has.
      dropped: rows that were under way when a step had all that it needs.
    """

    def __init__(self, setup, path, monkeypatch):
        self.setup, self.path, self.batches, self.unfinished = setup, path, {}, {}
        self.dropped = 0
        if setup.recipe.dynamic_sampling:
            # Or all rows of a few tokens end before the host looks, and none is under way then.
            monkeypatch.setattr(slot_engine, "WINDOW", 1)
            cancel = Engine.cancel

            def counted(engine, prompts):
                before = len(engine.scheduler.running)
                cancel(engine, prompts)
                self.dropped += before - len(engine.scheduler.running)

            monkeypatch.setattr(Engine, "cancel", counted)
        step = loop.train_step

        def watched(sampler, networks, state, *rest, **options):
            number = int(state.step)
            after, done = step(sampler, networks, state, *rest, **options)
            rows = [completion.trajectory for completion in done.collected.completions]
            found = [
                (*t.request[:2], len(t.request.response), t.finish, t.versions.tolist())
                for t in rows
            ]
            # What is done again after a kill is done as before.
            assert self.batches.setdefault(number, found) == found
            if (unfinished := after.algorithm.get("unfinished")) is not None:
                places = np.stack([unfinished.prompts, unfinished.samples, unfinished.lengths])
                self.unfinished = {(p, s): n for p, s, n in places.T.tolist() if n >= 0}
            return after, done

        monkeypatch.setattr(loop, "train_step", watched)

    def go_on(self):
        return begin_or_go_on(self.setup, self.path)

    @property
    def lines(self):
        return metrics_of(self.path), read(self.path / "samples.jsonl")


def checked(run, steps, bound):
    """No prompt is lost or doubled, and no token too old; gives the ages of tokens, and how many
    policies each row is of."""
    batches, recipe = run.batches, run.setup.recipe
    assert sorted(batches) == list(range(steps))
    rows = Counter((p, s, begin) for batch in batches.values() for p, s, begin, *_ in batch)
    assert set(rows.values()) == {1}
    written, under_way = Counter[tuple[int, int]](), set()
    for step in range(steps):
        for p, s, begin, finish, versions in batches[step]:
            assert begin == written[p, s], "a part was lost, or written twice"
            written[p, s] += len(versions)
            (under_way.add if finish == "window" else under_way.discard)((p, s))
    assert {row: n for row, n in run.unfinished.items() if n} == {r: written[r] for r in under_way}
    prompts = {p for p, _ in written}
    # Rows that a step has no room for begin in the next.
    assert written.keys() | run.unfinished.keys() == {
        (p, s) for p in prompts for s in range(GROUP_SIZE)
    }
    if recipe.dynamic_sampling:
        seen = 0
        for step, line in enumerate(run.lines[0][1:]):
            asked = {p for p, *_ in batches[step]}
            before, seen = seen, seen + int(float(line["dynamic_sampling/prompts_generated"]))
            assert len(asked) == PROMPTS and asked <= set(range(before, seen))
        # The last one that a step needed is its last: what was begun after it is the next one's.
        assert seen - 1 in asked and seen > steps * PROMPTS and run.dropped
    else:
        number = len(prompts) if run.unfinished else steps * PROMPTS
        assert prompts == set(range(number))
    ages = [step - v for step, batch in batches.items() for *_, vs in batch for v in vs]
    assert min(ages) >= 0 and max(ages) == bound
    spans = [len(set(versions)) for batch in batches.values() for *_, versions in batch]
    return ages, spans


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Lines and batches of runs that nobody disturbed."""
    made = {}

    def of(*case):
        if case not in made:
            path = tmp_path_factory.mktemp("ahead") / "run"
            with pytest.MonkeyPatch.context() as patch:
                run = Watched(stale_setup(*case), path, patch)
                run.go_on()
            made[case] = run
        return made[case]

    return of


@pytest.mark.slow
def test_the_sampler_is_ahead(uninterrupted):
    run = uninterrupted("grpo", 3, 8, False)
    ages, spans = checked(run, steps=6, bound=3)
    # Rows that were in flight at a push have tokens of several policies.
    assert max(spans) > 1
    lines, _ = run.lines
    means = [float(line["staleness/mean"]) for line in lines[1:]]
    counts = [sum(len(vs) for *_, vs in run.batches[step]) for step in range(6)]
    assert np.dot(means, counts) == pytest.approx(sum(ages))
    assert [line["staleness/max"] for line in lines[1:4]] == ["0.0", "1.0", "2.0"]


@pytest.mark.slow
def test_the_first_step_is_that_of_a_run_by_turns(tmp_path):
    """Nothing can be stale yet, and the batch is the same."""
    ahead = stale_setup(bound=1, steps=1)
    by_turns = replace(ahead, run=replace(ahead.run, max_staleness=0))
    found = []
    for number, setup in enumerate([ahead, by_turns]):
        begin_or_go_on(setup, tmp_path / str(number))
        found.append(metrics_of(tmp_path / str(number)))
    for name in ("staleness/mean", "staleness/max"):
        assert found[0][1].pop(name) == "0.0"
    assert found[0] == found[1]


@pytest.mark.slow
def test_devices_of_its_own_change_nothing(uninterrupted, tmp_path, monkeypatch):
    """By turns on one device, and at the same time on two."""
    expected = uninterrupted("grpo", 3, 8, True)
    setup = stale_setup(rollout_devices=1, stale_cache=True)
    assert are_disjoint(setup.mesh, setup.rollout_mesh)
    run = Watched(setup, tmp_path / "run", monkeypatch)
    run.go_on()
    assert run.batches == expected.batches
    assert run.lines == expected.lines


@pytest.mark.slow
def test_a_cache_that_is_kept_is_another_run(uninterrupted):
    rebuilt, kept = uninterrupted("grpo", 3, 8, False), uninterrupted("grpo", 3, 8, True)
    # Nothing is in flight before the first push.
    assert rebuilt.lines[0][:2] == kept.lines[0][:2]
    assert rebuilt.lines[0] != kept.lines[0]


@pytest.mark.slow
def test_devices_of_its_own_in_another_layout(uninterrupted, tmp_path, monkeypatch):
    """The weights are cut in one way to learn and in another to sample."""
    expected = uninterrupted("grpo", 3, 8, False)
    setup = stale_setup(layout="tp2 dp2 / ep4", rollout_devices=2, rollout_layout="dp2 / ep2")
    run = Watched(setup, tmp_path / "run", monkeypatch)
    run.go_on()
    assert run.batches == expected.batches
    for line, other in zip(run.lines[0], expected.lines[0], strict=True):
        for name in line:
            assert float(line[name]) == pytest.approx(
                float(other[name]), rel=1e-3, abs=1e-5, nan_ok=True
            ), name


def killed_after(events, patch):
    """Raises `Kill` at one of the events of a run: a window of the engine, an update, a line, a
    checkpoint."""
    left = iter(range(events, 0, -1))
    places = [
        (Engine, "_decode"),
        (of_update, "update"),
        (Appender, "append"),
        (Checkpoints, "save"),
    ]

    def counted(function):
        def call(*arguments, **options):
            if next(left) == 1:
                raise Kill
            return function(*arguments, **options)

        return call

    for owner, name in places:
        patch.setattr(owner, name, counted(getattr(owner, name)))


# With all that rows in flight may carry: their cache, their choices of experts, a critic's values.
CASES = [
    ("grpo", 3, 8, True),
    ("grpo", 3, 8, False, "R3"),
    ("ppo", 2, 6, False),
    # Responses that go on in the next step; prompts that are begun ahead and dropped.
    ("tppo", 0, 8, False),
    ("dapo", 0, 16, False),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_killed_ten_times(case, uninterrupted, tmp_path, monkeypatch):
    expected = uninterrupted(*case)
    run = Watched(expected.setup, tmp_path / "run", monkeypatch)
    random = np.random.default_rng(case[1])
    for _ in range(10):
        with monkeypatch.context() as patch, pytest.raises(Kill):
            killed_after(int(random.integers(1, 16)), patch)
            run.go_on()
    run.go_on()
    assert run.lines == expected.lines
    assert run.batches == expected.batches
    checked(run, 6, case[1])
