"""Settings of a run as the planner reads them."""

from dataclasses import replace

import pytest

from moe.execution import Execution
from moe.planner.cost import System
from moe.planner.method import Method, for_tokens, for_weights, with_fields
from moe.planner.models import PRESETS
from moe.planner.search import Choices, Plan, best_plan
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout

RAGGED = Method(Execution(dispatch="ragged"))
DEEPEP = replace(RAGGED, deepep_block=2)


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        (Method(), {}, ("all_gather", "gather", False)),
        (RAGGED, {"context": "ring", "remat": "full"}, ("ragged", "ring", False)),
        (RAGGED, {"dispatch": "deepep"}, ("deepep", "gather", False)),
        (DEEPEP, {"storage": "mixed"}, ("deepep", "gather", False)),
        (DEEPEP, {"dispatch": "all_to_all"}, ("all_to_all", "gather", False)),
        (RAGGED, {"reshards": True}, ("ragged", "gather", True)),
        (RAGGED, {"fsdp": True, "remat": "full"}, ("ragged", "gather", True)),
    ],
)
def test_with_fields_changes_the_method_or_its_execution(method, changes, expected):
    changed = with_fields(method, **changes)
    assert (changed.dispatch, changed.context, changed.fsdp) == expected


@pytest.mark.parametrize("block", [1, 2])
def test_with_fields_keeps_the_block_of_deepep(block):
    assert with_fields(replace(RAGGED, deepep_block=block), dispatch="deepep").deepep_block == block


@pytest.mark.parametrize("name", ["storage", "gradient_wire", "mu_dtype"])
def test_method_refuses_unknown_value(name):
    with pytest.raises(ValueError, match=f"{name}='float7' is not known: use .*float32"):
        Method(**{name: "float7"})


def test_cache_keys_keep_fields_of_their_purpose():
    execution = Execution(remat="full", fsdp=True, overlap_grad_reduce=True)
    method = Method(execution, mu_dtype="bfloat16", even=True)
    assert for_weights(method) == Method(
        Execution(overlap_grad_reduce=True), reshards=True, mu_dtype="bfloat16"
    )
    kept = Execution(remat="full", fsdp=True)
    assert for_tokens(method) == Method(kept, even=True)


@pytest.mark.parametrize(("method", "remats"), [("execution", {"full"}), ("reshards", {"none"})])
def test_search_leaves_out_remats_that_execution_refuses(method, remats):
    """`Execution.fsdp` needs a rematerialisation, FSDP of other systems does not."""
    given = {
        "execution": Method(Execution(fsdp=True, remat="full"), storage="bfloat16"),
        "reshards": Method(reshards=True, storage="bfloat16"),
    }[method]
    model, layout, h100 = PRESETS["qwen3-30b-a3b"], Layout.parse("dp16 / ep8"), HARDWARE["h100"]
    choices = Choices(storage=("bfloat16",), remat=("none", "full"), micro_rows=(1,))
    plan = best_plan(model, layout, 16, 1024, h100, given, System(), choices)
    assert isinstance(plan, Plan)
    assert {plan.method.execution.remat} == remats
