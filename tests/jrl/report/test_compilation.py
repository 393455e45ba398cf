"""Lines that say what is being compiled."""

import io
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jrl.report import compilation
from jrl.report.compilation import COMPILED, LOWERED, CompilationWatch, Durations
from jrl.report.display import TrainingDisplay
from jrl.rollout.decoding import mesh_backend, packed_prompts, prefill
from jrl.trainer import scoring
from jrl.trainer import step as stepping
from jrl.trainer.learner import update as of_update


def watch(short=0.0, terminal=False):
    return CompilationWatch(Console(file=io.StringIO(), force_terminal=terminal), short)


def printed(watched):
    return watched._console.file.getvalue()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("jit(update)", "the update of the weights"),
        ("jit(advance)", "the decoding loop"),
        ("jit(targets_of)", "the advantages"),
        ("jit(my_loss)", "a program (my_loss)"),
        ("jit(<lambda>)", "a program"),
    ],
)
def test_a_long_compilation_is_named_until_it_ends(function, name):
    with watch() as watched:
        assert compilation.current_line() is None
        watched._on_event(LOWERED, 0.1, fun_name=function)
        assert compilation.current_line() == f"compiling {name}, 0 s"
        wait_for(lambda: printed(watched))
        watched._on_event(COMPILED, 0.2, fun_name=function)
        assert compilation.current_line() is None
    assert printed(watched) == f"compiling {name} ...\n"


def compile_twice(watched, seconds):
    """Two shapes of one function."""
    with watched:
        for number, duration in enumerate(seconds, start=1):
            watched._on_event(LOWERED, 0.1, fun_name="jit(update)")
            wait_for(lambda n=number: printed(watched).count("\n") == n)
            watched._on_event(COMPILED, duration, fun_name="jit(update)")
    return printed(watched).splitlines()


def test_a_compilation_says_how_long_it_took_the_last_time(tmp_path):
    def again(kind):
        durations = Durations(kind, tmp_path)
        names = {"update": "the policy update"}
        return CompilationWatch(Console(file=io.StringIO()), 0.0, durations, names)

    unknown = ["compiling the policy update ..."] * 2
    assert compile_twice(again("small"), [40.2, 3.0]) == unknown
    assert compile_twice(again("large"), [99.0, 9.0]) == unknown
    of_small = [f"compiling the policy update: {n} s the last time" for n in (40, 3)]
    assert compile_twice(again("small"), [2.0, 1.0]) == of_small
    assert Durations("small", tmp_path).last("update 1") == 2.0
    assert Durations("large", tmp_path).last("update 1") == 99.0


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"small": 3}', b'{"small": {"f 1": "x"}}'])
def test_durations_are_unknown_in_a_file_that_is_damaged(content, tmp_path):
    (tmp_path / compilation.DURATIONS).write_bytes(content)
    durations = Durations("small", tmp_path)
    assert durations.last("f 1") is None
    durations.record("f 1", 2.0)
    assert Durations("small", tmp_path).last("f 1") == 2.0
    missing = Durations("small", tmp_path / "missing")
    missing.record("f 1", 2.0)
    assert missing.last("f 1") is None


def test_short_compilation_is_not_reported():
    with watch(short=60.0) as watched:
        watched._on_event(LOWERED, 0.1, fun_name="jit(update)")
        assert compilation.current_line() is None
        watched._on_event(COMPILED, 0.2, fun_name="jit(update)")
    assert printed(watched) == ""


def test_jax_says_when_a_program_is_compiled():
    """By events that have the names this module knows."""
    heard = []

    class Listening(CompilationWatch):
        def _begin(self, function):
            heard.append(function)

        def _end(self):
            heard.append("end")

    def update(x):
        return jnp.tanh(x) * 3

    with Listening(short=60.0):
        jax.jit(update)(jnp.ones((3, 5)))
    begun = heard.index("jit(update)")
    assert "end" in heard[begun:]
    heard.clear()
    jax.jit(lambda x: x + 7)(jnp.ones(3))
    assert heard == [], "the watch listens after its end"


def test_a_display_on_a_terminal_draws_the_line():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=20)
    with watch() as watched, TrainingDisplay(10, console=console) as display:
        watched._on_event(LOWERED, 0.1, fun_name="jit(update)")
        wait_for(lambda: "compiling the update of the weights, 0 s" in console.file.getvalue())
        watched._on_event(COMPILED, 0.1, fun_name="jit(update)")
        display.update(1, {"critic/score/mean": 0.5})
    assert printed(watched) == "", "the line was printed into the drawing"


# Each function that takes long, as it is jitted: a name that none has would be "a program".
COMPILED_FUNCTIONS = {
    "the update of the weights": [of_update.update],
    "the pass over prompts": [prefill.admit, prefill.admit_prefilled, packed_prompts.run_packed],
    "the decoding loop": [mesh_backend.advance],
    "the advantages": [stepping.targets_of],
    "the scoring pass": [
        scoring.logprobs_of.dropless,
        scoring.logprobs_and_entropy_of_few.with_overflow,
        scoring.values_of.dropless,
        scoring._score_packed.with_overflow,
    ],
}


@pytest.mark.parametrize("name", COMPILED_FUNCTIONS)
def test_names_are_of_functions_that_exist(name):
    for jitted in COMPILED_FUNCTIONS[name]:
        assert compilation.NAMES[jitted._function.__name__] == name
