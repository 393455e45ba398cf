import math
import struct
import sys
import types

import pytest
from tensorboardX.proto import event_pb2

from jrl.trainer.loggers import TensorBoard, Wandb, check_installed


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


def test_a_resumed_tensorboard_hides_later_steps(tmp_path):
    TensorBoard(tmp_path, resume_step=7).close()
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    assert starts == [8]


@pytest.mark.parametrize(
    ("package", "extra", "make"),
    [
        ("tensorboardX", "tensorboard", lambda path: TensorBoard(path)),
        ("wandb", "wandb", lambda path: Wandb(path, "jrl", "run", {})),
        ("tensorboardX", "tensorboard", lambda path: check_installed("tensorboard")),
        ("wandb", "wandb", lambda path: check_installed("wandb")),
    ],
)
def test_a_missing_package_is_one_line_with_the_fix(tmp_path, monkeypatch, package, extra, make):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ValueError, match=rf'package {package}: pip install -e "\.\[{extra}\]"'):
        make(tmp_path)


def test_wandb_is_called_through_its_public_interface(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    def init(**arguments):
        calls.append(("init", arguments))
        return Run()

    module = types.ModuleType("wandb")
    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    wandb = Wandb(tmp_path, "jrl", "sort-0", {"seed": 3}, mode="offline")
    wandb.log(2, {"actor/pg_loss": 1})
    wandb.close()
    (name, arguments), *rest = calls
    assert name == "init" and arguments["id"] == "sort-0" and arguments["mode"] == "offline"
    assert arguments["config"] == {"seed": 3} and arguments["dir"] == str(tmp_path)
    assert rest == [("log", {"actor/pg_loss": 1.0}, 2), ("finish",)]
