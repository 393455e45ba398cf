import json
import re
import shutil

import jax
import pytest
from command_runs import FLAGS, metrics, one_line

from jrl import evaluate, train
from jrl.runs import manifest
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.tasks import Verdict
from jrl.tasks.definition import ProceduralTask
from jrl.trainer import loop
from jrl.trainer.evaluation import evaluate as evaluating

# Shapes that training has compiled already: one completion of each of its held-out prompts.
AS_TRAINED = ["--k", "1", "--prompts", "4"]
# One size for all tests that ask for no other.
FOUR = ["--k", "4", "--prompts", "4"]


def verify_by_chance(task, examples, completions):
    """Verdicts that a policy which has learned nothing gets right about every other time."""
    odd = [sum(map(ord, completion)) % 2 for completion in completions]
    return [Verdict(1.0, "correct") if one else Verdict(0.0, "wrong") for one in odd]


@pytest.fixture(scope="module", autouse=True)
def _verifier(grpo_run):  # which is made before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProceduralTask, "verify", verify_by_chance)
        yield


@pytest.fixture(scope="module")
def run(_verifier, grpo_run, tmp_path_factory):
    """A run of two steps."""
    return shutil.copytree(grpo_run, tmp_path_factory.mktemp("evaluated") / "run")


@pytest.fixture
def by_chance(run, tmp_path):
    """The run with a third step whose evaluation is by chance."""
    path = shutil.copytree(run, tmp_path / "run")
    assert train.main(["--resume", "--run-dir", str(path), "--steps", "3"]) == 0
    return path


def results(run, tmp_path, *flags):
    assert evaluate.main([str(run), "--json", str(tmp_path / "out.json"), *flags]) == 0
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.slow
def test_what_was_sampled_on_two_sides_is_evaluated_on_one_mesh(run, tmp_path):
    copied = shutil.copytree(run, tmp_path / "run")
    config = json.loads((copied / "config.json").read_text())
    of_two_sides = {"rollout_split": "dp1 / ep1", "rollout_m2n": "collective", "rollout_replan": 4}
    config["run"] |= {"rollout_engine": "disaggregated", **of_two_sides}
    (copied / "config.json").write_text(json.dumps(config))
    found, as_before = (results(path, tmp_path, *AS_TRAINED) for path in (copied, run))
    assert {**found, "run": None} == {**as_before, "run": None}


def test_numbers_fit_together_and_are_printed(run, tmp_path, capsys):
    found = results(run, tmp_path, *FOUR)
    assert (found["step"], found["prompts"], found["k"], found["task"]) == (2, 4, 4, "sort")
    assert [name for name in found if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]
    assert found["pass@1"] == pytest.approx(found["accuracy/sampled"], abs=1e-12)
    assert 0 < found["pass@1"] < found["pass@2"] < found["pass@4"] <= 1
    reasons = {name: value for name, value in found.items() if name.startswith("verifier/")}
    assert sum(reasons.values()) == 16 and len(reasons) == 9
    assert found["verifier/correct"] == pytest.approx(16 * found["accuracy/sampled"])
    assert 1 <= found["response_length/mean"] <= 12
    out = capsys.readouterr().out
    begun = rf"evaluating {run} on sort\n16 completions of at most 12 tokens, 16 at a time "
    assert re.match(begun, out)
    sampled = r"^sampled: 0/16 .*\n(.*\n)*sampled: 16/16 completions, \d+ tokens, .* s\ngreedy: 0/4"
    assert re.search(sampled, out, re.M)
    assert re.search(r"^greedy: 4/4 completions, \d+ tokens, ", out, re.M)
    assert "grpo on sort, step 2" in out and "4 held-out prompts, 4 completions each" in out
    assert re.search(rf"greedy accuracy +{found['accuracy/greedy']:.3f}", out)
    assert re.search(r"pass@4 +[01]\.\d{3}", out)


@pytest.mark.slow
def test_greedy_is_what_training_measured(by_chance, tmp_path):
    found = results(by_chance, tmp_path, *AS_TRAINED)
    last = metrics(by_chance)[-1]
    assert found["accuracy/greedy"] == last["val/accuracy/greedy"]
    assert 0 < found["accuracy/greedy"] < 1  # or the line above says little


def test_a_seed_repeats_itself(run, tmp_path):
    first = results(run, tmp_path, *FOUR)
    assert results(run, tmp_path, *FOUR) == first
    other = results(run, tmp_path, *FOUR, "--seed", "1")
    assert other["response_length/mean"] != first["response_length/mean"]
    assert other["accuracy/greedy"] == first["accuracy/greedy"]


@pytest.mark.slow
def test_temperature_0_is_greedy(run, tmp_path):
    found = results(run, tmp_path, *FOUR, "--temperature", "0")
    assert found["score/sampled"] == found["score/greedy"]
    assert found["pass@4"] == found["accuracy/greedy"]
    assert found["temperature"] == 0.0


@pytest.mark.slow
def test_devices_change_no_prompt(run, tmp_path):
    whole = results(run, tmp_path, *AS_TRAINED)
    parts = results(run, tmp_path, *AS_TRAINED, "--layout", "dp2")
    assert parts["accuracy/greedy"] == whole["accuracy/greedy"]
    assert sum(value for name, value in parts.items() if name.startswith("verifier/")) == 4


@pytest.mark.slow
def test_a_run_that_learned_on_other_devices_can_be_evaluated(run, tmp_path):
    """What it computed by may be what a CPU has not."""
    elsewhere = shutil.copytree(run, tmp_path / "elsewhere")
    config = json.loads((elsewhere / "config.json").read_text())
    config["run"] |= {"dispatch": "ragged", "experts": "mosaic", "attention": "cudnn"}
    (elsewhere / "config.json").write_text(json.dumps(config))
    found, own = (results(path, tmp_path, *AS_TRAINED) for path in (elsewhere, run))
    assert found["accuracy/greedy"] == own["accuracy/greedy"]
    assert found["response_length/mean"] == own["response_length/mean"]


def test_k_itself_is_always_among_the_ks():
    assert list(evaluating._powers_up_to(1)) == [1]
    assert list(evaluating._powers_up_to(6)) == [1, 2, 4, 6]
    assert list(evaluating._powers_up_to(8)) == [1, 2, 4, 8]


def test_pass_at_k_counts_by_prompt(run, tmp_path, monkeypatch):
    """Of the completions of the four prompts 0, 1, 2 and 3 are right."""

    def verify(self, examples, completions):
        # Whatever the order in which they come: the first n answers to the n-th prompt are right.
        verdicts = []
        for example in examples:
            given[example.prompt] = given.get(example.prompt, 0) + 1
            right = given[example.prompt] <= prompts.index(example.prompt)
            verdicts.append(Verdict(1.0, "correct") if right else Verdict(0.0, "wrong"))
        return verdicts

    heldout, given, prompts = ProceduralTask.heldout, {}, []

    def drawn(self, index):
        prompts.append(heldout(self, index).prompt)
        return heldout(self, index)

    monkeypatch.setattr(ProceduralTask, "heldout", drawn)
    monkeypatch.setattr(ProceduralTask, "verify", verify)
    found = results(run, tmp_path, *FOUR)
    assert len(set(prompts)) == 4
    assert found["pass@1"] == pytest.approx(6 / 16)
    # 1 - C(4 - c, 2) / C(4, 2) for c = 0 to 3.
    assert found["pass@2"] == pytest.approx((0 + 3 / 6 + 5 / 6 + 1) / 4)
    assert found["pass@4"] == pytest.approx(3 / 4)
    # The spread of 0, 1/4, 2/4, 3/4 over the root of 4.
    assert found["accuracy/sampled/standard_error"] == pytest.approx((5 / 64) ** 0.5 / 4**0.5)


def test_nothing_is_written_into_the_run(run):
    before = sorted(path for path in run.rglob("*"))
    assert evaluate.main([str(run), *FOUR]) == 0
    assert sorted(path for path in run.rglob("*")) == before


def test_a_run_that_is_being_written_can_be_evaluated(run, tmp_path):
    with RunFolder.resume(run):
        assert results(run, tmp_path, *FOUR)["step"] == 2


def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_the_next(run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "copy")

    def copy_to(step):
        folder = shutil.copytree(copy / "checkpoints" / "2", copy / "checkpoints" / str(step))
        manifest.write(folder, step)

    copy_to(4)
    restore = Checkpoints.restore

    def late(self, step, *arguments, **options):
        if step == 4:
            shutil.rmtree(copy / "checkpoints" / "4")
            copy_to(5)
        return restore(self, step, *arguments, **options)

    monkeypatch.setattr(Checkpoints, "restore", late)
    assert results(copy, tmp_path, *FOUR)["step"] == 5


def test_a_run_without_a_checkpoint_says_so(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", interrupt)
    train.main([*FLAGS, "--run-dir", str(tmp_path / "young")])
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "young")]) == 2
    assert re.search("young has no checkpoint yet: the first", one_line(capsys.readouterr()))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--k 0", "k=0 must be at least 1"),
        ("--prompts 0", "prompts=0 must be at least 1"),
        ("--slots 0", "slots=0 must be at least 1"),
        ("--verifiers 0", "verifiers=0 must be at least 1"),
        ("--show -1", "show=-1 must be at least 0"),
        ("--tokenizer a.json", "tokenizer='a.json' is only for a published checkpoint; "),
        ("--held-out 2.5", "held_out=2.5 must be a share between 0 and 1"),
        ("--prompt-field q", "prompt_field='q' needs --task jsonl:FILE, not 'sort'"),
        ("--samples /dev/null/folder/a.jsonl", "/dev/null"),
        ("--devices 0", "devices=0 must be at least 1"),
        ("--devices -4", "devices=-4 must be at least 1"),
        ("--seed -1", "seed=-1 must lie in 0..4294967295"),
        ("--seed 4294967296", "seed=4294967296 must lie in 0..4294967295"),
        ("--temperature -1", "temperature=-1.0 is negative"),
        ("--temperature nan", "temperature=nan must be a finite number"),
        ("--temperature inf", "temperature=inf must be a finite number"),
        ("--top-k 0", "top_k=0 keeps no token"),
        ("--top-p nan", "top_p=nan must be a finite number"),
        ("--layout dp32", "layout 'dp32' needs 32 devices"),
        ("--json /dev/null/folder.json --k 1 --prompts 4", "/dev/null: "),
    ],
)
def test_wrong_input_is_one_line_at_once(run, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(evaluating, "evaluate", lambda *_, **__: pytest.fail("it was evaluated"))
    assert evaluate.main([str(run), *flags.split()]) in (1, 2)
    assert message in one_line(capsys.readouterr())


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    assert evaluate.main([str(tmp_path)]) == 2
    assert "holds no run (config.json is missing)" in one_line(capsys.readouterr())


def test_a_configuration_that_was_tampered_with_is_one_line(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["run"]["stepz"] = config["run"].pop("steps")
    (copy / "config.json").write_text(json.dumps(config))
    assert evaluate.main([str(copy)]) == 2
    assert "unknown run.stepz" in one_line(capsys.readouterr())
    (copy / "config.json").write_text("{")
    assert evaluate.main([str(copy)]) == 2
    assert "config.json is not JSON" in one_line(capsys.readouterr())


def test_help_explains_every_flag(capsys):
    with pytest.raises(SystemExit, match="0"):
        evaluate.main(["--help"])
    out = capsys.readouterr().out
    for flag in ("--k", "--prompts", "--temperature", "--seed", "--layout", "--devices", "--json"):
        assert flag in out
    assert jax.device_count() == 16
