"""The plan of a server: the best there is, and what is known of published systems."""

from dataclasses import replace

import pytest

from benchmarks.planner.serving.plan import DevicePair, Load, Server
from benchmarks.planner.serving.search import Space, best_serving_plan, plans, search
from benchmarks.planner.serving.times import MEMORY_EFFICIENCY, Times
from moe.planner.models import PRESETS, ModelSizes
from moe.planner.search import MEMORY_FRACTION
from sharding.costs.hardware import HARDWARE, LINK_EFFICIENCY
from tests.oracles.serving import best_plan

SMALL = ModelSizes(
    num_layers=6,
    d_model=1024,
    num_heads=12,
    num_kv_heads=4,
    head_dim=96,
    vocab_size=1000,
    num_experts=10,
    experts_per_token=3,
    d_expert=1408,
)
H20, L40S = HARDWARE["h20"], HARDWARE["l40s"]
# Memories that hold some dozens of sequences, so that everything can be tried.
ATTENTION = replace(H20, memory=1.1e9, outside=30e9)
EXPERTS = replace(L40S, memory=0.9e9)
SPACE = Space((1, 2, 8), (1, 2), (1, 2), (2, 3, 4), 4)
NARROW = Space((1, 2), (1, 2), (1,), (3, 4), 32)
CASES = {
    "memory": Load(slo=0.05, prompt=900, completion=90),
    "time": Load(slo=0.0009, prompt=500, completion=31),
    "short time": Load(slo=0.0006, prompt=500, completion=31),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outside", [0.01e9, 2e9, 12.5e9, 40e9])
def test_the_search_finds_what_trying_everything_finds(case, outside):
    experts = replace(EXPERTS, outside=outside)
    pair = DevicePair(ATTENTION, experts, (1.85, 1.08), efficiency=0.5)
    tried = best_plan(
        SMALL, CASES[case], pair, SPACE, MEMORY_FRACTION, LINK_EFFICIENCY, MEMORY_EFFICIENCY
    )
    found = best_serving_plan(SMALL, CASES[case], pair, SPACE)
    if outside < 0.1e9:  # nothing hides what it sends
        assert found is None
        assert tried == (0.0,)
        return
    assert found is not None
    shape = found.shape
    sizes = (shape.tp_attention, shape.attention_nodes, shape.tp_experts, shape.experts_of_node)
    assert found.per_cost == pytest.approx(tried[0], rel=1e-9)
    assert (*sizes, shape.micro_batches, found.batch) == tried[1:]


def test_the_cases_end_at_each_limit():
    limits = set()
    for load in CASES.values():
        for outside in (2e9, 40e9):
            pair = DevicePair(ATTENTION, replace(EXPERTS, outside=outside), efficiency=0.5)
            limits |= {plan.limit for plan in plans(SMALL, load, pair, SPACE)}
    assert limits == {"memory", "time between tokens", "communication"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x22b", "dbrx", "scaled-moe"])
def test_attention_on_h20_with_experts_on_l40s_gives_most_for_its_price(name):
    pairs = [DevicePair(a, e, (a.price, e.price)) for a in (H20, L40S) for e in (H20, L40S)]
    found = search(PRESETS[name], Load(), pairs, Space(experts_of_node=(1, 2), most_nodes=32))
    assert [(found[0].pair.attention.name, found[0].pair.experts.name)] == [("h20", "l40s")]
    # The paper's balance is the number of nodes found.
    assert found[0].shape.attention_nodes == round(found[0].balance)
    assert found[0].shape.experts_of_node == 1  # as in the paper
    assert found[0].shape.micro_batches in (3, 4)


def test_measured_times_take_the_place_of_the_roofline():
    slow = Times(0.0, 0.0, 4e-6, 1e-4)
    pair = DevicePair(ATTENTION, EXPERTS, profiled=({2: slow}, {1: slow}))
    server = Server(SMALL, Load(), pair, 2, 1, 1)
    attention, experts, _ = server.layer_times(10, 5)
    assert attention == pytest.approx(1.4e-4)
    assert experts == pytest.approx(4e-6 * 10 * 5 * 3 / 10 + 1e-4)
    assert server.balance() == pytest.approx(10 / 3)  # k1 E / (k3 K)
    # Only for nodes of the size that was measured.
    assert Server(SMALL, Load(), pair, 1, 1, 1).attention != slow
    assert Server(SMALL, Load(), pair, 2, 1, 2).experts != slow


def test_sequences_are_conserved_and_memory_is_kept():
    pair = DevicePair(H20, L40S, (1.85, 1.08))
    model, load = PRESETS["scaled-moe"], Load()
    plan = best_serving_plan(model, load, pair, NARROW)
    assert plan is not None
    shape = plan.shape
    server = Server(model, load, pair, shape.tp_attention, shape.tp_experts, shape.experts_of_node)
    rows = server.rows_of_node(plan.batch, shape.attention_nodes)
    assert plan.batch * shape.micro_batches * shape.attention_nodes == plan.sequences
    assert rows * shape.micro_batches * 32 / 4 == pytest.approx(plan.sequences)
    held = 4 * shape.micro_batches * plan.batch * load.cached * model.d_model * 48 / 8
    weights = 2 * (model.parameters - 48 * model.expert_parameters)
    assert held + weights < MEMORY_FRACTION * H20.memory * shape.tp_attention
    assert (
        held / plan.batch * (plan.batch + 1) + weights
        >= MEMORY_FRACTION * H20.memory * shape.tp_attention
    )


def test_prompts_by_turns_cost_time_and_on_a_group_devices():
    pair, model = DevicePair(H20, L40S, (1.85, 1.08)), PRESETS["dbrx"]
    found = {
        place: best_serving_plan(model, Load(), pair, replace(NARROW, prefill=(place,)))
        for place in ("elsewhere", "group", "turns")
    }
    elsewhere, group, turns = found["elsewhere"], found["group"], found["turns"]
    assert elsewhere and group and turns
    assert group.devices[2] > 0 == elsewhere.devices[2] == turns.devices[2]
    assert group.cost > sum(group.devices[:2])
    # What is read in between is in the time between tokens.
    shape = turns.shape
    server = Server(model, Load(), pair, shape.tp_attention, shape.tp_experts, 1)
    apart = server.step(turns.batch, shape.attention_nodes, shape.micro_batches, "elsewhere")
    read = turns.token_latency - apart[0]
    tokens = turns.sequences / Load().completion * Load().prompt
    flops = 2 * (model.attention_parameters + model.d_model * 16) + 2 * 6144 * Load().prompt
    of_attention = tokens * 40 * flops / (shape.attention_nodes * shape.tp_attention)
    flops = 4 * 6 * model.d_model * model.d_expert
    of_experts = tokens * 40 * flops / (16 * shape.tp_experts)
    sent = 2 * 4 * 6144 * tokens * 40 / (16 * shape.tp_experts * L40S.outside * LINK_EFFICIENCY)
    assert read == pytest.approx(
        max(of_attention / (0.6 * H20.peak), of_experts / (0.6 * L40S.peak), sent)
    )
    assert max(group.per_cost, turns.per_cost) < elsewhere.per_cost
    both = best_serving_plan(model, Load(), pair, replace(NARROW, prefill=("group", "turns")))
    assert both is not None
    assert both.per_cost == max(group.per_cost, turns.per_cost)
    # Without prompts worth mentioning there is nothing to pay for.
    short = Load(prompt=1, completion=650, context=650)
    free = [
        best_serving_plan(model, short, pair, replace(NARROW, prefill=(place,))) for place in found
    ]
    assert free[0] and free[1] and free[2]
    assert free[1].per_cost == pytest.approx(free[0].per_cost, rel=0.01)
    assert free[2].per_cost == pytest.approx(free[0].per_cost, rel=0.01)


def test_a_cluster_is_a_limit():
    pair = DevicePair(HARDWARE["a800"], HARDWARE["a800"])
    model = PRESETS["scaled-moe"]
    free = best_serving_plan(model, Load(), pair, NARROW)
    tight = best_serving_plan(model, Load(), pair, replace(NARROW, most_devices=40))
    assert free and tight
    assert sum(tight.devices) <= 40 < sum(free.devices)
    assert tight.per_device < free.per_device


@pytest.mark.parametrize(
    ("model", "load", "space", "words"),
    [
        (replace(SMALL, num_experts=0, d_ff=8), Load(), Space(), "a dense model has no experts"),
        (replace(SMALL, num_dense_layers=1, dense_d_ff=8), Load(), Space(), "num_dense_layers=1"),
        (SMALL, Load(slo=1e-6), SPACE, "no plan on h20:l40s keeps 0.001 ms between tokens"),
        (SMALL, Load(), Space(experts_of_node=(3,)), "experts_of_node=3 does not divide the 10"),
    ],
)
def test_what_has_no_answer_is_refused(model, load, space, words):
    with pytest.raises(ValueError, match=words):
        search(model, load, [DevicePair(H20, L40S)], space)


def test_a_load_must_be_above_zero():
    with pytest.raises(ValueError, match=r"slo=0.0 must be above 0"):
        Load(slo=0.0)
    with pytest.raises(ValueError, match=r"context=-1 must be above 0"):
        Load(context=-1)
