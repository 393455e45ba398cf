import math
import struct
import sys
import types

import pytest
from small_runs import small_run, small_setup
from tensorboardX.proto import event_pb2

from jrl.faults.collect.sampler import import_client, import_psutil
from jrl.runs.folder import RunFolder
from jrl.runs.loggers import (
    MLFLOW_IMPATIENCE,
    PAUSE_SECONDS,
    MLflow,
    Patient,
    TensorBoard,
    Trackio,
    Wandb,
    check_installed,
)
from jrl.trainer import outputs


def events(directory):
    """The events of all files of a directory, oldest first: records of length, crc, data, crc."""
    result = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            # Generated code: the type checker does not see its classes.
            event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]
            event.ParseFromString(content[at + 12 : at + 12 + length])
            result.append(event)
            at += 12 + length + 4
    return result


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
        ("trackio", "trackio", lambda path: Trackio(path, {})),
        ("trackio", "trackio", lambda path: check_installed("trackio")),
        ("mlflow", "mlflow", lambda path: MLflow(path, {})),
        ("mlflow", "mlflow", lambda path: check_installed("mlflow")),
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


@pytest.fixture
def trackio_calls(monkeypatch):
    """A stand-in for trackio."""
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append(("log", metrics, step))

        def finish(self):
            calls.append(("finish",))

    def init(**arguments):
        calls.append(("init", arguments))
        return Run()

    module = types.ModuleType("trackio")
    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "trackio", module)
    return calls


def test_trackio_continues_the_run_of_its_folder_and_no_other(tmp_path, trackio_calls):
    for folder, steps in (("a", (1, 2, 3)), ("a", (2, 3, 4)), ("b", (1,))):
        logger = Trackio(tmp_path / folder / "sort-0", {"seed": 3})
        for step in steps:
            logger.log(step, {"loss": step})
        logger.close()
    inits = [call[1] for call in trackio_calls if call[0] == "init"]
    names = [arguments["name"] for arguments in inits]
    assert names[0] == names[1] != names[2] and names[0].startswith("sort-0-")
    assert all(arguments["resume"] == "allow" for arguments in inits)
    logged = [call[2] for call in trackio_calls if call[0] == "log"]
    assert logged == [1, 2, 3, 4, 1]
    assert trackio_calls[1] == ("log", {"loss": 1.0}, 1)


@pytest.fixture
def mlflow_calls(monkeypatch):
    """A stand-in for mlflow with one experiment."""
    for name in MLFLOW_IMPATIENCE:
        monkeypatch.setenv(name, "3")
    calls, experiments = [], []

    class Client:
        def get_experiment_by_name(self, name):
            result = types.SimpleNamespace(experiment_id="7")
            return result if name in experiments else None

        def create_experiment(self, name):
            experiments.append(name)
            return "7"

        def create_run(self, experiment, run_name):
            identity = f"run-{len(calls)}"
            calls.append(("create", experiment, run_name, identity))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id=identity))

        def update_run(self, identity, status):
            calls.append(("update", identity, status))

        def log_batch(self, identity, metrics=(), params=()):
            assert len(params) <= 100
            calls.extend(("param", identity, *each) for each in params)
            calls.extend(("metric", identity, name, x, step) for name, x, _, step in metrics)

        def set_terminated(self, identity):
            calls.append(("end", identity))

    module = types.ModuleType("mlflow")
    entities = types.SimpleNamespace(Metric=lambda *fields: fields, Param=lambda *fields: fields)
    monkeypatch.setattr(module, "MlflowClient", Client, raising=False)
    monkeypatch.setattr(module, "entities", entities, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return calls


def test_mlflow_continues_the_run_of_its_folder_and_no_other(tmp_path, mlflow_calls):
    config = {"run": {"steps": 9, "task": "x" * 600}, "recipe": "grpo"}
    for folder, steps in (("a", (1, 2)), ("a", (2, 3)), ("b", (1,))):
        logger = MLflow(tmp_path / folder / "sort-0", config)
        for step in steps:
            logger.log(step, {"val/pass@4": step})
        logger.close()
    first, second = (call[3] for call in mlflow_calls if call[0] == "create")
    of_first = [call for call in mlflow_calls if call[0] != "create" and call[1] == first]
    assert of_first == [
        ("param", first, "run.steps", "9"),
        ("param", first, "run.task", "x" * 500),
        ("param", first, "recipe", "grpo"),
        ("metric", first, "val/pass_4", 1.0, 1),
        ("metric", first, "val/pass_4", 2.0, 2),
        ("end", first),
        ("update", first, "RUNNING"),
        ("metric", first, "val/pass_4", 3.0, 3),
        ("end", first),
    ]
    assert ("metric", second, "val/pass_4", 1.0, 1) in mlflow_calls


class Flaky:
    """A logger that fails as long as `is_down`."""

    def __init__(self):
        self.is_down, self.attempts, self.logged = False, 0, []

    def make(self):
        self._reach()
        return self

    def log(self, step, metrics):
        self._reach()
        self.logged.append(step)

    def close(self):
        self._reach()

    def _reach(self):
        self.attempts += 1
        if self.is_down:
            raise ConnectionError("no route to host\nand a page of details")


@pytest.mark.parametrize("down", [range(1, 5), range(3, 6), range(0, 9), range(8, 9)])
def test_a_logger_that_fails_says_so_once_and_catches_up(down, capsys):
    """Its steps are sent after a pause, or a line says which it lacks."""
    now, tracker = 0.0, Flaky()
    tracker.is_down = 0 in down
    logger = Patient("mlflow", tracker.make, lambda: now)
    for step in range(1, 8):
        now += 2 * PAUSE_SECONDS
        tracker.is_down = step in down
        logger.log(step, {})
    tracker.is_down = 8 in down
    logger.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "warning: logging to mlflow failed: no route to host; the run goes on"
    assert tracker.logged == ([] if 0 in down else list(range(1, 8)))
    rest = ["warning: mlflow lacks steps 1 to 7, which metrics.jsonl has"] if 0 in down else []
    assert lines[1:] == rest


def test_a_logger_that_fails_is_tried_with_pauses(capsys):
    tracker = Flaky()
    tracker.is_down = True
    logger = Patient("wandb", tracker.make, lambda: 0.0)
    for step in range(100):
        logger.log(step, {})
    assert tracker.attempts == 1
