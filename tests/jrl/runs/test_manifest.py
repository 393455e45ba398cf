"""Damage to a checkpoint is noticed, wherever it is, and the one before is taken."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from damages import DAMAGES, delete, flip_a_bit, halve, replace_by_a_folder

from jrl.runs import manifest
from jrl.runs.checkpoints import Checkpoints

META = {"cursor": 5}


def state(step):
    return {"w": jnp.arange(600, dtype=jnp.float32) + step, "b": np.full(3, step, np.int64)}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The checkpoints of steps 3 and 7."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for step in (3, 7):
        with Checkpoints(directory) as checkpoints:
            checkpoints.save(step, state(step), META)
    return directory


@pytest.fixture
def copy(two, tmp_path):
    return Path(shutil.copytree(two, tmp_path / "copy"))


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def assert_is_of(checkpoints, step):
    restored, meta = checkpoints.restore(step, state(0))
    np.testing.assert_array_equal(restored["w"], state(step)["w"])
    np.testing.assert_array_equal(restored["b"], state(step)["b"])
    assert meta == META


def assert_gives_way(two, copy, damage, name):
    shutil.copytree(two, copy)
    damage(copy / "7" / name)
    step, damaged = Checkpoints(copy).latest_valid_step()
    assert step == 3 and list(damaged) == [7], f"{damage.__name__} {name}"
    assert damaged[7].startswith(f"{name} "), damaged


@pytest.mark.slow
def test_every_damage_to_every_file_gives_way_to_the_one_before(two, tmp_path):
    every = [(damage, name) for name in files(two / "7") for damage in DAMAGES]
    assert len(every) > 150
    for number, (damage, name) in enumerate(every):
        assert_gives_way(two, tmp_path / str(number), damage, name)
    assert_is_of(Checkpoints(tmp_path / str(len(every) - 1)), 3)


@pytest.mark.parametrize("name", ["array data", "manifest.json", "meta/metadata"])
def test_every_damage_gives_way_to_the_one_before(two, tmp_path, name):
    if name == "array data":
        data = (two / "7" / "state" / "ocdbt.process_0" / "d").iterdir()
        name = max(data, key=lambda path: path.stat().st_size).relative_to(two / "7")
    for damage in DAMAGES:
        assert_gives_way(two, tmp_path / damage.__name__, damage, name)


def test_intact_checkpoints_are_verified(two):
    assert Checkpoints(two).latest_valid_step() == (7, {})
    assert_is_of(Checkpoints(two), 7)
    assert Checkpoints(two / "none").latest_valid_step() == (None, {})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (delete, "is missing"),
        (halve, r"has \d+ bytes instead of \d+"),
        (flip_a_bit, "has other content than was written"),
        (replace_by_a_folder, "is a directory"),
    ],
)
def test_restore_names_the_damage(copy, damage, why):
    damage(copy / "7" / "state" / "_METADATA")
    checkpoints = Checkpoints(copy)
    message = re.escape(f"checkpoint {copy / '7'} is damaged: state/_METADATA ") + why + ";"
    for read in (lambda: checkpoints.restore(7, state(0)), lambda: checkpoints.meta(7)):
        with pytest.raises(ValueError, match=message):
            read()
    assert_is_of(checkpoints, 3)


def test_several_files_are_counted(copy):
    for name in ("_METADATA", "commit_success.txt", "manifest.ocdbt"):
        flip_a_bit(copy / "7" / "state" / name)
    _, damaged = Checkpoints(copy).latest_valid_step()
    assert damaged[7].startswith("state/_METADATA has other content than was written, and 2 more")


def test_checkpoint_copied_to_another_step_is_damaged(copy):
    shutil.copytree(copy / "3", copy / "9")
    step, damaged = Checkpoints(copy).latest_valid_step()
    assert (step, damaged) == (7, {9: "manifest.json is that of step 3"})


def test_all_damaged_checkpoints_are_named(copy):
    delete(copy / "7" / "state")
    (copy / "3" / manifest.MANIFEST_NAME).write_text(json.dumps({"step": 3, "files": {}}))
    message = (
        r"no checkpoint in .* is intact \(of step 7: state/_METADATA is missing, and \d+ more "
    )
    message += (
        r"of its files are damaged; of step 3: manifest\.json has other content than was written\)"
    )
    with pytest.raises(ValueError, match=message):
        Checkpoints(copy).latest_valid_step()


def test_damaged_checkpoint_is_set_aside(copy):
    checkpoints = Checkpoints(copy, keep=1)
    content = (copy / "7" / "state" / "_METADATA").read_bytes()
    assert checkpoints.set_aside(7) == copy / "7.damaged"
    assert checkpoints.steps() == [3]
    checkpoints.save(7, state(7))
    assert checkpoints.set_aside(7) == copy / "7.damaged-2"
    checkpoints.save(8, state(8))
    checkpoints.wait()
    names = sorted(entry.name for entry in copy.iterdir())
    assert names == ["7.damaged", "7.damaged-2", "8"]
    assert (copy / "7.damaged" / "state" / "_METADATA").read_bytes() == content


def test_extra_file_is_ignored(copy):
    (copy / "7" / "notes.txt").write_text("the good one")
    assert Checkpoints(copy).latest_valid_step() == (7, {})


def test_checkpoint_deleted_while_hashing_is_not_damaged(copy, monkeypatch):
    looked = manifest.find_damage

    def late(folder, step):
        if step == 7:
            (copy / "7").rename(copy / "11")
            manifest.write(copy / "11", 11)
        return looked(folder, step)

    monkeypatch.setattr(manifest, "find_damage", late)
    assert Checkpoints(copy).latest_valid_step() == (11, {})


# Each process hashes the files with its own number; both see the damage that one of them finds.
OF_TWO = """
import sys, pathlib, jax
from jrl.runs import manifest
port, number, folder = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(number))
folder = pathlib.Path(folder)
manifest.write(folder, 4)
assert manifest.find_damage(folder, 4) is None
if number == "0":
    (folder / "process_1").write_text("else")
from jrl.processes.agreement import any_of
any_of(False)
print(manifest.find_damage(folder, 4))
"""


@pytest.mark.slow
def test_two_processes_share_the_files(tmp_path):
    for name in ("process_0", "process_1", "whole"):
        (tmp_path / name).write_text(name)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
    program = [sys.executable, "-c", OF_TWO, port]
    processes = [
        subprocess.Popen([*program, number, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for number in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Gloo speaks as well.
    assert [text.splitlines()[-1] for text in said] == ["process_1 has 4 bytes instead of 9"] * 2
    listed = json.loads((tmp_path / manifest.MANIFEST_NAME).read_text())["files"]
    assert sorted(listed) == ["process_0", "process_1", "whole"]


def test_files_are_synced_before_a_checkpoint_is_renamed(tmp_path, monkeypatch):
    synced = []

    def sync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, (directory / "1").exists()))
        fsync(descriptor)

    fsync, directory = os.fsync, tmp_path / "checkpoints"
    monkeypatch.setattr(os, "fsync", sync)
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, state(1))
    inodes = {path.stat().st_ino for path in [directory / "1", *(directory / "1").rglob("*")]}
    assert inodes <= {inode for inode, is_named in synced if not is_named}
    assert synced[-1] == (directory.stat().st_ino, True)
