"""Flags from a file: what it says is what a command line would say, and flags come first."""

import json
import shlex
from dataclasses import replace

import pytest
from annotations import unchecked
from tiers import full_but

from jrl.config import flags
from jrl.config.files import to_json
from jrl.config.flags import parse_arguments
from jrl.config.run import RunConfig
from jrl.config.settings_file import read_settings, settings_text
from jrl.recipes import RECIPES


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "given.yaml"
        path.write_text(text)
        return path

    return write


def read(path, *flags):
    request = parse_arguments([*flags, "--config", str(path)])
    return request.run, request.recipe


def test_settings_file_equals_flags(file):
    path = file(
        """
        recipe: dapo
        task: "jsonl:a b.jsonl"      # any flag, with underscores or hyphens
        learning-rate: 1e-6          # a number here, as in YAML 1.2
        group_size: 4
        prompts: 8
        mini_batch: 8
        temperature: 1
        system_prompt: no
        log_to: [tensorboard, wandb]
        profile: 10:13
        response_length: null
        fsdp: false
        """
    )
    flags = ["--task=jsonl:a b.jsonl", "--learning-rate=1e-6", "--group-size=4", "--prompts=8"]
    flags += ["--mini-batch=8", "--temperature=1", "--system-prompt=no"]
    flags += ["--log-to", "tensorboard", "wandb", "--profile", "10:13"]
    request = parse_arguments(["dapo", *flags])
    assert read(path) == (request.run, request.recipe)
    assert request.run.system_prompt == "no" and request.recipe.learning_rate == 1e-6


def test_settings_file_yields_to_flags(file):
    path = file("recipe: dapo\nsteps: 7\nseed: 5\nrun_dir: there\ntemperature: 0.5\n")
    run, recipe = read(path, "--steps=9", "--temperature=0.7")
    assert (run.steps, run.seed, recipe.name, recipe.temperature) == (9, 5, "dapo", 0.7)
    request = parse_arguments(["grpo", "--config", str(path), "--steps=9", "--run-dir=here"])
    assert (request.run.steps, request.recipe.name) == (9, "grpo")
    assert request.command.run_dir == "here"
    assert parse_arguments([f"--config={path}"]).command.run_dir == "there"


def test_settings_are_judged_together_with_the_flags(file):
    # By itself the file would be refused: devices that sample need a staleness.
    run, _ = read(file("rollout_devices: 1"), "--max-staleness=1")
    assert run.rollout_devices == 1
    with pytest.raises(ValueError, match="rollout_devices=1 and the training devices would wait"):
        read(file("rollout_devices: 1"))


@pytest.mark.parametrize("name", full_but(RECIPES, "dapo", "vapo"))
def test_the_file_of_a_run_repeats_it(name, tmp_path):
    run = RunConfig(task="jsonl:a b.jsonl", system_prompt="1e-6", drift_alarm=1e-7, seed=2**31)
    run = replace(
        run, log_to=("wandb",), chat_template="none", faults=True, on_fault="line\nanother: 'x' #"
    )
    recipe = replace(RECIPES[name](), top_k=5, learning_rate=3e-7).divided(1)
    config = json.loads(json.dumps(to_json(run, recipe)))
    path = tmp_path / "run.yaml"
    path.write_text(settings_text(config, "about"))
    assert json.loads(json.dumps(to_json(*read(path)))) == config


def test_settings_file_may_be_config_json(tmp_path):
    run, recipe = RunConfig(seed=3), replace(RECIPES["rloo"](), kl_coef=0.25).divided(1)
    (tmp_path / "config.json").write_text(json.dumps(to_json(run, recipe)))
    assert read(tmp_path / "config.json") == (run, recipe)


def test_a_recipe_of_ones_own_lies_beside_its_file(file, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\nfrom jrl.recipes.grpo import Grpo\n\n"
        "@dataclass(frozen=True)\nclass Own(Grpo):\n"
        '    """Grpo with a setting more."""\n    name = "own"\n    sharpness: float = 1.0\n'
        '    """Of the reward."""\n'
    )
    path = file("recipe: own.py:Own\nsharpness: 2")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read(path)[1].sharpness == 2.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", r"learning_rat is not a setting of this recipe; near: learning_rate"),
        ("colour_of_hair: 1", r"colour_of_hair is not a setting of this recipe; --help lists them"),
        ("scale_by_std: true\nrecipe: ppo", r"scale_by_std is not a setting of this recipe"),
        ("steps: many", r"steps is 'many', not int"),
        ("steps: 010", r"steps is '010', not int"),  # eight, says YAML 1.1
        ("steps: 7.5", r"steps is 7.5, not int"),
        ("fsdp: yes", r"fsdp is 'yes', not bool: write fsdp: true\.$"),
        ("fsdp: maybe", r"fsdp is 'maybe', not bool\.$"),
        (
            "log_to: wandb",
            r"'wandb', not a list of 'tensorboard' \| 'wandb' \| 'trackio' \| 'mlflow': "
            r"write log_to: \[\"wandb\"\]",
        ),
        ("reward: a.py:b", r"is 'a\.py:b', not a list of str: write reward: \[\"a\.py:b\"\]\.$"),
        (
            "chat_template_kwargs: {enable_thinking: false}",
            r"write it as a text, chat_template_kwargs: '\{\"enable_thinking\": false\}'\.$",
        ),
        ("remat: most", r"remat is 'most', not 'none' \| 'selective' \| 'projections' \| 'full'"),
        ("experts: megablox", r"experts is 'megablox', not .*: write experts: blocks\.$"),
        ("optimizer: {name: muon}", r"optimizer is \{'name': 'muon'\}, not 'adamw' \| 'muon'"),
        ("steps: 7\nsteps: 8", r"given.yaml is not YAML: steps is there twice \(line 2\)"),
        ("mini-batch: 7\nmini_batch: 8", r"mini_batch occurs twice: leave one out"),
        ("resume: true", r"resume is only for the command line: .* give --resume there"),
        ("config: other.yaml", r"config is only for the command line"),
        ("recipe: grop", r"given.yaml: recipe 'grop' is unknown: did you mean grpo"),
        ("recipe: [grpo]", r"recipe is \['grpo'\], not the name of a recipe"),
        ("- steps", r"holds a list, not settings: name: value"),
        ("steps: " + "[" * 1000, r"given.yaml is nested too deeply"),
        ("steps: [7", r"given.yaml is not YAML: .*\(line 1\)"),
        ("mini_batch: 7", r"mini_batch=7 does not divide"),
    ],
)
def test_settings_file_refuses_invalid_content(text, message, file):
    with pytest.raises(ValueError, match=message):
        read(file(text))


def test_settings_file_missing_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"none.yaml' cannot be read \(No such file"):
        read(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"not a preset; near: .*qwen3-0.6b-24gb"):
        read("preset:qwen3-0.6b")
    with pytest.raises(ValueError, match="--config needs a YAML file"):
        parse_arguments(["--config"])


def test_the_finished_run_has_the_file_that_repeats_it(grpo_run):
    path = grpo_run / "run.yaml"
    config = json.loads((grpo_run / "config.json").read_text())
    assert json.loads(json.dumps(to_json(*read(path)))) == config
    first = path.read_text().partition("\n")[0]
    assert shlex.split(first)[-5:] == ["python", "-m", "jrl.train", "--config", str(path)]
    assert read_settings(str(path)).recipe == "grpo"


def test_a_resumed_run_keeps_to_its_settings(grpo_run, file):
    resume = ["--resume", "--run-dir", str(grpo_run)]
    assert parse_arguments([*resume, "--config", str(file("steps: 9"))]).run.steps == 9
    where = file(f"run_dir: {grpo_run}")
    assert parse_arguments(["--resume", "--config", str(where)]).run.steps == 2
    with pytest.raises(ValueError, match="--seed is 0 in the run, 5 was given"):
        parse_arguments([*resume, "--config", str(file("seed: 5"))])


@unchecked()
def test_parse_arguments_resumes_run_of_removed_experts(monkeypatch):
    stored = RunConfig(experts="mosaic_fused"), RECIPES["grpo"]()
    monkeypatch.setattr(flags.RunFolder, "read", lambda location: location)
    monkeypatch.setattr(flags, "_read_stored", lambda *_: (stored, None))
    resume = ["--resume", "--run-dir", "run"]
    with pytest.raises(ValueError, match=r"experts='mosaic_fused' .*: give --experts mosaic\.$"):
        parse_arguments(resume)
    assert parse_arguments([*resume, "--experts", "batched"]).run.experts == "batched"
