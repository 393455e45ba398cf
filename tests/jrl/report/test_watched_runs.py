"""The look-out in runs as they go: silent if exact answers alone have full marks, and raised
if a completion need only begin with the answer."""

import pytest
from small_runs import (
    Largest,
    begin_or_go_on,
    metrics_of,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.recipes import RECIPES
from jrl.report import suspicion
from jrl.report.page import page_data
from jrl.runs.folder import RunFolder
from jrl.runs.records import read
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.task import CORRECT, Verdict


class Exact(Largest):
    """Half for a completion that begins with the answer, all for the answer."""

    def reward(self, prompt, completion, *, answer):
        verdict = super().reward(prompt, completion, answer=answer)
        inexact = verdict == CORRECT and completion != answer
        return Verdict(0.5, "partial") if inexact else verdict


def watched(name, definition, path, *, warm=40, steps=20):
    """The steps of a run that has learned a little before."""
    never = {"eval_every": 99, "checkpoint_every": 99, "samples_every": 99}
    run = small_run(steps=steps, warm_start_steps=warm, **never)
    task = ProceduralTask("largest", run.seed, definition)
    begin_or_go_on(small_setup(small_recipe(name), run, task=task), path)
    return [line for line in metrics_of(path) if suspicion.SCORE in line]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_learns_exact_answers_is_not_suspicious(name, tmp_path):
    lines = watched(name, Exact(), tmp_path / "run")
    assert len(lines) >= suspicion.BEFORE + suspicion.NOW + 10
    # A second reader gives full marks to what the verifier gives them, and there are some.
    assert max(float(line[suspicion.SHARED]) for line in lines) > 0
    assert {line[suspicion.DISPUTED] for line in lines} == {"0.0"}
    assert {line[suspicion.NAME] for line in lines} == {"0.0"}


@pytest.mark.slow
def test_a_verifier_that_reads_the_beginning_alone_is_found_out(tmp_path, capsys):
    lines = watched("grpo", Largest(), tmp_path / "run", warm=20, steps=40)
    raised = [line for line in lines if line[suspicion.NAME] == "1.0"]
    assert raised and float(raised[0][suspicion.DISPUTED]) > 0
    folder = RunFolder.read(tmp_path / "run")
    result = [line for line in read(folder.samples_path) if line["kind"] == "suspicious"]
    assert result and all(line["score"] == 1 for line in result)
    assert any(line["completion"] != line["answer"] for line in result)
    first = page_data([folder])["runs"][0]["suspicion"]
    assert first["step"] == result[0]["step"] and "a second verifier" in first["reasons"][0]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("Check its samples of kind suspicious") == 1
