"""An update whose flags ask for overlap says so if its program has none."""

from dataclasses import dataclass
from typing import Any

import pytest

from jrl.report.warnings import FewWarnings
from jrl.trainer.learner import synchronous
from jrl.trainer.learner.synchronous import overlap_flags, warn_if_synchronous
from moe.config import ModelConfig
from moe.execution import Execution
from sharding.folding import FoldedMesh, Layout, fold_abstract

SYNCHRONOUS = """HloModule jit_update, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[64] {
  %x.1 = f32[8]{0} parameter(0)
  ROOT %gather = f32[64]{0} all-gather(%x.1), replica_groups={{0,1}}, dimensions={0}
}
"""
ASYNCHRONOUS = """HloModule jit_update, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[64] {
  %x.1 = f32[8]{0} parameter(0)
  %start = (f32[8]{0}, f32[64]{0}) all-gather-start(%x.1), replica_groups={{0,1}}, dimensions={0}
  ROOT %done = f32[64]{0} all-gather-done(%start)
}
"""


@dataclass(frozen=True)
class Objective:
    config: ModelConfig
    mesh: FoldedMesh


class Program:
    """A jitted function that is compiled to a given text, and counts how often."""

    def __init__(self, text):
        self.text, self.compiled = text, 0

    def lower(self, *args):
        return self

    def compile(self):
        self.compiled += 1
        return self

    def as_text(self):
        return self.text


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    monkeypatch.setattr(synchronous, "_CHECKED", set())
    monkeypatch.setattr(synchronous, "_WARNINGS", FewWarnings())


def said(capsys, text, platform="gpu", layout="dp2", **execution):
    """What is said of an update, and how often its program is compiled."""
    mesh = fold_abstract(Layout.parse(layout), platform)
    config = ModelConfig(vocab_size=16, execution=Execution(**execution))
    program: Any = Program(text)
    for _ in range(2):
        warn_if_synchronous(program, 1, Objective(config, mesh), "weights")
    return capsys.readouterr().err, program.compiled


def test_a_program_without_overlap_says_so_once(capsys):
    line, compiled = said(capsys, SYNCHRONOUS, two_batch_overlap=True, expert_chunks=2)
    assert line.count("\n") == 1 == compiled
    assert line.startswith("warning: --expert-chunks, --two-batch-overlap: the compiler overlaps n")


@pytest.mark.parametrize("text", [ASYNCHRONOUS, None])
def test_a_program_that_overlaps_or_has_no_text_says_nothing(text, capsys):
    assert said(capsys, text, overlap_grad_reduce=True) == ("", 1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"platform": "cpu", "two_batch_overlap": True},
        {"layout": "dp1", "two_batch_overlap": True},
    ],
)
def test_nothing_is_compiled_where_no_overlap_is_asked_for(given, capsys):
    assert said(capsys, SYNCHRONOUS, **given) == ("", 0)


def test_flags_that_ask_for_overlap():
    assert overlap_flags(Execution()) == []
    every = Execution(expert_chunks=2, two_batch_overlap=True, overlap_grad_reduce=True)
    assert len(overlap_flags(every)) == 3
