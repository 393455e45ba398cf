"""Directories of checkpoints in Google Cloud Storage, and outside of the run folder."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bucket import bucket
from command_runs import metrics

from jrl import evaluate, train
from jrl.runs.__main__ import main as runs
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.directory import bucket_files, open_directory, storage_path
from jrl.runs.folder import RunFolder
from jrl.runs.storage import StorageError

META = {"cursor": 5}


def state(step):
    return {
        "w": jnp.arange(600, dtype=jnp.float32) + step,
        "b": np.full(3, step, np.int64),
        "key": jax.random.key(step),
    }


@pytest.fixture(scope="module")
def storage():
    with bucket() as address:
        yield address


@pytest.fixture
def address(storage, request):
    """Address of a directory of the test's own."""
    return f"{storage}/{request.node.name}"


def save(address, *steps, keep=2):
    with Checkpoints(address, keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), META)
    return checkpoints


def objects(address):
    return sorted(name.removeprefix("bucket/") for name in bucket_files().find(address))


def assert_is_of(checkpoints, step):
    restored, meta = checkpoints.restore(step, state(0))
    assert meta == META
    for name, leaf in state(step).items():
        raw = jax.random.key_data if name == "key" else np.asarray
        assert raw(restored[name]).tobytes() == raw(leaf).tobytes(), name


@pytest.mark.parametrize("address", ["gs://bucket/a/b", "gs:/bucket/a/b", "gs://bucket/a//b/"])
def test_an_address_has_one_spelling(address):
    assert str(storage_path(address)) == "gs://bucket/a/b"


@pytest.mark.parametrize("address", ["s3://bucket/run", "s3:/bucket/run", "https://host/run"])
def test_storage_that_orbax_does_not_write_is_rejected(address):
    with pytest.raises(ValueError, match=f"^{address} is an address of storage that Orbax does"):
        Checkpoints(address)


@pytest.mark.parametrize("address", ["gs://bucket", "gs://", "gs://bucket/"])
def test_a_bucket_alone_is_rejected(address):
    with pytest.raises(ValueError, match="names no folder in a bucket: give gs://BUCKET/PATH"):
        Checkpoints(address)


def test_a_bucket_needs_gcsfs(monkeypatch):
    bucket_files.cache_clear()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=r'needs the package gcsfs: pip install -e "\.\[gcs\]"'):
        Checkpoints("gs://bucket/run")


def test_checkpoints_in_a_bucket_are_those_saved(address):
    checkpoints = save(address, 0, 3, 7)
    assert checkpoints.steps() == [3, 7]
    assert Checkpoints(address).latest_valid_step() == (7, {})
    for step in (3, 7):
        assert_is_of(checkpoints, step)
    assert not [name for name in objects(address) if "/0/" in name]
    with pytest.raises(ValueError, match=rf"not newer than the checkpoint of step 7 in {address}"):
        checkpoints.save(7, state(7))


def replaced(name):
    content = bytearray(bucket_files().cat_file(name))
    content[len(content) // 2] ^= 1
    bucket_files().pipe_file(name, bytes(content))


def cut(name):
    bucket_files().pipe_file(name, bucket_files().cat_file(name)[:-1])


DAMAGES = {
    "is missing": lambda name: bucket_files().rm_file(name),
    "bytes instead of": cut,
    "has other content than was written": replaced,
}


@pytest.mark.parametrize("reason", DAMAGES)
@pytest.mark.parametrize("kind", ["/d/", "meta/metadata"])
def test_a_damaged_object_gives_way_to_the_checkpoint_before(address, kind, reason):
    checkpoints = save(address, 3, 7)
    name = next(name for name in objects(f"{address}/7") if kind in name)
    DAMAGES[reason](f"bucket/{name}")
    step, damaged = Checkpoints(address).latest_valid_step()
    assert step == 3 and reason in damaged[7] and name.endswith(damaged[7].split()[0])
    assert str(checkpoints.set_aside(7)) == f"{address}/7.damaged"
    save(address, 7)
    assert str(checkpoints.set_aside(7)) == f"{address}/7.damaged-2"
    assert checkpoints.steps() == [3]
    assert [path.name for path in open_directory(address).damaged()] == ["7.damaged", "7.damaged-2"]


def test_without_its_last_object_a_checkpoint_is_none(address):
    save(address, 3, 7)
    bucket_files().rm_file(f"{address}/7/manifest.json")
    bucket_files().pipe_file(f"{address}/7/state/leftover", b"of a killed writer")
    assert Checkpoints(address).latest_valid_step() == (3, {})
    checkpoints = save(address, 7)
    assert checkpoints.steps() == [3, 7]
    assert not [name for name in objects(address) if "leftover" in name]
    assert_is_of(checkpoints, 7)


def test_a_bucket_that_does_not_exist_is_one_line(storage):
    checkpoints = Checkpoints("gs://no-such-bucket/run")
    line = (
        r"^gs://no-such-bucket/run: .*no-such-bucket.*\. The checkpoint of step 0 was not written, "
        r"there is no earlier one\.$"
    )
    with pytest.raises(StorageError, match=line):
        save("gs://no-such-bucket/run", 0)
    assert checkpoints.steps() == []


def test_a_folder_made_in_the_console_is_no_checkpoint(address):
    bucket_files().pipe_file(f"{address}/7/", b"")
    assert Checkpoints(f"{address}/7").steps() == []
    assert Checkpoints(f"{address}/7").latest_valid_step() == (None, {})
    assert open_directory(f"{address}/7").is_empty()


def test_storage_that_cannot_be_reached_is_one_line(storage, tmp_path, monkeypatch, capsys):
    def unreachable(*_, **__):
        raise ConnectionError("Cannot connect to host storage.googleapis.com:443\nand more")

    monkeypatch.setattr(bucket_files(), "ls", unreachable)
    config = {"run": {"checkpoint_dir": "gs://bucket/run"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert runs(["list", str(tmp_path)]) == 1
    line = "error: gs://bucket/run: Cannot connect to host storage.googleapis.com:443\n"
    assert capsys.readouterr().err == line


def test_a_run_claims_its_directory(address, tmp_path):
    config = {"run": {"checkpoint_dir": address}}
    RunFolder.create(tmp_path / "first", config).close()
    assert str(RunFolder.read(tmp_path / "first").checkpoints_path) == address
    assert json.loads(bucket_files().cat_file(f"{address}/config.json")) == config
    save(address, 0)
    with pytest.raises(ValueError, match=f"^{address} holds checkpoints of another run: choose"):
        RunFolder.create(tmp_path / "second", config)
    assert not (tmp_path / "second").exists()


def test_a_run_begins_in_no_bucket_that_does_not_exist(storage, tmp_path):
    config = {"run": {"checkpoint_dir": "gs://no-such-bucket/run"}}
    with pytest.raises(StorageError, match=r"^gs://no-such-bucket/run: .*\. No run was started\.$"):
        RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_a_directory_may_be_of_another_file_system(tmp_path):
    config = {"run": {"checkpoint_dir": str(tmp_path / "scratch" / "first")}}
    with RunFolder.create(tmp_path / "run", config) as folder:
        save(folder.checkpoints_path, 0)
    assert (tmp_path / "scratch" / "first" / "0").is_dir()
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(ValueError, match="holds checkpoints of another run"):
        RunFolder.create(tmp_path / "second", config)


FLAGS = ["--model=micro", "--warm-start-steps=0", "--prompts=4", "--group-size=2", "--mini-batch=8"]
FLAGS += ["--eval-prompts=4", "--eval-every=1", "--checkpoint-every=2", "--samples-every=1"]


@pytest.mark.slow
def test_a_run_resumes_and_is_read_from_a_bucket(address, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    elsewhere = ["--run-dir", "bucket", "--checkpoint-dir", address]
    assert train.main([*FLAGS, *elsewhere, "--steps=2"]) == 0
    assert train.main(["--resume", "--run-dir=bucket", "--steps=4"]) == 0
    assert train.main([*FLAGS, "--run-dir=local", "--steps=4"]) == 0
    assert metrics(tmp_path / "bucket") == metrics(tmp_path / "local")
    assert not (tmp_path / "bucket" / "checkpoints").exists()
    saved, local = (Checkpoints(path) for path in (address, "local/checkpoints"))
    assert saved.steps() == local.steps() == [2, 4]

    assert evaluate.main(["bucket", "--prompts=4"]) == 0
    assert runs(["verify", "bucket"]) == 0
    assert "step 2: intact\nstep 4: intact\n" in capsys.readouterr().out
    assert runs(["list", "bucket"]) == 0
    assert "complete, hashes not read" in capsys.readouterr().out
    assert runs(["prune", "bucket", "--keep", "1"]) == 0
    assert saved.steps() == [4]

    moved = f"{address}-moved"
    bucket_files().copy(f"{address}/4", f"{moved}/4", recursive=True)
    arguments = ["--resume", "--run-dir=bucket", "--steps=5", "--checkpoint-dir", moved]
    assert train.main(arguments) == 0
    assert Checkpoints(moved).steps() == [4, 5]
    assert str(RunFolder.read("bucket").checkpoints_path) == moved
