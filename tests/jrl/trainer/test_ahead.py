"""Programs of a run that are compiled in threads."""

import threading
from collections import Counter

import jax
import pytest
from small_runs import begin_or_go_on, small_model, small_recipe, small_run, small_setup

from jrl.rollout.decoding.mesh_backend import advance
from jrl.rollout.decoding.prefill import admit
from jrl.trainer import ahead
from jrl.trainer.learner.update import update
from jrl.trainer.supervised import WarmStartFailed
from sharding.sharded_jit import DeviceJit

PREFIX = "jrl compilation"


def threads():
    return [each for each in threading.enumerate() if each.name.startswith(PREFIX)]


def setup_of(d_model, name="grpo", changes=None, **settings):
    """A run whose network has a width of its own, so that no other test has compiled for it."""
    recipe = small_recipe(name, **(changes or {}))
    setup = small_setup(recipe, small_run(steps=1, warm_start_steps=2, **settings))
    return small_setup(
        recipe, setup.run, model=small_model(setup.tokenizer.vocab_size, d_model=d_model)
    )


@pytest.fixture
def lowered():
    """Number of programs that are lowered, by function name."""
    counts = Counter()

    def listen(event, seconds, **fields):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            counts[str(fields["fun_name"]).removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d_model", "name", "changes", "updates"),
    [
        (22, "grpo", {}, 2),
    ],
)
def test_a_run_calls_all_programs_that_were_compiled_ahead(
    d_model, name, changes, updates, tmp_path, monkeypatch, lowered
):
    uncalled = []

    def forget(program):
        uncalled.extend(program._ahead)
        program._ahead.clear()

    monkeypatch.setattr(DeviceJit, "forget_ahead", forget)
    setup = setup_of(d_model, name, changes)
    assert begin_or_go_on(setup, tmp_path / "run").step == 1
    assert not uncalled and not threads()
    # Of the warm start and of the policy; prompts of two numbers, and copies of their rows.
    assert lowered["update"] == updates
    assert lowered["advance"] == 1 and lowered["admit"] <= 3
    # All others are small.
    assert sum(lowered.values()) <= 60, lowered


@pytest.mark.slow
def test_a_warm_start_that_fails_leaves_no_thread(tmp_path):
    setup = setup_of(30, warm_start_learning_rate=1e30)
    with pytest.raises(WarmStartFailed):
        begin_or_go_on(setup, tmp_path / "run")
    assert not threads() and not update._ahead and not admit._ahead and not advance._ahead


def test_nothing_is_compiled_ahead_in_several_processes(monkeypatch):
    setup = small_setup()
    monkeypatch.setattr(ahead, "is_multiprocess", lambda: True)
    monkeypatch.setattr(ahead, "_programs", None)
    with ahead.compile_ahead(setup, setup.sampler(), imitates=True, begins=True):
        assert not threads()
