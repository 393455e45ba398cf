"""What a layer's collectives take, whatever layout was asked for before."""

from dataclasses import replace

import pytest

from moe.execution import Execution
from moe.planner import communication, volumes
from moe.planner.method import Batch, Method, for_tokens, with_fields
from moe.planner.models import ModelSizes
from moe.planner.search import layouts
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout

MODEL = ModelSizes(
    num_layers=12,
    d_model=96,
    num_heads=24,
    num_kv_heads=12,
    head_dim=8,
    vocab_size=120,
    num_experts=24,
    experts_per_token=2,
    d_expert=48,
    d_ff=48,
)
IN_PARTS = Method(
    Execution(context="ulysses", remat="selective", two_batch_overlap=True, expert_chunks=2)
)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [16, 24])
@pytest.mark.parametrize(
    "method",
    [
        Method(),
        Method(
            Execution(dispatch="all_to_all", context="ring", remat="selective"), storage="mixed"
        ),
        pytest.param(
            with_fields(IN_PARTS, dispatch="ragged", even=True, activation_wire="float8_e4m3fn"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layer_times_equal_its_collectives_on_the_full_layout(devices, method):
    """Whatever layout was asked for before."""
    hardware, batch = replace(HARDWARE["a100"], domain=4), Batch(24, 96, micro_rows=3)
    for layout in layouts(devices):
        forward, backward = volumes.layer(MODEL, layout, batch, method)
        expected = [(one.what, one.seconds(layout, hardware)) for one in [*forward, *backward]]
        found = communication.layer_times(MODEL, layout, batch, method, hardware)
        assert sorted(found) == sorted(expected), layout
        ends = volumes.embedding(MODEL, layout, batch.local_tokens(layout), method)
        ends += volumes.head(MODEL, layout, batch.local_tokens(layout), method)
        ends += volumes.row_reordering(MODEL, layout, batch, method)
        expected = [(one.what, one.seconds(layout, hardware)) for one in ends]
        assert (
            list(communication.embed_and_head_times(MODEL, layout, batch, method, hardware))
            == expected
        ), layout


def test_groups_that_lie_as_they_do_alone_are_asked_for_once():
    attention, experts = Layout.parse("tp2 cp2"), Layout.parse("dp8 / ep4 etp2")
    for text in ("tp2 cp2 dp4 / ep4 etp2", "tp2 cp2 dp4 pp2 vpp3 / ep4 etp2"):
        assert communication.reduced_layouts(Layout.parse(text)) == (attention, experts)
    # Three ranks that share experts are no part of two that share a row: here they lie across.
    whole = Layout.parse("cp2 dp12 / ep3")
    assert communication.reduced_layouts(whole) == (Layout.parse("cp2"), whole)


def test_for_tokens_drops_storage_and_gradient_settings():
    layout, batch = Layout.parse("tp2 cp2 dp4 / ep4 etp2"), Batch(8, 64, micro_rows=2)
    given = replace(IN_PARTS, storage="mixed", gradient_wire="bfloat16", mu_dtype="bfloat16")
    given = with_fields(given, overlap_grad_reduce=True)
    assert for_tokens(given) == IN_PARTS
    sent = [volumes.layer(MODEL, layout, batch, method) for method in (given, IN_PARTS)]
    assert sent[0] == sent[1]
