"""Processes compare their software before a run; a launcher may have connected them already."""

import os
import shutil
import socket
import subprocess
import sys

import pytest
from places import ROOT

from jrl.processes import agreement
from jrl.processes.agreement import (
    MAX_DIFFERENCES,
    check_same_software,
    installed_versions,
    source_hashes,
)

CONNECTED_BY_OTHERS = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), cluster_detection_method="deactivate")
from jrl.command_line import exit_status, start_jax

def command():
    for _ in range(2):
        start_jax(4)
    print(jax.local_device_count(), "of", jax.device_count(), "devices")
    return 0

sys.exit(exit_status(command))
"""


def test_versions_and_sources_are_described():
    versions = installed_versions()
    assert versions["jaxlib"] != "not installed" and versions["numpy"] != "not installed"
    hashes = source_hashes()
    assert {"jrl/train.py", "moe/model.py", "sharding/zero.py"} < hashes.keys()
    assert hashes["jrl/train.py"] != hashes["moe/model.py"]
    assert source_hashes() == hashes


def test_a_changed_source_file_has_another_hash(monkeypatch, tmp_path):
    for name in agreement.SOURCE_PACKAGES:
        (tmp_path / name).mkdir()
    (tmp_path / "jrl" / "loss.py").write_text("SIGN = 1\n")
    monkeypatch.setattr(agreement, "SOURCE_ROOT", tmp_path)
    before = source_hashes()
    (tmp_path / "jrl" / "loss.py").write_text("SIGN = -1\n")
    assert list(before) == ["jrl/loss.py"] and source_hashes() != before


def gathered(monkeypatch, change):
    """`gather` of two processes, of which the second has `change`d each value."""
    monkeypatch.setattr(agreement, "gather", lambda value: [value, change(value)])
    monkeypatch.setattr("jrl.processes.agreement.gather", lambda value: [value, change(value)])


def test_another_version_is_named(monkeypatch):
    gathered(
        monkeypatch, lambda value: value if isinstance(value, str) else value | {"jaxlib": "0.1"}
    )
    jaxlib = installed_versions()["jaxlib"]
    with pytest.raises(ValueError) as error:
        check_same_software()
    assert str(error.value) == (
        f"process 1 runs other software than process 0: jaxlib is 0.1 there and {jaxlib} in "
        "process 0. Install the same version of jrl and of its packages on every machine."
    )


def test_a_long_list_of_files_is_cut(monkeypatch):
    gathered(
        monkeypatch,
        lambda value: "other" if isinstance(value, str) else dict.fromkeys(value, "other"),
    )
    with pytest.raises(ValueError) as error:
        check_same_software()
    differing = len(installed_versions()) + len(source_hashes())
    assert str(error.value).count(" is other there") == MAX_DIFFERENCES
    assert f"; {differing - MAX_DIFFERENCES} more. Install" in str(error.value)


def run_pair(commands):
    """Exit status, standard output and error of two commands that run at the same time."""
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, *(word.format(address=address) for word in words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for folder, words in commands
    ]
    try:
        ends = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *end) for process, end in zip(processes, ends, strict=True)]


@pytest.mark.slow
def test_a_process_with_another_source_is_refused(tmp_path):
    for name in agreement.SOURCE_PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "jrl" / "losses" / "reduction.py"
    changed.write_text(changed.read_text() + "\nSCALE = -3\n")
    flags = ["--devices=2", "--layout=dp2", "--coordinator={address}", "--num-processes=2"]
    command = ["-m", "jrl.train", *flags, "--dry-run"]
    ends = run_pair(
        [(ROOT, [*command, "--process-id=0"]), (tmp_path, [*command, "--process-id=1"])]
    )
    for status, output, errors in ends:
        assert (status, output) == (2, ""), errors
        [line] = [line for line in errors.splitlines() if not line.startswith("[Gloo]")]
        assert line.startswith(
            "error: process 1 runs other software than process 0: jrl/losses/reduction.py is "
        )
        assert ";" not in line


@pytest.mark.slow
def test_processes_that_a_launcher_connected_are_checked_and_one_prints():
    command = ["-c", CONNECTED_BY_OTHERS, "{address}"]
    ends = run_pair([(ROOT, [*command, number]) for number in "01"])
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert [output for _, output, _ in ends] == ["2 of 4 devices\n", ""]
