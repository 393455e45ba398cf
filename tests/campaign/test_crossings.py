"""Small crossings equal one device, and the campaign tells what does from what does not."""

import json
import os
import signal

import jax
import pytest

from campaign import comparing, crossings
from campaign.comparing import outcome_of
from campaign.drawing import drawn
from campaign.shrinking import shrunk
from campaign.worker import Worker

DENSE = {"num_layers": 1, "num_kv_heads": 2, "head": "tied"}
ROUTED = {"num_layers": 1, "num_experts": 8, "selection_bias": True, "global_balance_coef": 0.3}
REPLAYED = {"router_replay": "R3", "aggregation": "seq-mean-token-mean"}
SMALL = {
    "ulysses": ({"cp": 2, "dp": 2}, DENSE, {"context": "ulysses", "vocab_chunk": 3}, {}),
    "ring": ({"cp": 2, "tp": 2}, DENSE, {"context": "ring", "remat": "full"}, {}),
    "shards": (
        {"dp": 4},
        DENSE,
        {"remat": "selective", "fsdp": True, "overlap_grad_reduce": True},
        {"micro_batch": 8},
    ),
    "packed": ({"tp": 2, "dp": 2}, DENSE, {"packing": True}, {}),
    "packed over cp": ({"cp": 4}, DENSE, {"packing": True, "attention": "blocked"}, {}),
    "stages": (
        {"pp": 2},
        {**DENSE, "num_layers": 2},
        {"context": "ring", "scan_layers": True},
        {"micro_batch": 4},
    ),
    "exchange": (
        {"dp": 2, "ep": 2},
        ROUTED,
        {"dispatch": "all_to_all", "expert_chunks": 2, "remat": "projections"},
        REPLAYED,
    ),
    "parts of experts": (
        {"dp": 2, "ep": 1, "etp": 2},
        ROUTED,
        {"experts": "batched", "two_batch_overlap": True},
        {"micro_batch": 8},
    ),
    "servers": (
        {"dp": 4, "ep": 4},
        ROUTED,
        {"dispatch": "two_level", "server_devices": 2, "buffer_factor": 1.0},
        REPLAYED,
    ),
    "room": ({"dp": 2, "ep": 2}, ROUTED, {"buffer_factor": 0.5}, REPLAYED),
    "ring of stages": (
        {"cp": 2, "pp": 2, "ep": 2},
        {**ROUTED, "num_layers": 3},
        {"context": "ring", "remat": "full"},
        {"micro_batch": 4},
    ),
    "critic": ({"tp": 2, "cp": 2}, DENSE, {}, {"name": "vapo", "micro_batch": 8}),
    # Entropies of which the greatest is 0.0014 nats above the pivot.
    "near entropies": (
        {"cp": 2},
        {
            "vocab_size": 11,
            "num_kv_heads": 1,
            "sliding_window": 5,
            "num_experts": 12,
            "experts_per_token": 1,
            "d_expert": 14,
            "routed_scaling": 2.5,
            "batch_balance_coef": 0.3,
        },
        {
            "prompt_length": 6,
            "response_length": 5,
            "context": "gather",
            "experts": "plain",
            "remat": "selective",
            "fsdp": True,
            "vocab_chunk": 4,
        },
        {"name": "hapo", "group_size": 4, "prompts": 4, "mismatch": "truncated", "micro_batch": 2},
    ),
    "delta": ({"tp": 2}, {"delta": [[0], 4, 8]}, {"remat": "selective"}, {}),
    # A network of Qwen3-Next's kind: a gradient 4.5e-4 from one device, as far as one device is
    # from itself with its weights moved by one rounding.
    "short keys": (
        {"dp": 3},
        {
            "num_layers": 4,
            "num_experts": 6,
            "delta": [[0, 1, 2], 6, 6, 6, 6, 3],
            "d_ff": 16,
            "shared_expert_gate": True,
        },
        {},
        {"router_replay": "R3", "prompts": 6},
    ),
}
REFERENCES = {}


def crossing_of(name):
    layout, model, run, recipe = SMALL[name]
    return {"layout": layout, "model": model, "run": run, "recipe": recipe}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_crossing_equals_one_device(name):
    outcome = outcome_of(crossing_of(name), REFERENCES)
    assert outcome.kind == "right", outcome.reason
    assert {"scores", "policy loss", "policy gradient", "policy weights"} < outcome.distances.keys()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_a_drawn_crossing_is_right_or_refused(number):
    # As users have them, see `campaign.worker.main`.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        outcome = outcome_of(drawn(34, number), REFERENCES)
    assert not outcome.failed, outcome.reason


@pytest.mark.slow
def test_crossing_compares_beyond_rounding(monkeypatch):
    known = {}
    assert outcome_of(crossing_of("packed"), known).kind == "right"

    def observe(setup, batch, *on_one_device):
        observed = comparing_observe(setup, batch, *on_one_device)
        if not on_one_device:
            observed["policy gradient"]["layers.attention.key"] *= 1.0001
        return observed

    comparing_observe = comparing.observe
    monkeypatch.setattr(comparing, "observe", observe)
    outcome = outcome_of(crossing_of("packed"), known)
    assert outcome.failed and "policy gradient by 0.0001 in layers.attention.key" in outcome.reason


def test_crossing_reports_refused_combinations():
    outcome = outcome_of({"layout": {"pp": 2, "vpp": 2}})
    assert outcome.kind == "refused" and "num_layers=2 cannot be split" in outcome.reason


def test_a_seed_draws_the_same():
    assert drawn(3, 5) == drawn(3, 5) != drawn(3, 6)
    assert json.loads(json.dumps(drawn(3, 5))) == drawn(3, 5)


def test_shrink_keeps_only_the_failing_settings():
    def fails(crossing):
        return crossing["layout"].get("cp", 1) > 1 and "remat" in crossing["run"]

    large = {
        "layout": {"cp": 4, "dp": 2, "tp": 2},
        "model": {"num_experts": 8, "num_layers": 4},
        "run": {"remat": "full", "fsdp": True, "context": "ring"},
        "recipe": {"name": "vapo"},
        "decode": True,
    }
    smallest, tried = shrunk(large, fails)
    assert smallest == {
        "layout": {"cp": 2},
        "model": {},
        "run": {"remat": "full"},
        "recipe": {},
        "decode": None,
    }
    assert tried < 25


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_takes_its_crossing_alone():
    worker = Worker(seconds=0.01)
    try:
        assert worker.run({})["kind"] == "hung"
        worker.seconds = 60
        os.kill(worker.start().pid, signal.SIGKILL)
        assert worker.run({})["kind"] == "aborted"
        found = worker.run({"layout": {"pp": 2, "vpp": 2}})
        assert found["kind"] == "refused" and "cannot be split" in found["reason"]
    finally:
        worker.close()


def test_a_failure_is_written_down_and_run_again(tmp_path, monkeypatch, capsys):
    class Fake:
        def __init__(self, seconds):
            pass

        def run(self, crossing):
            bad = crossing["layout"].get("cp", 1) > 1
            return {"kind": "wrong" if bad else "right", "reason": "loss" if bad else ""}

        def close(self):
            pass

    monkeypatch.setattr(crossings, "Worker", Fake)
    file = tmp_path / "failures.jsonl"
    assert crossings.main(["--seed", "1", "--cases", "30", "--failures", str(file)]) == 1
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert written and all(x["smallest"]["layout"] == {"cp": 2} for x in written)
    assert f"{len(written)} failed" in capsys.readouterr().out
    assert crossings.main(["--replay", str(file), "--no-shrink"]) == 1
    assert crossings.main(["--replay", '{"layout": {"tp": 2}}']) == 0
    assert "1 right, 0 refused, 0 failed" in capsys.readouterr().out


def test_refusals_of_a_kind_are_counted_together():
    reasons = [
        "layout tp2 cp2 dp1 pp1 / ep2 etp1 edp2: Gated DeltaNet needs full sequences, ...",
        "layout tp1 cp4 dp1 pp1 / ep1 etp1 edp4: Gated DeltaNet needs full sequences, ...",
    ]
    table = crossings.table([{"kind": "refused", "reason": reason} for reason in reasons])
    assert "2 refused: layout L: Gated DeltaNet needs full sequences" in table
