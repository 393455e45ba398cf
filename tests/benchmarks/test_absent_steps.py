"""Steps that are compiled for absent devices: networks, and programs that rows share."""

import json
from pathlib import Path

import pytest

from benchmarks.absent import compilers, programs
from benchmarks.absent.descriptions import GPUS, TPUS
from benchmarks.gpu.networks import network
from benchmarks.gpu.shapes import DEEPSEEK_V3, MIXTRAL_8X22B, QWEN3_235B, QWEN3_A3B
from moe.counts import sizes_of
from sharding.folding import Layout
from sharding.planner.models import PRESETS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "absent.json"
NETWORKS = {
    "mixtral-8x22b": MIXTRAL_8X22B,
    "deepseek-v3": DEEPSEEK_V3,
    "qwen3-235b-a22b": QWEN3_235B,
    "qwen3-30b-a3b": QWEN3_A3B,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_sizes_that_the_planner_knows(name):
    assert sizes_of(network(NETWORKS[name])) == PRESETS[name]


def test_layouts_have_all_devices_and_divide_the_rows():
    for step in programs.STEPS:
        layout = Layout.parse(step.layout)
        if step.shape is not None:
            slices, hosts, devices = map(int, step.shape.split("x"))
            assert slices * hosts * devices == layout.num_devices, step.label
        assert step.rows % (layout.dp * step.micro_batches) == 0, step.label


def test_a_program_of_two_rows_is_compiled_once(monkeypatch, tmp_path):
    compiled = []

    def compile_for(kind, function, *given, keep, reads_kernels):
        compiled.append((keep, reads_kernels))
        return compilers.Program("", 1, 2, [], 3.0)

    monkeypatch.setattr(programs, "_COMPILED", {})
    monkeypatch.setattr(programs, "_update", lambda step: (len,))
    monkeypatch.setattr(compilers, "compile_for", compile_for)
    step = programs.SELECTED
    assert step in programs.STEPS
    # Without its kernels it is no row of `steps`.
    assert programs.compile_step(step, reads_kernels=False).seconds == 3.0
    assert programs.compile_step(step).seconds == 3.0
    assert programs.compile_step(step, reads_kernels=False).seconds == 0.0
    assert programs.compile_step(step._replace(title="the same")).seconds == 0.0
    assert programs.compile_step(step._replace(rows=32)).seconds == 3.0
    # Its kernels are in a folder then.
    assert programs.compile_step(step, tmp_path).seconds == 3.0
    assert compiled == [(None, False), (None, True), (None, True), (tmp_path, True)]


def test_committed_programs_fit_their_devices():
    rows = json.loads(RESULTS.read_text())["steps"]
    for row in rows:
        memory = (GPUS | TPUS)[row["device"]].memory
        assert 0 < row["arguments"] + row["temporaries"] < 0.9 * memory, row["program"]
