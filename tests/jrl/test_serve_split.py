"""Serving with attention and experts on devices of their own: answers equal the answers of one
mesh."""

import asyncio
import json
import shutil
from dataclasses import replace

import httpx
import jax
import numpy as np
import pytest
from served import MIXTURE, write_checkpoint

from jrl import serve
from jrl.config.run import RunConfig
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.split_backend import SplitBackend
from jrl.rollout.sampling import RequestSampling
from jrl.trainer.evaluation.served_model import (
    RequestedSplit,
    open_served_model,
    parse_device_split,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return f"hf:{write_checkpoint(tmp_path_factory.mktemp('mixture') / 'model', network=MIXTURE)}"


def answers(request):
    """To a greedy request, and to choices that are drawn while it is answered."""
    service, front, name = serve._build_service(request)
    service.start(warm_up=False)

    async def asked():
        transport = httpx.ASGITransport(app=front.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            both = {"model": name, "max_tokens": 9}
            bodies = (
                {**both, "prompt": "Ann has 3 pens", "temperature": 0, "logprobs": 2},
                {**both, "prompt": "pens", "n": 3, "seed": 11, "top_p": 0.9},
            )
            sent = (client.post("/v1/completions", json=body) for body in bodies)
            return [answer.json()["choices"] for answer in await asyncio.gather(*sent)]

    try:
        return service, asyncio.run(asked())
    finally:
        service.close()
        service.join(10)


@pytest.mark.slow
def test_answers_of_two_sides_are_those_of_one_mesh(checkpoint):
    request = serve.ServeOptions(checkpoint, slots=4, length=32, window=3)
    of_two = replace(request, split="dp1 / ep1", micro_batches=2, expert_slots=5, replan=4)
    (_, one), (service, two) = map(answers, (request, of_two))
    assert isinstance(service._engine.backend, SplitBackend)
    places = service._engine.backend.expert_balancer
    assert places.every == 4 and places.placements[0].num_slots == 5
    for a, b in zip(one, two, strict=True):
        assert [choice["text"] for choice in b] == [choice["text"] for choice in a]
    assert len({choice["text"] for choice in two[1]}) > 1, "the choices are equal"
    (a,), (b,) = (each[0] for each in (one, two))
    # float32: the sums of a token's experts come in another order.
    values = (each["logprobs"]["token_logprobs"] for each in (a, b))
    assert pytest.approx(next(values), abs=1e-5) == next(values)


@pytest.mark.parametrize(
    ("given", "layout", "message"),
    [
        ({"split": "dp1 / ep1"}, "dp2", "split='dp1 / ep1' has two: leave out --layout"),
        ({"split": "dp1"}, None, "'dp1' does not name two device groups"),
        ({"split": "dp15 / ep2"}, None, "needs 17 devices and there are 16: give --layout dp1"),
        ({"split": "dp1 / ep2", "expert_slots": 1}, None, "expert_slots=1 on ep=2 devices do not"),
        ({"micro_batches": 3}, None, "micro_batches=3 needs .* or leave out --micro-batches"),
        (
            {"expert_slots": 3},
            "dp1",
            "expert_slots=3 needs the devices of attention and of experts",
        ),
        (
            {"replan": 9},
            None,
            "replan=9 needs the devices of attention and of experts: give --split",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(checkpoint, given, layout, message):
    with pytest.raises(ValueError, match=message) as error:
        open_served_model(checkpoint, layout, RequestedSplit(**given))
    assert "\n" not in str(error.value)


def test_slots_and_networks_that_two_sides_cannot_have(checkpoint, tmp_path):
    policy = open_served_model(checkpoint, split=RequestedSplit("dp2 / ep1", micro_batches=3))
    with pytest.raises(ValueError, match=r"slots=16 .* x micro_batches=3: .* in multiples of 6"):
        policy.engine(slots=16, max_length=32, key=jax.random.key(0), top_logprobs=0)
    dense = write_checkpoint(tmp_path / "dense")
    with pytest.raises(ValueError, match="decode a dense network on one mesh"):
        open_served_model(f"hf:{dense}", split=RequestedSplit("dp1 / ep1"))


@pytest.mark.slow
def test_a_run_is_served_on_its_own_split(grpo_run, tmp_path):
    folder = shutil.copytree(grpo_run, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["run"] |= {"rollout_engine": "disaggregated", "rollout_split": "dp1 / ep2"}
    (folder / "config.json").write_text(json.dumps(config))
    written = []
    for layout in (None, "dp1"):
        policy = open_served_model(str(folder), layout)
        engine = policy.engine(slots=4, max_length=32, key=jax.random.key(0), top_logprobs=0)
        assert isinstance(engine.backend, SplitBackend) == (layout is None)
        engine.load(*policy.versions.load())
        ids, own = np.arange(3, 8, dtype=np.int32), RequestSampling(seed=1)
        engine.submit([Request(0, sample, ids, 12, sampling=own) for sample in range(4)])
        rows: dict[int, list[int]] = {}
        while engine.busy:
            for row in engine.stream(4):
                rows.setdefault(row.request.sample, []).extend(row.tokens.tolist())
        written.append(rows)
    assert written[0] == written[1]


def test_the_split_of_a_run_is_taken_where_nothing_else_is_said():
    run = RunConfig(
        rollout_engine="disaggregated",
        rollout_split="dp2 / ep1",
        rollout_micro_batches=3,
        rollout_replan=7,
    )
    own = parse_device_split(RequestedSplit(), None, run)
    assert own is not None and own.mesh.attention.layout.dp == 2
    assert (own.micro_batches, own.replan) == (3, 7)
    changed = parse_device_split(RequestedSplit(replan=5), None, run)
    assert changed is not None and (changed.micro_batches, changed.replan) == (3, 5)
    # What was chosen for those devices says nothing of others.
    other = parse_device_split(RequestedSplit("dp1 / ep2"), None, run)
    assert other is not None and (other.micro_batches, other.replan) == (2, None)
    assert parse_device_split(RequestedSplit(), "dp1", run) is None
