"""The command line of the launchers, and what they give to the training program."""

import json

import pytest
from command_runs import one_line

from jrl.config.files import to_json
from jrl.config.flags import parse_arguments
from jrl.config.run import RunConfig
from jrl.launch import __main__ as command
from jrl.launch import ssh_hosts
from jrl.launch.program import prepare
from jrl.recipes import RECIPES


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def make_run(path):
    path.mkdir(parents=True)
    config = to_json(RunConfig(steps=7), RECIPES["dapo"]())
    (path / "config.json").write_text(json.dumps(config))


def test_a_restart_finds_the_folder_of_the_run(tmp_path):
    program = prepare(["dapo", "--steps", "3"])
    assert program.arguments == (
        *("dapo", "--steps", "3", "--run-dir", "runs/dapo-sort-1", "--resume-if-exists"),
    )
    first = parse_arguments(list(program.arguments))
    assert not first.command.resume and first.command.resume_if_exists
    make_run(tmp_path / "runs" / "dapo-sort-1")
    again = parse_arguments(["--run-dir", "runs/dapo-sort-1", "--resume-if-exists"])
    assert again.command.resume and again.run.steps == 7


def test_a_run_is_continued_on_request_alone(tmp_path):
    make_run(tmp_path / "first")
    with pytest.raises(ValueError, match=r"run folder first already holds a run: .* --resume"):
        prepare(["--run-dir", "first"])
    program = prepare(["--run-dir", "first", "--resume", "--steps", "9"])
    assert program.arguments == ("--run-dir", "first", "--steps", "9", "--resume-if-exists")


def test_the_run_folder_may_come_from_a_settings_file(tmp_path):
    (tmp_path / "run.yaml").write_text("recipe: dapo\nrun_dir: chosen\n")
    program = prepare(["--config", "run.yaml"])
    assert str(program.run_dir) == "chosen" and "--run-dir" not in program.arguments
    make_run(tmp_path / "chosen")
    assert parse_arguments(["--config", "run.yaml", "--resume-if-exists"]).command.resume


def test_resume_if_exists_needs_a_folder():
    with pytest.raises(ValueError, match="--resume-if-exists needs --run-dir"):
        parse_arguments(["--resume-if-exists"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hosts a,b -- --stepz 3", None),  # the training program's own parser
        ("--hosts a,b -- --seed -1", "seed=-1 must lie in"),
        ("--hosts a,b -- --process-id 0 --coordinator a:1 --num-processes 1", "set by the"),
        ("--hosts a,b -- --resume-if-exists", "--resume-if-exists is set by the launcher"),
        ("--hosts a,,b", "hosts='a,,b' must be names"),
        ("--hosts a --gpus 8", "--gpus is of --slurm and --jobset, and has no meaning"),
        ("--hosts a --env x", "env='x' must be NAME=VALUE"),
        ("--jobset --elastic 1 --", "--elastic is of --hosts and --ray and --slurm, and has no"),
        ("--slurm --nodes 2 --elastic 3 --", "elastic=3 is more than nodes=2"),
        (
            "--jobset --nodes 2 --image x --volume c:/r -- --run-dir /r/a --on-fault drain",
            "on_fault='drain' is not supported with --jobset",
        ),
        ("--ray --workers 0", "workers=0 must be at least 1"),
        ("--slurm", "--slurm needs --nodes"),
        ("--jobset --nodes 2 --image x", "--jobset needs --volume"),
    ],
)
def test_bad_input_is_one_line(line, message, capsys, monkeypatch):
    def launch(*arguments):
        raise AssertionError("it was launched")

    monkeypatch.setattr(ssh_hosts, "launch", launch)
    if message is None:
        with pytest.raises(SystemExit) as ended:
            command.main(line.split())
        assert ended.value.code == 2
    else:
        assert command.main(line.split()) == 2
        assert message in one_line(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hosts a,b -- --faults --on-fault drain", "on_fault='drain' needs --elastic MIN"),
        ("--hosts a,b --elastic 1 --", "elastic=1 needs --faults --on-fault drain after --"),
        ("--hosts a,b --elastic 2 -- --faults --on-fault drain", "elastic=2 leaves none of 2"),
        ("--ray -- --faults --on-fault drain", "on_fault='drain' is not supported with --ray"),
        ("--ray --elastic 1 -- --faults --on-fault drain", "is not supported with --ray"),
        (
            "--slurm --nodes 2 -- --faults --on-fault drain",
            "on_fault='drain' is not supported with --slurm",
        ),
    ],
)
def test_drains_that_no_restart_would_follow_are_refused(line, message, capsys):
    assert command.main(line.split()) == 2
    assert message in one_line(capsys.readouterr())


@pytest.mark.slow
def test_hosts_get_the_fewest_processes_of_a_restart(monkeypatch):
    launched = []
    monkeypatch.setattr(ssh_hosts, "launch", lambda *given: launched.append(given) or 0)
    line = "--hosts a,b,c --elastic 2 -- --faults --on-fault drain --run-dir first"
    assert command.main(line.split()) == 0
    [(program, hosts)] = launched
    assert hosts.names == ("a", "b", "c") and program.drains
    run = parse_arguments(list(program.arguments)).run
    assert (run.on_fault, run.min_processes) == ("drain", 2)


def test_slurm_starts_an_elastic_run_on_a_range_of_nodes(tmp_path):
    line = "--slurm --nodes 4 --gpus 8 --elastic 2 -- --run-dir first"
    assert command.main(line.split()) == 0
    text = (tmp_path / "run.sbatch").read_text()
    assert "#SBATCH --nodes=2-4\n" in text and "--min-processes 16 " in text


def test_slurm_and_jobset_write_files(tmp_path, capsys):
    assert command.main(["--slurm", "--nodes=2", "--", "--steps", "3"]) == 0
    assert "--run-dir runs/grpo-sort-1 --resume-if-exists" in (tmp_path / "run.sbatch").read_text()
    words = "--jobset a.yaml --nodes 2 --image i --volume c:/runs -- --run-dir /runs/a"
    assert command.main(words.split()) == 0
    assert "kind: JobSet" in (tmp_path / "a.yaml").read_text()
    assert "submit it with: kubectl apply -f a.yaml" in capsys.readouterr().out
