import math
import struct
import sys
import types

import pytest
from small_runs import small_run, small_setup
from tensorboardX.proto import event_pb2

from jrl.faults.collect.sampler import import_client
from jrl.faults.collect.sources import import_psutil
from jrl.runs.folder import RunFolder
from jrl.runs.loggers import TensorBoard, Wandb, check_installed
from jrl.trainer import outputs


def events(directory):
    """The events of all files of a directory, oldest first: records of length, crc, data, crc."""
    found = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            # Generated code: the type checker does not see its classes.
            event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
            event.ParseFromString(content[at + 12 : at + 12 + length])
            found.append(event)
            at += 12 + length + 4
    return found


def scalars(directory):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(directory)
        for value in event.summary.value
    ]


def test_tensorboard_events_read_back(tmp_path):
    board = TensorBoard(tmp_path / "tensorboard")
    board.log(3, {"actor/pg_loss": 0.5, "critic/score/mean": 1})
    board.log(5, {"actor/pg_loss": math.nan})
    board.close()
    first, second, third = scalars(tmp_path / "tensorboard")
    assert (first, second) == ((3, "actor/pg_loss", 0.5), (3, "critic/score/mean", 1.0))
    assert third[:2] == (5, "actor/pg_loss") and math.isnan(third[2])


@pytest.mark.parametrize("step", [0, 7])
def test_a_resumed_tensorboard_hides_later_steps(tmp_path, step):
    TensorBoard(tmp_path, resume_step=step).close()
    assert session_starts(tmp_path) == [step + 1]


def session_starts(directory):
    return [event.step for event in events(directory) if event.HasField("session_log")]


def test_a_run_resumed_at_its_first_checkpoint_hides_later_steps(tmp_path):
    """A run that was killed before its second checkpoint has logged steps that come again."""
    setup = small_setup(run=small_run(log_to=("tensorboard",)))
    with RunFolder.create(tmp_path / "run", {}) as folder:
        folder.metrics_path.touch()
        with outputs.open_outputs(setup.run, setup.recipe, folder, 0):
            pass
        assert session_starts(folder.tensorboard_path) == []
        for file in folder.tensorboard_path.iterdir():
            file.unlink()  # two files of one second have one name
        with outputs.open_outputs(setup.run, setup.recipe, folder, 0):
            pass
        assert session_starts(folder.tensorboard_path) == [1]


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", lambda path: TensorBoard(path)),
        ("wandb", "wandb", lambda path: Wandb(path, {})),
        ("tensorboardX", "tensorboard", lambda path: check_installed("tensorboard")),
        ("wandb", "wandb", lambda path: check_installed("wandb")),
        ("psutil", "faults", lambda path: import_psutil()),
        ("prometheus_client", "faults", lambda path: import_client()),
    ],
)
def test_a_missing_package_is_one_line_with_the_fix(tmp_path, monkeypatch, package, extra, make):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    name = package.replace("_", "-")
    with pytest.raises(ValueError, match=rf'package {name}: pip install -e "\.\[{extra}\]"'):
        make(tmp_path)


@pytest.fixture
def wandb_calls(monkeypatch):
    """A stand-in for wandb, whose runs begin at step 3 when they are resumed."""
    calls = []

    class Run:
        def __init__(self, step):
            self.step = step

        def log(self, metrics, step):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    def init(**arguments):
        known = [call[1]["id"] for call in calls if call[0] == "init"]
        calls.append(("init", arguments))
        return Run(3 if arguments["id"] in known else 0)

    module = types.ModuleType("wandb")
    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_wandb_is_called_through_its_public_interface(tmp_path, wandb_calls):
    wandb = Wandb(tmp_path / "sort-0", {"seed": 3})
    wandb.log(2, {"actor/pg_loss": 1})
    wandb.close()
    (name, arguments), *rest = wandb_calls
    assert name == "init" and arguments["name"] == "sort-0" and arguments["project"] == "jrl"
    assert arguments["config"] == {"seed": 3} and arguments["dir"] == str(tmp_path / "sort-0")
    assert rest == [("log", {"actor/pg_loss": 1.0}, 2), ("finish",)]


def test_wandb_continues_the_run_of_its_folder_and_no_other(tmp_path, wandb_calls):
    for folder in ("a", "a", "b"):
        wandb = Wandb(tmp_path / folder / "sort-0", {})
        for step in (1, 2, 3):
            wandb.log(step, {"loss": step})
    first, again, other = (call[1]["id"] for call in wandb_calls if call[0] == "init")
    assert first == again != other
    # What has been logged before the resumption is not logged twice.
    assert [call[2] for call in wandb_calls if call[0] == "log"] == [1, 2, 3, 3, 1, 2, 3]
