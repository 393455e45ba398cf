import gzip
import json
import os
import signal
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from small_runs import Finished, metrics_of, small_recipe, small_run, small_setup

from jrl.config.run import RunConfig
from jrl.processes.agreement import to_host
from jrl.processes.progress import phase
from jrl.report.page import page_data, read_recordings
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.trainer.loop import train
from jrl.trainer.profiler import Profiler, write_operations
from jrl.trainer.state import restore


@pytest.mark.parametrize(
    ("text", "steps"), [(None, range(0)), ("10:13", range(10, 13)), ("1:2", range(1, 2))]
)
def test_profiled_steps_include_the_first_and_not_the_last(text, steps):
    assert RunConfig(profile=text).profiled_steps == steps


@pytest.mark.parametrize(
    "text", ["", "10", "13:10", "10:10", "0:2", "a:b", "1:2:3", "-1:2", "1:2\n"]
)
def test_profiled_steps_reject_other_text(text):
    with pytest.raises(ValueError, match=r"must be A:B with 1 <= A < B, for example 10:13"):
        RunConfig(profile=text)


def test_profiled_steps_after_the_last_step_are_rejected():
    with pytest.raises(ValueError, match=r"profile='61:63' begins after the last step, 60"):
        RunConfig(profile="61:63", steps=60)


def plane(name, *lines):
    """A plane of a trace as text: lines of (operation, program or None, picoseconds)."""
    names = sorted({event[0] for _, events in lines for event in events})
    programs = sorted({event[1] for _, events in lines for event in events if event[1]})
    content = [f'name: "{name}"']
    for number, text in enumerate(names, 1):
        content.append(
            f'event_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}'
        )
    for number, text in enumerate(("hlo_op", "hlo_module"), 1):
        content.append(f'stat_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}')
    for line, events in lines:
        written = []
        for event, program, duration in events:
            stats = ""
            if program in programs:
                stats = f'stats {{ metadata_id: 1 str_value: "{event}" }}'
                stats += f'stats {{ metadata_id: 2 str_value: "{program}" }}'
            number = names.index(event) + 1
            written.append(f"events {{ metadata_id: {number} duration_ps: {duration} {stats} }}")
        content.append(f'lines {{ name: "{line}" {" ".join(written)} }}')
    return f"planes {{ {' '.join(content)} }}"


SECOND = 10**12
HOST = (
    "python",
    [("rollout", None, 9 * SECOND), ("dot.1", "jit_f", SECOND), ("while.3", "jit_f", 8 * SECOND)],
)


@pytest.mark.parametrize(
    ("planes", "found"),
    [
        ([plane("/host:CPU", HOST)], {("dot.1", "jit_f"): 1.0}),
        (
            [
                plane("/host:CPU", HOST),
                plane(
                    "/device:GPU:0",
                    ("Stream #1(Compute)", [("dot.1", "jit_f", SECOND), ("memset", None, SECOND)]),
                    ("Steps", [("3", None, 9 * SECOND)]),
                ),
                plane("/device:GPU:1", ("Stream #1(Compute)", [("dot.1", "jit_f", 2 * SECOND)])),
            ],
            {("dot.1", "jit_f"): 3.0, ("memset", ""): 1.0},
        ),
        (
            [
                plane(
                    "/device:TPU:0",
                    ("XLA Ops", [("%add.2 = f32[] add(a, b)", None, SECOND)]),
                    ("XLA Modules", [("jit_f", None, 9 * SECOND)]),
                )
            ],
            {("add.2", ""): 1.0},
        ),
    ],
    ids=["cpu", "gpus", "tpu"],
)
def test_operations_of_a_device(tmp_path, planes, found):
    recording = tmp_path / "plugins/profile/step-4"
    recording.mkdir(parents=True)
    trace = jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(planes))
    (recording / "host.xplane.pb").write_bytes(trace)
    write_operations(recording, 4, 6, process=0)
    (read,) = read_recordings(tmp_path)
    operations = {(one["name"], one["program"]): one["seconds"] for one in read["operations"]}
    assert operations == found and read["seconds"] == sum(found.values())
    assert (read["first"], read["last"], read["trace"]) == (4, 6, None)


def traced(folder: Path, recording: str) -> set[str]:
    """Names in a trace."""
    (path,) = (folder / "plugins/profile" / recording).glob("*.trace.json.gz")
    with gzip.open(path) as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_profiler_records_steps_and_those_after_a_signal(tmp_path):
    """A step that is repeated replaces its recording; a second signal in one changes nothing."""
    program = jax.jit(lambda x: jnp.sin(x @ x))
    x = jnp.ones((8, 8))
    program(x).block_until_ready()
    lines, before = [], signal.getsignal(signal.SIGUSR1)
    stale = tmp_path / "plugins/profile/step-2/other.xplane.pb"
    stale.parent.mkdir(parents=True)
    stale.touch()
    with Profiler(tmp_path, range(2, 4), 5, lines.append) as profiler:
        for step in range(1, 7):
            profiler.begin_step(step)
            with phase("update"):
                program(x).block_until_ready()
            if step in (2, 4):
                os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not stale.exists()
    found = read_recordings(tmp_path)
    assert [(each["first"], each["last"]) for each in found] == [(2, 3), (5, 6)]
    assert all(each["operations"] for each in found)
    assert [line.partition(":")[0] for line in lines] == [
        "profiled steps 2 to 3",
        "profiled steps 5 to 6",
    ]
    assert {"step", "update"} <= traced(tmp_path, "step-2") & traced(tmp_path, "step-5")


def test_profiler_that_fails_prints_one_line(tmp_path):
    (tmp_path / "plugins").touch()  # no folder of recordings can be made
    lines = []
    with Profiler(tmp_path, range(1, 2), 1, lines.append) as profiler:
        for step in (1, 2):
            profiler.begin_step(step)
    (line,) = lines
    assert line.startswith("warning: no profile of steps 1 to 1: ") and line.endswith(
        "the run goes on"
    )


@pytest.mark.slow
def test_a_profiled_run_has_the_same_numbers(tmp_path, finished):
    """Also one that Ctrl-C ends in the middle of its recording, and that is resumed."""
    plain: Finished = finished("grpo")
    setup = small_setup(small_recipe("grpo"), small_run(profile="2:9"))

    def interrupt(step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with RunFolder.create(tmp_path / "run", {"recipe": "grpo"}) as folder:
        assert train(setup, folder, on_step=interrupt).stopped
    with RunFolder.resume(tmp_path / "run") as folder:
        assert train(setup, folder).step == 3
    assert metrics_of(folder.path) == plain.metrics
    states = [
        to_host(restore(Checkpoints(each.checkpoints_path), setup.networks, 3))
        for each in (folder, plain.folder)
    ]
    chex.assert_trees_all_equal(*states)
    (run,) = page_data([folder])["runs"]
    assert [(each["first"], each["last"]) for each in run["profiles"]] == [(2, 2), (3, 3)]
    assert run["profiles"][0]["trace"].startswith("./profiles/plugins/profile/step-2/")
    names = {"step", "rollout", "reward", "scoring", "update"}
    assert names <= traced(folder.profiles_path, "step-2")
    assert names | {"evaluation", "checkpoint"} <= traced(folder.profiles_path, "step-3")
