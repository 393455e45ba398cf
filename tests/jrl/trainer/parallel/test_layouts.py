"""A run is the same run on every layout, and may change it on the way."""

import shutil
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from small_runs import (
    begin_or_go_on,
    fresh_state,
    fresh_weights,
    one_step,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.report.metrics import without_timings
from jrl.runs.records import read, read_metrics
from moe.execution import Execution

ELSEWHERE = "pp2 cp2 tp2 / ep4"
# Sums in another order differ in the last of 7 digits, and Adam's first steps divide a gradient by
# its own size, which enlarges such a difference where the gradient is small.
RTOL, ATOL = 1e-4, 1e-5
A_DIGIT = 1.001e-3
"""The last decimal that is recorded of a token's figures."""
OF_THE_LAYOUT = ("moe/padded_fraction",)
"""Metrics that say how the devices shared the work, not what came of it."""


def setup_on(layout, recipe, **changes):
    run = small_run(layout=layout, checkpoint_every=1, samples_every=1, **changes)
    run = replace(run, warm_start_steps=2)
    setup = small_setup(small_recipe(recipe, micro_batch=2), run)
    # What is compiled reads the network's own execution, not the run's.
    execution = Execution(context=run.context)
    model = small_model(setup.tokenizer.vocab_size, num_layers=2, execution=execution)
    return replace(setup, model=model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three steps that begins on the first layout and goes on on others."""
    made = {}

    def of(recipe, *layouts):
        """Each layout has the steps up to a number."""
        if not layouts:
            return None
        if (recipe, layouts) not in made:
            path = tmp_path_factory.mktemp("layouts") / "run"
            before = of(recipe, *layouts[:-1])
            if before is not None:
                shutil.copytree(before, path)
            layout, steps = layouts[-1]
            outcome = begin_or_go_on(setup_on(layout, recipe, steps=steps), path)
            assert outcome.step == steps
            made[recipe, layouts] = path
        return made[recipe, layouts]

    return of


def assert_same_samples(samples, expected):
    """The same completions, and the figures of their tokens up to rounding."""
    for sample, other in zip(samples, expected, strict=True):
        figures, wanted = sample.pop("tokens", {}), other.pop("tokens", {})
        assert sample == other
        assert figures.keys() == wanted.keys()
        for name, values in wanted.items():
            if name in ("text", "of"):
                assert figures[name] == values
            else:
                found = np.array(figures[name], float)
                np.testing.assert_allclose(found, np.array(values, float), RTOL, A_DIGIT)


def assert_same_metrics(steps, expected):
    for both in zip(steps, expected, strict=True):
        assert both[0].keys() == both[1].keys()
        found = ({n: x for n, x in one.items() if n not in OF_THE_LAYOUT} for one in both)
        chex.assert_trees_all_close(*found, rtol=RTOL, atol=ATOL)


def assert_same_run(path, expected):
    """The same completions, and metrics up to rounding."""
    assert_same_samples(read(path / "samples.jsonl"), read(expected / "samples.jsonl"))
    lines, expected_lines = (
        [without_timings(line) for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (path, expected)
    )
    assert_same_metrics(lines, expected_lines)


@pytest.mark.slow
def test_a_run_is_the_same_on_every_layout(run):
    """From the warm start to the second step, then the third on another layout."""
    recipe, there, here = "grpo", ELSEWHERE, "dp1"
    expected = run(recipe, (here, 2), (here, 3))
    assert_same_run(run(recipe, (there, 2)), run(recipe, (here, 2)))
    assert_same_run(run(recipe, (there, 2), (here, 3)), expected)
    assert_same_run(run(recipe, (here, 2), (there, 3)), expected)


@pytest.mark.slow
def test_a_run_with_a_ring_in_stages_is_that_of_one_device(tmp_path, run):
    setup = setup_on("cp2 pp2", "grpo", steps=2, context="ring")
    assert begin_or_go_on(setup, tmp_path / "run").step == 2
    assert_same_run(tmp_path / "run", run("grpo", ("dp1", 2)))


@pytest.mark.slow
def test_steps_of_windows_are_those_of_one_device():
    """Packed passes of both networks: the second step goes on with what the first left unfinished,
    under weights that it changed."""
    found = []
    for layout in ("dp1", "dp2 tp2 / ep4"):
        setup = small_setup(small_recipe("tppo"), small_run(layout=layout))
        state, steps = fresh_state(setup, fresh_weights(setup)), []
        for _ in range(2):
            state, done = one_step(setup, state)
            steps.append(without_timings(done.metrics))
        found.append((steps, jax.device_get(done.collected.batch), state))
    (one, batch, before), (folded, same, after) = found
    assert any(len(row.trajectory.request.response) for row in done.collected.completions)
    for name in ("tokens", "mask", "finished", "rewards"):
        np.testing.assert_array_equal(getattr(same, name), getattr(batch, name), err_msg=name)
    chex.assert_trees_all_equal(after.algorithm, before.algorithm)
    assert_same_metrics(folded, one)
