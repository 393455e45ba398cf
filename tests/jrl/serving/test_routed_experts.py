"""Expert ids of served tokens are those that the trainer's router chooses for the same tokens."""

import base64
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from policies import CONFIG, FAST_COMPILE, Asked, weights
from scripted import LENGTH, TOKENIZER, House
from served import write_checkpoint
from tiers import full_but

from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.serve import ServeOptions, build_service
from jrl.serving.metrics import NoMetrics
from jrl.trainer.evaluation.served_model import open_served_model
from moe.config import Model
from moe.model import routing_choices
from moe.placement import specs

NETWORK = replace(CONFIG, vocab_size=TOKENIZER.vocab_size, num_layers=2)
PROMPT = TOKENIZER.with_prefix(TOKENIZER.encode("bad cab"))


class Loaded(Engine):
    """An engine that keeps its policy."""

    def load(self, weights, version, entropy=None):
        if weights is not None:
            super().load(weights, version, entropy)


def house(layout):
    mesh = Asked(layout=layout).mesh
    ends = TOKENIZER.stop_ids
    decoder = Decoder(NETWORK, mesh, TOKENIZER.pad_id, ends, records_choices=True)
    backend, key = MeshBackend(decoder, mesh), jax.random.key(0)
    engine = Loaded(backend, slots=4, max_length=LENGTH, key=key, policy=SERVING)
    engine.load(weights(NETWORK), 0)
    return House(engine=engine, most_bytes=900)


def chosen(ids):
    """Experts ``[position, layer, k]`` of a row of tokens in the network of the trainer."""
    model = Model(NETWORK, Asked().mesh)
    over = PartitionSpec(model.mesh.axes)
    step = jax.jit(
        jax.shard_map(
            lambda weights, tokens, valid: routing_choices(weights, tokens, valid, model),
            mesh=model.mesh.mesh,
            in_specs=(specs(model), over, over),
            out_specs=PartitionSpec(None, model.mesh.axes),
        ),
        compiler_options=FAST_COMPILE,
    )
    tokens = np.array([ids], np.int32)
    found = step(weights(NETWORK), tokens, np.ones_like(tokens, bool))
    return np.moveaxis(np.asarray(found), 0, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", full_but(["dp1", "tp2 dp2 / ep2"], "dp1"))
def test_experts_of_generated_tokens_are_the_networks(layout):
    cases = [
        {},
        {"stop_token_ids": [*range(4, TOKENIZER.vocab_size)]},
        {"routed_experts_prompt_start": 5},
        {"routed_experts_prompt_start": 30},
    ]

    async def scene(client):
        answers = []
        for case in cases:
            parameters = {"max_tokens": 9, "n": 2, "logprobs": 0, "seed": 3, **case}
            body = {"model": "m", "token_ids": PROMPT, "sampling_params": parameters}
            answers.append(await client.post("/inference/v1/generate", json=body))
        return answers

    for case, answer in zip(cases, house(layout).run(scene), strict=True):
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert len(choices) == 2
        for choice in choices:
            entry, ids = choice["routed_experts"], [*PROMPT, *choice["token_ids"]]
            assert "stop_token_ids" not in case or len(choice["token_ids"]) == 1
            assert entry["start"] == case.get("routed_experts_prompt_start", 0)
            raw = np.frombuffer(base64.b64decode(entry["data"]), entry["dtype"])
            expected = chosen(ids)[entry["start"] : len(ids) - 1]
            found = raw.reshape(entry["shape"])
            assert found.shape == (max(0, len(ids) - 1 - entry["start"]), 2, 3)
            np.testing.assert_array_equal(np.sort(found, -1), np.sort(expected, -1))


def test_experts_of_a_dense_network_are_refused(tmp_path):
    location = f"hf:{write_checkpoint(tmp_path / 'model')}"
    options = ServeOptions(location, routed_experts=True)
    with pytest.raises(ValueError, match="routed_experts=True needs experts, and model is a dense"):
        build_service(
            options,
            open_served_model(location),
            NoMetrics(),
            seed=0,
            slots=1,
            queue=1,
            window=1,
            routed_experts=True,
        )
