"""A recipe of one file with a network of another width, whose log-probabilities it receives."""

import shutil

import pytest
from small_runs import metrics_of

from jrl.recipes import Grpo, NetworkSpec
from jrl.recipes.load import load_recipe
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.records import read_object
from jrl.train import main
from jrl.trainer.evaluation.network_files import check_networks

DISTILL = '''
from dataclasses import dataclass
import jax.numpy as jnp
from jrl.recipes import NetworkSpec, Recipe, Targets

@dataclass(frozen=True)
class Distill(Recipe):
    """The advantage of a token is how much likelier it is under the teacher."""
    teacher: str = ""
    "Run folder or checkpoint of the teacher."

    @property
    def networks(self):
        return {**super().networks, "teacher": NetworkSpec(self.teacher)}

    def targets(self, batch):
        gain = batch.logprobs["teacher"] - batch.old_logprobs
        return Targets(jnp.where(batch.mask, gain, 0.0))
'''
SIZES = [
    *("--task", "sort", "--prompts", "4", "--group-size", "2"),
    *("--warm-start-steps", "1", "--eval-prompts", "4"),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    assert main(["grpo", *SIZES, "--model", "tiny", "--steps", "1", "--run-dir", str(folder)]) == 0
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
        networks = {role: spec}  # noqa: RUF012

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
