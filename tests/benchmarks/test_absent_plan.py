"""Layouts of the planner as updates that are compiled."""

from types import SimpleNamespace

import pytest

from benchmarks.absent import compilers
from benchmarks.absent.plan import COLUMNS, check, main, network_fields, row_of, step_of, topology
from moe.execution import Execution
from moe.planner.cost import System, cost
from moe.planner.memory import memory
from moe.planner.method import Batch, Method
from moe.planner.models import PRESETS
from moe.planner.search import Plan
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout

ARGS = SimpleNamespace(program="jrl", hardware="h100x8")


@pytest.fixture
def plan():
    model, layout = PRESETS["qwen3-30b-a3b"], Layout.parse("cp2 dp2 pp2 vpp2 / ep4")
    batch = Batch(64, 2048, 2)
    execution = Execution(dispatch="all_to_all", context="ring", remat="full")
    method = Method(execution, storage="bfloat16", gradient_wire="bfloat16")
    times = cost(model, layout, batch, method, HARDWARE["h100"], System())
    return Plan(layout, batch, method, times, memory(model, layout, batch, method))


@pytest.mark.parametrize("name", PRESETS)
def test_every_published_network_can_be_compiled(name):
    """Its fields describe a network of the same sizes."""
    result = network_fields(name, PRESETS[name], ())
    assert result["num_layers"] == PRESETS[name].num_layers
    assert "execution" not in result


def test_an_update_has_the_settings_of_its_plan(plan):
    step = step_of(plan, "a network", {}, "h100", "1x1x8", 2048)
    assert (step.layout, step.rows, step.micro_batches) == (str(plan.layout), 64, 16)
    assert step.prompt + step.response == 2048
    assert step.execution["context"] == "ring" and step.execution["remat"] == "full"
    expected = {"mu_dtype": "float32", "gradient_wire": "bfloat16", "dispatch": "all_to_all"}
    assert step.run == expected


def test_a_row_has_the_plan_and_its_program(plan):
    figures = {"bytes": 40e9, "exposed": 0.5, "launches": 1234, "seconds": 61.4}
    cells = row_of(plan, figures)
    assert len(cells) == len(COLUMNS)
    assert cells[1] == f"{plan.memory.total / 1e9:.3g} GB"
    assert cells[2:] == ["40 GB", f"{plan.cost.exposed:.3g} s", "0.5 s", "1,234", "61"]
    refused = row_of(plan, {"error": "no memory"})
    assert len(refused) == len(COLUMNS) and "no memory" in refused


def test_clusters_are_whole_servers():
    assert topology("h100", 8, 4) == "1x1x4"
    assert topology("h100", 8, 128) == "1x16x8"
    assert topology("v5p", 8960, 8) is None
    with pytest.raises(ValueError, match=r"h100x12 is no whole number of servers of 8"):
        topology("h100", 8, 12)
    with pytest.raises(ValueError, match=r"TPUs are compiled for in eights, v5px8"):
        topology("v5p", 8960, 16)


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({"program": "megatron-core"}, "h100", "--program megatron-core is not compiled"),
        ({"hardware": "a100x8"}, "a100", "--hardware a100x8 is not compiled for: choose among"),
    ],
)
def test_compile_plan_refuses_unsupported_plans(changes, device, message):
    with pytest.raises(ValueError, match=message):
        check(SimpleNamespace(**{**vars(ARGS), **changes}), device)


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(compilers, "prepare", lambda: None)
    monkeypatch.setattr(compilers, "installed", lambda package: None)
    assert main(["qwen3-30b-a3b", "--hardware", "h100x8"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("no compiler for cuda: jax-cuda13-plugin, ")
    assert error.count("\n") == 1
