"""Steps that are compiled for absent devices: networks, and programs that rows share."""

import json
import math
from pathlib import Path

import jax
import pytest

from benchmarks.absent import compilers, disaggregated, programs, steps
from benchmarks.absent.descriptions import GPUS, TPUS
from benchmarks.absent.report import memory_of
from benchmarks.absent.selection import Selection
from benchmarks.gpu.networks import network
from benchmarks.gpu.shapes import DEEPSEEK_V3, MIXTRAL_8X22B, QWEN3_235B, QWEN3_A3B, SMALL_MOE
from moe.disaggregated.split import Split
from moe.planner.models import PRESETS, sizes_of
from sharding.folding import Layout

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
    for step in steps.STEPS:
        if step.kind in steps.DISAGGREGATED:
            split = Split.parse(step.layout)
            # Each device has its rows of each micro-batch.
            devices, ranks = split.num_devices, split.attention_layout.num_devices
        else:
            layout = Layout.parse(step.layout)
            devices, ranks = layout.num_devices, layout.dp
        if step.shape is not None:
            sizes = map(int, step.shape.removeprefix("v5p:").split("x"))
            assert math.prod(sizes) == devices, step.label
        assert step.rows % (ranks * step.micro_batches) == 0, step.label


def test_rows_have_names_of_their_own():
    labels = [step.label for step in steps.STEPS]
    assert len(labels) == len({*labels})


TWO_HEADS = SMALL_MOE | {"num_kv_heads": 2}
SPLIT = steps.Step("cpu", None, "tp2 dp2 / ep2 etp2", "small", TWO_HEADS, {}, rows=16)


@pytest.fixture
def fake_devices(monkeypatch):
    monkeypatch.setattr(compilers, "devices", lambda kind, shape: jax.devices()[:8])


@pytest.mark.slow
def test_bytes_of_a_half_are_those_of_its_whole_group(fake_devices):
    inputs = {"micro_batches": 2, "prompt": 4, "response": 12}
    for kind in steps.OF_DECODING:
        half = disaggregated.half_of(SPLIT._replace(kind=kind, **inputs))
        serving, *_, received = half.operands
        in_flight = 2 * disaggregated._bytes(received)
        weights = disaggregated.side_bytes_of(serving)[kind not in steps.OF_ATTENTION]
        if kind in steps.OF_ATTENTION:
            _, _, layer, _, cache, state, _, _ = half.operands
            in_flight += 2 * disaggregated._bytes(state)
            weights += 2 * disaggregated._bytes(cache)
            here = disaggregated._bytes((layer.layer, cache, state, received))
        else:
            here = disaggregated._bytes(half.operands[1:])
        assert half.others + here == weights + in_flight


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*steps.DISAGGREGATED, steps.PREFILL, steps.DECODING])
def test_a_program_of_serving_takes_the_arrays_of_its_row(kind, fake_devices):
    step = SPLIT._replace(kind=kind, micro_batches=2, prompt=4, response=12)
    if kind in steps.DISAGGREGATED:
        function, operands, _ = disaggregated.half_of(step)
    else:
        build = {steps.PREFILL: programs._prefill, steps.DECODING: programs._decoding}[kind]
        function, *operands = build(step._replace(layout="tp2 dp4 / ep4"))
    function.trace(*operands)


def test_the_planner_predicts_the_bytes_of_decoding():
    named = {step.title: step for step in steps.STEPS if step.device == "h100"}
    experts = 3 * 6144 * 16384 * 8 * 56
    attention = PRESETS["mixtral-8x22b"].parameters - experts
    # Keys and values of 8 heads of 128 for each of 2,048 tokens; all in bfloat16.
    row = 2 * 2 * 8 * 128 * 2048 * 56
    expected = {
        # "dp128 / ep8", 32 rows of a device.
        "decoding": 2 * attention + 2 * experts / 8 + 32 * row,
        # "tp2 dp8 / ep8 etp2", 240 rows of a node.
        "attention of decoding": (2 * attention + 240 * row) / 2,
        "experts of decoding": 2 * experts / 16,
    }
    for kind, size in expected.items():
        assert programs.predicted_bytes(named[f"Mixtral-8x22B, {kind}"]) == pytest.approx(size)
    # The latent vectors are on each tp rank: 128 rows of a dp rank, and 256 on other devices.
    row = 2 * (512 + 64) * 2048 * 61
    sizes = PRESETS["deepseek-v3"]
    experts = 58 * sizes.expert_parameters
    rest = 2 * (sizes.parameters - experts) / 4
    predicted = {kind: programs.predicted_bytes(named[f"DeepSeek-V3, {kind}"]) for kind in expected}
    assert predicted == pytest.approx(
        {
            "decoding": rest + 2 * experts / 64 + 128 * row,
            "attention of decoding": rest + 256 * row,
            "experts of decoding": 2 * experts / 32,
        }
    )
    dense = named["Qwen3-0.6B, decoding"]
    row = 2 * 2 * 8 * 128 * 2048 * 28
    weights = 2 * sizes_of(network(dense.sizes)).parameters
    assert programs.predicted_bytes(dense) == pytest.approx(weights + 256 * row)


def test_a_program_of_two_rows_is_compiled_once(monkeypatch, tmp_path):
    compiled = []

    def compile_for(kind, function, *given, keep, reads_kernels, options):
        compiled.append((keep, reads_kernels))
        return compilers.Program("", 1, 2, ["a kernel"] if reads_kernels else [], 3.0)

    monkeypatch.setattr(programs, "_COMPILED", {})
    monkeypatch.setattr(programs, "_update", lambda step: (len,))
    monkeypatch.setattr(compilers, "compile_for", compile_for)
    step = steps.SELECTED
    assert step in steps.STEPS
    assert programs.compile_step(step, reads_kernels=False).seconds == 3.0
    # Its kernels were not read.
    assert programs.compile_step(step).seconds == 3.0
    assert programs.compile_step(step, reads_kernels=False).seconds == 0.0
    assert programs.compile_step(step._replace(title="the same")).seconds == 0.0
    assert programs.compile_step(step._replace(rows=32)).seconds == 3.0
    # Its kernels are in a folder then.
    assert programs.compile_step(step, tmp_path).seconds == 3.0
    assert compiled == [(None, False), (None, True), (None, True), (tmp_path, True)]


def test_programs_of_few_layers_are_compiled_quick_or_by_name(monkeypatch):
    read = []

    def compile_step(step, keep, *, reads_kernels):
        read.append((step.title, reads_kernels))
        raise ValueError("no compiler")

    def titles(names, *, quick):
        rows = programs.steps(Selection(names), quick=quick, keep=None)
        return [row["program"] for row in rows]

    monkeypatch.setattr(programs, "compile_step", compile_step)
    few, full = "Qwen3-30B-A3B, 2 layers, kernels", "Qwen3-30B-A3B"
    assert titles([], quick=True) == [few, "Qwen3-30B-A3B, 1 layer"]
    assert titles(["h100"], quick=True) == [few]
    assert titles(["2 layers"], quick=False) == [few]
    assert all(reads_kernels for _, reads_kernels in read)
    read.clear()
    assert few not in titles([], quick=False) and (full, False) in read


def test_committed_programs_fit_their_devices():
    rows = json.loads(RESULTS.read_text())["steps"]
    for row in rows:
        memory = (GPUS | TPUS)[row["device"]].memory
        assert 0 < memory_of(row) < 0.9 * memory, row["program"]


def test_committed_programs_match_predicted_memory():
    """Within 5%, on GPUs."""
    rows = json.loads(RESULTS.read_text())["steps"]
    compared = [
        memory_of(row) / row["predicted"]
        for row in rows
        if "predicted" in row and row["device"] in GPUS
    ]
    assert len(compared) >= 15
    assert all(0.95 < ratio < 1.05 for ratio in compared), compared
