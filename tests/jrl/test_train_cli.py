import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jax
import pytest
from command_runs import FLAGS, IN_A_FRESH_PROCESS, SETTINGS, metrics, one_line
from places import ROOT, SUPPORT
from tiers import full_but

from jrl.config.files import configuration_of
from jrl.config.run import RunConfig
from jrl.evaluate import main as evaluate
from jrl.recipes import RECIPES
from jrl.runs.folder import RunFolder
from jrl.train import main
from jrl.trainer import loop
from jrl.trainer.evaluation.saved_policy import prompts_seen_by
from jrl.trainer.learner import update as of_update
from sharding.folding import Layout

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture
def finished(grpo_run):
    """A run of two steps."""
    return grpo_run


@pytest.fixture
def copy(finished, tmp_path):
    """The run of two steps, to be written to."""
    return shutil.copytree(finished, tmp_path / "copy")


def run_alone(*arguments):
    """The command line in a process of its own, which knows the micro model."""
    return subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}:{ROOT}"},
        timeout=300,
    )


@pytest.mark.parametrize("recipe", full_but(RECIPES, "grpo", "vapo", "hapo"))
def test_help_has_a_flag_and_a_sentence_for_every_field(recipe, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([recipe, "--help"])
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    entries = [entry for entry in re.split(r" (?=--[a-z])", text) if "(default:" in entry]
    for field in (*fields(RunConfig), *fields(RECIPES[recipe])):
        flag = "--" + field.name.replace("_", "-")
        own = [entry for entry in entries if re.match(rf"{flag}[ ,]|--no{flag[1:]} ", entry)]
        assert own and len(re.findall(r"[a-z]{2,}", own[0])) > 4, (flag, own)
    assert f"The recipes are {', '.join(RECIPES)}." in text
    assert "Completions sampled per prompt." in text  # said in the base class


@pytest.mark.slow
def test_help_comes_before_anything_heavy():
    program = (
        "import sys; from jrl.train import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print(end.code, *sys.modules)"
    )
    alone = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    code, *modules = alone.stdout.splitlines()[-1].split()
    assert code == "0"
    assert not {"orbax", "optax", "matplotlib", "jrl.trainer.setup.setup"} & set(modules)


def test_a_run_leaves_everything_behind_and_says_where(finished, pictures, capsys):
    assert main([*FLAGS, "--run-dir", "here"]) == 0
    folder = RunFolder.read("here")
    run, recipe = configuration_of(folder)
    assert (run.steps, run.model, recipe.name, recipe.prompts) == (2, "micro", "grpo", 4)
    assert folder.tokenizer_path.is_file()
    lines = metrics(folder.path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines == metrics(finished)  # the same seed
    out = capsys.readouterr().out
    assert "run folder: here\n" in out
    assert out.count("warning: the warm start reached an accuracy of 0.000 in 2 steps") == 1
    first, last = (line["val/accuracy/sampled"] for line in (lines[0], lines[-1]))
    assert f"warm start -> step 2: sampled {first:.3f} -> {last:.3f}, greedy" in out
    assert "plots: here/plots/overview.png" in out and Path("here/plots/overview.png").is_file()


def test_a_run_without_a_folder_gets_the_next_number(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupt)
    for _ in range(2):
        assert main(FLAGS) == 130
    shutil.rmtree("runs/grpo-sort-1")
    assert main(FLAGS) == 130
    assert main(["dapo", *FLAGS, "--task", "addition"]) == 130
    assert sorted(os.listdir("runs")) == ["dapo-addition-1", "grpo-sort-2", "grpo-sort-3"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("python -m jrl.train --resume --run-dir runs/dapo-addition-1")


@pytest.mark.slow
def test_a_finished_run_says_so(copy, capsys):
    assert not (copy / "plots").exists()  # as if killed before they were drawn
    assert main(["--resume", "--run-dir", str(copy), "--prompts", "4"]) == 0
    assert f"{copy} is finished after 2 steps" in capsys.readouterr().out
    assert (copy / "plots" / "overview.png").is_file()


def test_more_steps_go_on_from_the_last(copy, finished, capsys):
    more = ["--resume", "--run-dir", str(copy), "--steps", "3", "--keep-checkpoints", "1"]
    assert main(more) == 0
    assert metrics(copy)[:3] == metrics(finished)
    assert [line["step"] for line in metrics(copy)] == [0, 1, 2, 3]
    run, _ = configuration_of(RunFolder.read(copy))
    assert (run.steps, run.keep_checkpoints) == (3, 1)
    assert os.listdir(copy / "checkpoints") == ["3"]


@pytest.mark.slow
def test_a_resumed_run_is_fitted_to_another_machine(copy, tmp_path):
    """What a run that met the end of its memory is told to change, it may; the third step is the
    same."""
    same = shutil.copytree(copy, tmp_path / "same")
    fits = "--micro-batch 2 --layout dp2 --remat full --fsdp"
    for path, flags in ((same, ""), (copy, fits)):
        assert main(["--resume", "--run-dir", str(path), "--steps", "3", *flags.split()]) == 0
    run, recipe = configuration_of(RunFolder.read(copy))
    assert (recipe.micro_batch, run.layout, run.remat, run.fsdp) == (2, "dp2", "full", True)
    wanted, found = metrics(same), metrics(copy)
    assert found[:3] == wanted[:3] and found[3].keys() == wanted[3].keys()
    for name in wanted[3].keys() - {"moe/padded_fraction"}:  # rows that share a prompt run it once
        # Float32 sums in another order.
        assert found[3][name] == pytest.approx(wanted[3][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed 1", "--seed is 0 in the run, 1 was given"),
        ("--clip-high 0.28", "--clip-high is 0.2 in the run, 0.28 was given"),
        ("--steps 1", "--steps is 2 in the run and can only be raised, 1 was given"),
        # Judged against the run before it is judged by itself: 5 x 4 does not divide by 8.
        ("--prompts 5 --model tiny", "--model is micro .* tiny was given; --prompts is 4 .* 5 was"),
        ("--task addition", "--task is sort in the run, addition was given"),
    ],
)
def test_a_resumed_run_keeps_its_settings(finished, capsys, flags, message):
    before = (finished / "config.json").read_bytes()
    assert main(["--resume", "--run-dir", str(finished), *flags.split()]) == 2
    assert re.search(f"a resumed run keeps its settings: {message}", one_line(capsys.readouterr()))
    assert (finished / "config.json").read_bytes() == before


def test_lines_that_are_not_the_run_s_are_refused(copy, capsys):
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))
    assert main(["--resume", "--run-dir", str(copy), "--steps=3"]) == 2
    assert "metrics.jsonl:2 is of step 2 where step 1 is expected" in one_line(capsys.readouterr())


def test_a_resumed_run_keeps_its_recipe(finished, capsys):
    assert main(["dapo", "--resume", "--run-dir", str(finished)]) == 2
    assert "the recipe is grpo in the run, dapo was given" in one_line(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "evaluated"),
    [(signal.SIGTERM, 0, "start -> step 0"), (signal.SIGINT, 130, "start -> step 1")],
)
def test_a_stopped_run_goes_on_to_the_same_end(
    number, status, evaluated, finished, tmp_path, monkeypatch, capsys
):
    step = loop.train_step

    def stopped(*arguments, **options):
        os.kill(os.getpid(), number)
        return step(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopped)
        assert main([*FLAGS, "--run-dir", "run"]) == status
    out = capsys.readouterr().out
    assert f"held-out accuracy, warm {evaluated}: sampled" in out
    said = re.search(r"stopped after step 1 of 2; resume with: python -m jrl.train (.*)", out)
    assert said is not None
    assert main(said[1].split()) == 0
    assert metrics(tmp_path / "run") == metrics(finished)


def test_a_run_stopped_in_its_warm_start_says_how_to_begin_again(monkeypatch, capsys):
    update = of_update.update

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments)

    monkeypatch.setattr(of_update, "update", interrupted)
    assert main([*FLAGS, "--run-dir", "run"]) == 130
    said = capsys.readouterr()
    assert "in the warm start, before the first checkpoint; restart with: python -m" in said.out
    assert "--resume --run-dir run" in said.out


@pytest.mark.slow
def test_weights_of_another_run_take_the_place_of_the_warm_start(finished, tmp_path, capsys):
    start = ["--weights", str(finished), "--run-dir", "on", "--steps", "1"]
    assert main([*FLAGS, *start]) == 0
    first, last = metrics(tmp_path / "on")[0], metrics(finished)[-1]
    assert "warm_start/steps" not in first
    assert first["val/accuracy/greedy"] == last["val/accuracy/greedy"]
    assert first["val/score/greedy"] == last["val/score/greedy"]
    # Task and seed are the same, and so is the stream of prompts: it goes on.
    before, after = (prompts_seen_by(RunFolder.read(path)) for path in (finished, tmp_path / "on"))
    assert before > 0 and after == before + SETTINGS["prompts"]
    tokenizers = [path / "tokenizer.model" for path in (tmp_path / "on", finished)]
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    assert "held-out accuracy, start -> step 1" in capsys.readouterr().out


SIZES = [
    ("--prompts 10", ("80 / 80 = 1", "80 / 80 = 1")),
    ("--group-size 5", ("320 / 160 = 2", "160 / 80 = 2")),
    ("--prompts 9 --layout dp3", ("72 / 72 = 1", "72 / 72 = 1")),
    ("--prompts 66 --layout dp3", ("528 / 132 = 4", "132 / 66 = 2")),
    ("--prompts 10 --group-size 2 --layout tp2 --prompt-length 13", ("20 / 20 = 1", "= 1")),
    ("", ("512 / 128 = 4", "128 / 64 = 2")),
]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    full_but(SIZES, SIZES[1], SIZES[4]),
)
def test_one_size_alone_works(flags, sizes, capsys):
    assert main(["--model", "micro", *flags.split(), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"mini-batches\s+{sizes[0]}", out), out
    assert re.search(rf"micro-batches per mini-batch\s+.*{sizes[1]}", out), out


@pytest.mark.parametrize("recipe_at", [0, 1])
def test_a_dry_run_prints_and_makes_nothing(recipe_at, capsys):
    words = [*FLAGS, "--dry-run", "--overlong-buffer", "2"]
    assert main([*words[:recipe_at], "dapo", *words[recipe_at:]]) == 0
    out = capsys.readouterr().out
    assert re.search(r"mini-batches\s+16 / 8 = 2", out)
    assert re.search(r"optimizer steps of the policy\s+2 x 2 = 4", out)
    assert os.listdir() == []


def test_a_dry_run_of_a_resumed_run_shows_its_settings(finished, capsys):
    assert main(["--resume", "--dry-run", "--run-dir", str(finished), "--steps", "9"]) == 0
    assert re.search(r"optimizer steps of the policy\s+9 x 2 = 18", capsys.readouterr().out)


@pytest.mark.slow
def test_fake_devices(tmp_path):
    layout = ["--devices", "4", "--layout", "tp2 dp2 / ep4"]
    sizes = ["--warm-start-steps", "0", "--group-size", "2", "--gradient-wire", "bfloat16"]
    alone = run_alone(*FLAGS, *layout, *sizes, "--run-dir", "four")
    assert alone.returncode == 0, alone.stderr
    assert [line["step"] for line in metrics(tmp_path / "four")] == [0, 1, 2]
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert (config["run"]["devices"], config["run"]["layout"]) == (4, "tp2 dp2 / ep4")
    assert config["run"]["gradient_wire"] == "bfloat16"


@pytest.mark.parametrize(
    "of_several_devices", ["", "--overlap-grad-reduce", "--activation-wire float8_e4m3fn"]
)
def test_the_planner_chooses_a_layout(monkeypatch, capsys, of_several_devices):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert main([*FLAGS, "--layout", "auto", "--dry-run", *of_several_devices.split()]) == 0
    out = capsys.readouterr().out
    (layout,) = re.findall(r"layout auto: (.*), by the planner the fastest of", out)
    assert Layout.parse(layout).num_devices == 4
    assert f"Layout: {layout} on 4 devices" in " ".join(out.split())


def test_a_run_keeps_the_layout_that_was_chosen(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(loop, "train", interrupted)
    assert main([*FLAGS, "--layout", "auto", "--run-dir", "four"]) == 130
    out = capsys.readouterr().out
    (layout,) = re.findall(r"layout auto: (.*), by the planner the fastest of", out)
    config = json.loads(Path("four", "config.json").read_text())
    assert config["run"]["layout"] == layout
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert main(["--resume", "--dry-run", "--run-dir", "four"]) == 0
    assert f"Layout: {layout} on 4 devices" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_in_bfloat16_begins_goes_on_and_is_evaluated(tmp_path, capsys):
    run = ["--run-dir", str(tmp_path / "half")]
    assert main([*FLAGS, "--dtype", "bfloat16", "--dry-run"]) == 0
    assert re.search(r"float32 masters +\d", capsys.readouterr().out)
    assert main([*FLAGS, "--dtype", "bfloat16", "--mu-dtype", "bfloat16", *run]) == 0
    assert main(["--resume", "--steps", "3", *run]) == 0
    assert [line["step"] for line in metrics(tmp_path / "half")] == [0, 1, 2, 3]
    capsys.readouterr()
    assert main(["--resume", "--steps", "4", "--dtype", "float32", *run]) != 0
    message = "--dtype is bfloat16 in the run, float32 was given"
    assert message in one_line(capsys.readouterr())
    assert evaluate([str(tmp_path / "half"), "--k", "1", "--prompts", "4"]) == 0
    # Another run begins from its float32 weights, in whatever it computes.
    start = ["--weights", str(tmp_path / "half"), "--dtype", "float32", "--run-dir"]
    assert main([*FLAGS, *start, str(tmp_path / "whole")]) == 0
