"""Control groups of the sandbox: their parents, limits and removal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from confinement import needs_bubblewrap

from jrl.tasks.sandbox import cgroups
from jrl.tasks.sandbox.sandbox import Sandbox

SESSION = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
SCOPE = "/user.slice/user-1000.slice/user@1000.service/app.slice/run.scope"
HYBRID = (
    "34 29 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "39 29 0:35 / /sys/fs/cgroup/my\\040pids rw - cgroup cgroup rw,pids\n"
    "41 29 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
OF_HYBRID = "8:pids:/\n4:memory:/api/1\n1:cpu,cpuacct:/\n0::/\n"
DOCKER = (
    "30 24 0:26 /docker/1 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    "31 24 0:27 /docker/1 /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n"
)


def paths(mounts, own):
    return [tuple(map(str, each)) for each in cgroups.candidate_parents(mounts, own)]


def test_a_session_makes_groups_in_its_own_or_above():
    found = paths(SESSION, f"0::{SCOPE}\n")
    assert found[0] == (f"/sys/fs/cgroup{SCOPE}",)
    assert found[1] == (f"/sys/fs/cgroup{SCOPE.removesuffix('/run.scope')}",)
    assert found[-1] == ("/sys/fs/cgroup",) and len(found) == 6


def test_version_1_has_a_group_for_each_limit():
    assert paths(HYBRID, OF_HYBRID) == [
        ("/sys/fs/cgroup/unified",),
        ("/sys/fs/cgroup/memory/api/1", "/sys/fs/cgroup/my pids"),
    ]


def test_a_container_sees_a_part_of_the_tree():
    own = "8:pids:/docker/1/a\n4:memory:/docker/1\n"
    assert paths(DOCKER, own) == [("/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids/a")]
    # Of another container, as a process that was moved sees it.
    assert paths(DOCKER, "8:pids:/docker/2\n4:memory:/docker/2\n") == []
    assert paths(SESSION, "0::/../x\n") == []
    assert paths("", "0::/\n") == paths(SESSION, "") == []


def made(parents, monkeypatch):
    monkeypatch.setattr(cgroups, "_parents", lambda: parents)
    return cgroups.create_group(2**28, 32)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_limits_are_written(tmp_path, monkeypatch):
    (folder,) = made((tmp_path,), monkeypatch).folders
    limit = str(2**28 + cgroups.OVERHEAD)
    assert folder.name.startswith(f"jrl-sandbox-{os.getpid()}-")
    expected = {"memory.max": limit, "pids.max": "36", "memory.swap.max": "0"}
    assert contents(folder) == expected
    for name in ("m", "p"):
        (tmp_path / name).mkdir()
    memory, tasks = made((tmp_path / "m", tmp_path / "p"), monkeypatch).folders
    assert contents(tasks) == {"pids.max": "36"}
    assert contents(memory) == dict.fromkeys(
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), limit
    )


def test_where_none_may_be_made_there_is_none(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert made((tmp_path / "file",), monkeypatch) is None
    assert made(None, monkeypatch) is None


@pytest.mark.parametrize(
    ("name", "text", "ran_out"),
    [
        ("memory.events", "low 0\noom 1\noom_kill 2\n", True),
        ("memory.events", "low 0\noom 1\noom_kill 0\n", False),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", False),
    ],
)
def test_a_process_that_was_killed_for_memory_is_told(tmp_path, name, text, ran_out):
    (tmp_path / name).write_text(text)
    assert cgroups.Group((tmp_path,)).ran_out() is ran_out


def test_a_command_runs_in_its_groups(tmp_path):
    """The groups are folders here, whose file has the number of the process."""
    folders = tmp_path / "a b", tmp_path / "c"
    for folder in folders:
        folder.mkdir()
    code = "import os, sys; print(os.getpid(), *sys.argv[1:])"
    command = [*cgroups.Group(folders).command, sys.executable, "-c", code, "x y", "--", "$z"]
    said = subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout
    number, rest = said.strip().split(" ", 1)
    assert rest == "x y -- $z"
    assert [(folder / "cgroup.procs").read_text() for folder in folders] == [f"{number}\n"] * 2
    cgroups.Group((tmp_path / "none",)).remove()


def test_groups_of_processes_that_were_killed_are_removed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    gone, kept = (
        tmp_path / f"jrl-sandbox-{number}-0" for number in (int(ended.stdout), os.getpid())
    )
    for folder in (gone, kept, tmp_path / "jrl-sandbox-x", tmp_path / "other"):
        folder.mkdir()
    cgroups._remove_abandoned((tmp_path,))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        (kept.name, "jrl-sandbox-x", "other")
    )


@needs_bubblewrap
def test_no_group_is_left():
    sandbox = Sandbox(seconds=60)
    for code in ("", "raise SystemExit(1)", "while True: print(1)"):
        sandbox.run(code)
    for parent in cgroups._parents() or ():
        assert list(Path(parent).glob(f"jrl-sandbox-{os.getpid()}-*")) == []
