"""A recipe of one file with a network of another width, whose log-probabilities it receives."""

import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import on_mesh
from small_runs import metrics_of

from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.recipes import Grpo, NetworkSpec
from jrl.recipes.base.batch import Batch, over_rows
from jrl.recipes.load import load_recipe
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.runs.records import read_object
from jrl.train import main
from jrl.trainer.evaluation.network_files import check_networks, load_network_files
from jrl.trainer.evaluation.saved_policy import load_model
from jrl.trainer.setup.network import network_of
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.step import _score_frozen
from moe.config import Model, preset
from moe.model import next_token_logits

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
DISTILL = PAGE.split('```python title="distill.py"\n')[1].split("```")[0]
"""The recipe as the page has it."""
SIZES = [
    *("--task", "sort", "--prompts", "4", "--group-size", "2"),
    *("--warm-start-steps", "1", "--eval-prompts", "4"),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    assert main(["grpo", *SIZES, "--model", "small", "--steps", "1", "--run-dir", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "dp2"])
def test_a_teacher_of_another_width_scores_and_resumes(tmp_path, teacher, layout):
    (tmp_path / "own.py").write_text(DISTILL)
    options = ["--recipe", f"{tmp_path}/own.py:Distill", *SIZES, "--model", "tiny-dense"]
    options += ["--teacher", str(teacher), "--layout", layout, "--checkpoint-every", "1"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main([*options, "--steps", "2", "--run-dir", str(straight)]) == 0
    shutil.copytree(straight, stopped)
    Checkpoints(stopped / "checkpoints").drop_after(1)
    assert main(["--resume", "--run-dir", str(stopped)]) == 0
    assert metrics_of(stopped) == metrics_of(straight)
    # An advantage per token, with no reward in it; the checkpoint has a path and a hash.
    advantages = [line for line in metrics_of(straight) if "critic/advantages/max" in line]
    assert all(
        line["critic/advantages/max"] != line["critic/advantages/min"] for line in advantages
    )
    checkpoints = Checkpoints(straight / "checkpoints")
    record = checkpoints.meta(2)["networks"]["teacher"]
    assert record["path"] == str(teacher) and record["step"] == 1 and len(record["sha256"]) == 64
    tree = read_object(straight / "checkpoints/2/tree/metadata", "")
    assert not [name for name in tree if "teacher" in name]


@pytest.mark.slow
def test_logprobs_of_a_teacher_equal_its_own_network(tmp_path, teacher):
    """Of every sampled token, by the network and the weights of the teacher's run."""
    (tmp_path / "own.py").write_text(DISTILL)
    recipe = load_recipe(f"{tmp_path}/own.py:Distill")(
        teacher=str(teacher), prompts=2, group_size=2
    )
    run = RunConfig(task="sort", model="tiny-dense", warm_start_steps=0, eval_prompts=4)
    setup = build_setup(run, recipe)
    tokens = np.random.default_rng(0).integers(0, setup.tokenizer.vocab_size, (4, 24), np.int32)
    tokens[1::2, :16] = tokens[::2, :16]  # two completions of each prompt
    time = np.arange(24)[None]
    valid, mask = (
        np.broadcast_to(time >= 3, tokens.shape),
        np.broadcast_to(time >= 16, tokens.shape),
    )
    setup = replace(setup, prompt_length=16, response_length=8)
    assert setup.recipe.group_size == 2
    batch = jax.device_put(Batch(tokens, valid, mask), over_rows(setup.mesh))
    loaded, _ = load_network_files(setup.networks, setup.network_files)
    network = setup.networks.frozen["teacher"]
    result = _score_frozen(setup.networks, network, loaded["teacher"], batch)

    folder = RunFolder.read(teacher)
    config = network_of(preset("small", setup.tokenizer.vocab_size), run_of(folder))
    weights, _ = load_model(folder, Model(config, setup.mesh))
    logits = on_mesh(
        lambda *inputs: next_token_logits(*inputs, Model(config, setup.mesh))[0][None],
        setup.mesh,
        (P(), P(), P()),
        P(setup.mesh.axes),
    )
    assert config.d_model != setup.model.d_model
    expected = logits(weights, tokens, valid).reshape(4, 24, -1)
    expected = jax.nn.log_softmax(expected[:, :-1])
    expected = np.take_along_axis(np.asarray(expected), tokens[:, 1:, None], -1)[..., 0]
    difference = (np.asarray(result)[:, 1:] - expected)[mask[:, 1:]]
    assert np.max(np.abs(difference)) < 1e-4, difference


@pytest.mark.parametrize(
    ("role", "spec", "message"),
    [
        ("policy", NetworkSpec("x"), "the role is taken"),
        ("judge", NetworkSpec("x", trained=True), "critic of a recipe with uses_critic"),
        ("judge", NetworkSpec(layout="tp2"), "is for frozen networks from files"),
    ],
)
def test_networks_that_cannot_be_are_refused(role, spec, message):
    class Own(Grpo):
        networks = {role: spec}  # noqa: RUF012 - in place of a property, never changed

    with pytest.raises(ValueError, match=message):
        check_networks(Own(), 8)


def test_former_hooks_are_refused(tmp_path):
    source = "from dataclasses import dataclass\nfrom jrl.recipes import Grpo\n"
    source += (
        "@dataclass(frozen=True)\nclass Own(Grpo):\n    def entropy_statistics(self, b): ...\n"
    )
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ValueError, match=r"Own defines entropy_statistics.*write update_state"):
        load_recipe(f"{tmp_path}/own.py:Own")()
