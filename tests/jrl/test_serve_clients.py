"""A server as the programs of the field use it: clients from pip in an environment of their own.

``JRL_CLIENTS`` is its Python: a virtual environment with pip install -e ".[clients]".
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import openai
import pytest
from served import MIXTURE, serving, write_checkpoint
from tool_templates import TEMPLATES

from jrl.text.json_tokenizer import checkpoint_tokenizer

PYTHON = os.environ.get("JRL_CLIENTS")
PROGRAM = Path(__file__).parents[1] / "support" / "serve_clients.py"
LIMIT = 600
"""Seconds for a client, most of them for its imports and the server's compilations."""
CLOSE = 1e-5
"""float32: the same sums in programs of other sizes."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="JRL_CLIENTS names no Python with the clients"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    network = replace(MIXTURE, max_positions=1024)
    template = TEMPLATES["hermes"].source
    folder = tmp_path_factory.mktemp("clients") / "model"
    return write_checkpoint(folder, network=network, chat_template=template)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    flags = ["--slots=16", "--no-warm-up", "--routed-experts"]
    with serving(str(model), tmp_path_factory.mktemp("log") / "log", *flags) as made:
        yield made


def answers(client, server, model):
    """What a client prints."""
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(PROGRAM), client, server.url, str(model)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_renderers_generate_the_tokens_of_a_completion(server, model, client):
    found = answers("renderers", server, model)
    asked = {"model": "model", "prompt": found["prompt_ids"], "max_tokens": 12, "seed": 3}
    more = {"return_token_ids": True}
    (choice,) = client.completions.create(**asked, logprobs=0, extra_body=more).choices
    assert found["completion_ids"] == choice.token_ids
    assert found["completion_logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=CLOSE)
    assert found["finish_reason"] == choice.finish_reason
    num_tokens = len(found["prompt_ids"]) + len(found["completion_ids"])
    assert found["experts"] == [num_tokens - 1 - 2, MIXTURE.num_layers, MIXTURE.experts_per_token]


def test_litellm_gets_the_answers_of_the_official_client(server, model, client):
    found = answers("litellm", server, model)
    messages = [{"role": "user", "content": "How many pens?"}]
    asked = {"model": "model", "temperature": 0}
    chat = client.chat.completions.create(**asked, messages=messages, max_tokens=8)
    assert found["chat"] == found["stream"] == chat.choices[0].message.content
    tokenizer = checkpoint_tokenizer(model, MIXTURE.vocab_size)
    assert "How many pens?" in tokenizer.decode_special(found["prompt_ids"])
    completion = client.completions.create(**asked, prompt="ab", max_tokens=5)
    assert found["completion"] == completion.choices[0].text
    response = client.responses.create(**asked, input=messages, max_output_tokens=16)
    assert found["response"] == found["events"] == response.output_text
    assert json.loads(found["arguments"])["x"] in (1, 2)


def test_trl_samples_and_scores(server, model):
    found = answers("trl", server, model)
    sampled, scored = found["sampled"], found["scored"]
    assert sampled["prompt_ids"] == [[84, 285, 81], [84]]
    assert len(sampled["completion_ids"]) == 4
    # The sampled tokens' log-probabilities, as they were sampled and as a teacher scores them.
    ids, actual = sampled["completion_ids"][0], [x for (x,) in scored["actual_logprobs"][0]]
    assert [x for (x,) in scored["actual_token_ids"][0]] == ids
    best = zip(sampled["logprob_token_ids"][0], sampled["logprobs"][0], strict=True)
    own = [values[tokens.index(token)] for token, (tokens, values) in zip(ids, best, strict=True)]
    assert own == pytest.approx(actual, abs=CLOSE)
    tokenizer = checkpoint_tokenizer(model, MIXTURE.vocab_size)
    assert tokenizer.decode(found["regex"][0][:-1]).isdigit()
    assert len(found["chat"]["completion_ids"][0]) == len(found["chat"]["logprobs"][0])


def test_load_generator_finishes_all_requests(server, model):
    found = answers("guidellm", server, model)
    assert found == {"1": [5, 0], "16": [20, 0], "64": [68, 0]}
