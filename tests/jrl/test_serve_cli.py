"""Servers in processes of their own, by the official client and by a crowd."""

import asyncio
import contextlib
import json
import random
import resource
import shutil
import socket
import threading
import time

import httpx
import jax
import numpy as np
import openai
import psutil
import pytest
from chat_checkpoint import chat_tokenizer
from command_runs import one_line
from served import numbers, serving, write_checkpoint

from jrl import serve
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.sampling import GREEDY
from jrl.serve import main
from jrl.serving.application import ENCODING_THREADS
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat
from jrl.trainer.evaluation.served_model import (
    PolicySource,
    ServedModel,
    open_served_model,
)
from moe.config import ModelConfig
from sharding.folding import Layout, fold

KEY, SLOTS, LENGTH = "secret", 8, 64
PROMPT = "Ann has 3 pens"
CHAT = [{"role": "user", "content": "How many pens?"}]
ASKED = Conversation.from_pairs([("user", "How many pens?")])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slots=0"], "slots=0 must be at least 1"),
        (["--port=70000"], "port=70000 must lie in 0..65535"),
        (["--api-key="], "api_key is empty"),
        (["--connections=0"], "connections=0 must be at least 1"),
        (
            ["--allowed-origins", "http://a", "localhost:3000"],
            "'localhost:3000' is no origin",
        ),
        (["--allowed-origins", "http://localhost:3000/"], "is no origin"),
        (["--allowed-origins", "*", "null", "https://a.b", "--port=0"], "no-such-run"),
        (["--host=0.0.0.0", "--port=0"], "host=0.0.0.0 can be reached by other machines, and no"),
        # Allowed, it comes to the run.
        (["--host=0.0.0.0", "--port=0", "--allow-anyone"], "no-such-run"),
        (["--host=0.0.0.0", "--port=0", "--api-key=k"], "no-such-run"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    monkeypatch.setattr(serve, "start_jax", lambda devices: None)
    assert main(["no-such-run", *flags]) == 2
    assert message in one_line(capsys.readouterr())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    flags = [f"--slots={SLOTS}", "--queue=24", f"--api-key={KEY}", "--window=4"]
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(f"hf:{checkpoint}", log, *flags) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.mark.slow
def test_tokens_are_the_engines_own_streamed_and_whole(checkpoint, client):
    """Greedy: text, tokens and log-probabilities, of completions and of chats."""
    policy = open_served_model(f"hf:{checkpoint}")
    tokenizer, count = policy.format.tokenizer, 21
    assert policy.format.template is not None
    rows = [tokenizer.encode(PROMPT), policy.format.template.encode(ASKED)]
    decoder = Decoder(policy.model, policy.mesh, tokenizer.pad_id, tokenizer.stop_ids)
    backend = MeshBackend(decoder, policy.mesh)
    engine = Engine(backend, slots=SLOTS, max_length=LENGTH, key=jax.random.key(3))
    engine.load(*policy.versions.load())
    asked = [Request(n, 0, np.array(ids, np.int32), count) for n, ids in enumerate(rows)]
    engine.submit(asked, GREEDY)
    done = {}
    while found := engine.poll():
        done |= {t.request.prompt: t for t in found}

    both = {"model": "model", "max_tokens": count, "temperature": 0}
    completion = {**both, "prompt": PROMPT, "logprobs": 2}
    chat = {**both, "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    whole = client.completions.create(**completion)
    choice, expected = whole.choices[0], done[0]
    shown = [t for t in expected.tokens.tolist() if t not in tokenizer.stop_ids]
    assert choice.text == tokenizer.decode(shown)
    assert choice.finish_reason == expected.finish
    assert whole.usage.completion_tokens == len(expected.tokens)
    assert whole.usage.prompt_tokens == len(rows[0])
    # float32: the same sums, in programs of their own.
    theirs = expected.old_logprobs[: len(shown)]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, theirs, atol=1e-4)
    for value, likeliest in zip(theirs, choice.logprobs.top_logprobs, strict=True):
        assert len(likeliest) == 2 and max(likeliest.values()) == pytest.approx(value, abs=1e-4)
    parts = [each.choices[0] for each in client.completions.create(**completion, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    streamed = [value for p in parts if p.logprobs for value in p.logprobs.token_logprobs]
    assert streamed == choice.logprobs.token_logprobs

    answer, expected = client.chat.completions.create(**chat), done[1]
    choice = answer.choices[0]
    shown = [t for t in expected.tokens.tolist() if t not in tokenizer.stop_ids]
    assert choice.message.content == tokenizer.decode(shown)
    assert choice.message.role == "assistant" and answer.system_fingerprint == "step-0"
    content = choice.logprobs.content
    assert b"".join(bytes(c.bytes) for c in content).decode(errors="replace") == (
        choice.message.content
    )
    values = [each.logprob for each in content]
    np.testing.assert_allclose(values, expected.old_logprobs[: len(shown)], atol=1e-4)
    assert all(each.top_logprobs[0].logprob == each.logprob for each in content)
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(**chat, stream=True, stream_options=options)
    deltas = [each.choices[0].delta.content or "" for each in chunks]
    assert "".join(deltas) == choice.message.content and len(chunks) > 4, "it came at once"
    assert last.usage == answer.usage and not last.choices


@pytest.mark.slow
def test_seeds_choices_and_stops(client):
    """The same seed gives the same choices whatever else runs, and a stop cuts them."""
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 20, "seed": 11, "top_p": 0.9}

    def texts(**more):
        answer = client.completions.create(**{**body, **more})
        return [choice.text for choice in answer.choices]

    alone = texts(n=3)
    assert len(set(alone)) == 3 and texts(seed=12) != alone[:1]
    noise = [
        threading.Thread(
            target=lambda n=n: client.completions.create(
                model="model", prompt=["x " * n, "y"], max_tokens=9 + 5 * n, temperature=0.3 * n
            )
        )
        for n in range(1, 5)
    ]
    for each in noise:
        each.start()
    together = texts(n=3)
    for each in noise:
        each.join()
    assert together == alone
    assert texts(n=1) == alone[:1]
    # A stop of two characters in the middle of the first choice.
    stop = alone[0][7:9]
    cut = alone[0][: alone[0].index(stop)]
    answer = client.completions.create(**body, stop=stop, stream=True)
    parts = [each.choices[0] for each in answer]
    assert "".join(part.text for part in parts) == cut == texts(stop=["~never~", stop])[0]
    assert parts[-1].finish_reason == "stop"


@pytest.mark.slow
def test_errors_are_the_clients_own(server, client):
    with pytest.raises(openai.BadRequestError, match="presence_penalty=3 must be a number in -2"):
        client.completions.create(model="model", prompt="x", presence_penalty=3)
    with pytest.raises(openai.BadRequestError, match=r"prompt has \d+ tokens and max_tokens=64"):
        client.completions.create(model="model", prompt="x", max_tokens=LENGTH)
    with pytest.raises(openai.NotFoundError, match="model='other' is not served"):
        client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="no turn for a tool"):
        message = {"role": "tool", "content": "x", "tool_call_id": None}
        client.chat.completions.create(model="model", messages=[message])
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError, match="API key"):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == ["model"]


CROWD, EACH, LEAVING = 64, 32, 16
"""Clients, requests of each, and clients that leave before a whole answer."""


async def crowd(url):
    """Clients that ask, leave, talk nonsense and send too much; what became of their requests."""
    became: dict[str, int] = {}
    tokens = 0

    async def one(http, draw):
        nonlocal tokens
        kind = draw.choices(["whole", "stream", "leave", "malformed", "oversized"], [8, 8, 3, 1, 1])
        kind = kind[0]
        n = draw.choice([1, 1, 1, 2])
        body = {"model": "model", "max_tokens": draw.randrange(1, 9), "n": n, "seed": 5}
        body["prompt"] = "pens " * draw.randrange(1, 8)
        if kind == "malformed":
            answer = await http.post("/v1/completions", content=b'{"model": ')
        elif kind == "oversized":
            answer = await http.post("/v1/completions", json={**body, "prompt": "x" * 2**20})
        elif kind == "whole":
            answer = await http.post("/v1/completions", json=body)
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            body["max_tokens"] = 40 if kind == "leave" else body["max_tokens"]
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 200 and kind == "leave":
                    return "left"
                lines = [line async for line in answer.aiter_lines() if line]
            if answer.status_code == 200:
                assert lines[-1] == "data: [DONE]"
                tokens += json.loads(lines[-2][6:])["usage"]["completion_tokens"]
            return str(answer.status_code)
        if answer.status_code == 200:
            assert len(answer.json()["choices"]) == n
            tokens += answer.json()["usage"]["completion_tokens"]
        return str(answer.status_code)

    async def client(number):
        draw = random.Random(number)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as http:
            for _ in range(EACH):
                what = await one(http, draw)
                became[what] = became.get(what, 0) + 1

    await asyncio.gather(*map(client, range(CROWD)))
    return became, tokens


async def leave(url):
    """Clients that ask for a whole answer and leave before it can be there."""
    host, port = url.removeprefix("http://").split(":")
    # As many choices as slots and queue hold: all are taken, and few have ended by then.
    body = json.dumps({"model": "model", "prompt": PROMPT, "max_tokens": 48, "n": 2}).encode()
    head = f"Host: {host}\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"

    async def client():
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        await writer.drain()
        writer.close()

    await asyncio.gather(*(client() for _ in range(LEAVING)))


def held(server):
    """File descriptors and threads of the server's process."""
    process = psutil.Process(server.process.pid)
    return process.num_fds(), process.num_threads()


def by_status(found):
    """Requests that have ended, of both endpoints, by status."""
    counts: dict[str, float] = {}
    for name, value in found.items():
        if name.startswith("jrl_requests_total"):
            status = name.split('status="')[1].split('"')[0]
            counts[status] = counts.get(status, 0) + value
    return counts


@pytest.mark.slow
def test_a_crowd_leaves_nothing_behind(server):
    """64 clients with 2,048 requests, and 16 that leave: each gets an answer or is turned away, the
    numbers say so, and the process holds what it held."""

    def measured():
        head = {"Authorization": f"Bearer {KEY}"}
        return numbers(httpx.get(f"{server.url}/metrics", headers=head).text)

    def settled(number):
        """What has been measured and counted once so many requests have ended."""
        for _ in range(100):
            after = measured()
            counts = {k: v - by_status(before).get(k, 0) for k, v in by_status(after).items()}
            busy = after["jrl_slots_live"] + after["jrl_queue_length"]
            if busy == 0 and sum(counts.values()) == number:
                break
            time.sleep(0.05)
        assert after["jrl_slots_live"] == after["jrl_queue_length"] == 0
        assert sum(counts.values()) == number
        return after, counts

    before, (files, threads) = measured(), held(server)
    # Threads that encode requests are started when they are first needed at the same time.
    holds = files, threads + 2 * ENCODING_THREADS
    became, tokens = asyncio.run(crowd(server.url))
    assert sum(became.values()) == CROWD * EACH
    assert set(became) == {"200", "400", "413", "429", "left"}, became
    _, crowded = settled(CROWD * EACH)
    asyncio.run(leave(server.url))
    became["left"] += LEAVING
    after, counts = settled(CROWD * EACH + LEAVING)
    # Of those no one was there any more to be told.
    assert counts["gone"] > crowded["gone"] and counts["429"] == crowded["429"]
    for _ in range(100):
        holding = held(server)
        if all(now <= then for now, then in zip(holding, holds, strict=True)):
            break
        time.sleep(0.05)
    else:
        raise AssertionError(f"file descriptors and threads: {holds} before, {holding} after")
    for status in ("400", "413", "429"):
        assert counts[status] == became[status]
    # One that left may have been served to its end before that was noticed.
    assert counts["200"] + counts["gone"] == became["200"] + became["left"]
    assert became["200"] <= counts["200"]
    generated = after["jrl_generated_tokens_total"] - before["jrl_generated_tokens_total"]
    assert generated >= tokens
    # And it goes on serving.
    answer = httpx.get(f"{server.url}/health")
    assert answer.json() == {"status": "ok"} and after["jrl_uncompiled"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("files", [200, None])
def test_a_thousand_connections_without_a_key_keep_nobody_out(checkpoint, tmp_path, files):
    flags = [f"--slots={SLOTS}", f"--api-key={KEY}", "--no-warm-up"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        serving(f"hf:{checkpoint}", tmp_path / "log", *flags, files=files) as server,
        contextlib.ExitStack() as stack,
    ):
        many = 1000 if hard == resource.RLIM_INFINITY else min(1000, hard - 200)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, many + 200), hard))
        process = psutil.Process(server.process.pid)
        log = len(server.log.read_text())
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(many):
            half = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(ConnectionError):  # dropped by then
                half.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-")
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 4}
        head = {"Authorization": f"Bearer {KEY}"}
        for _ in range(3):
            path = f"{server.url}/v1/completions"
            answer = httpx.post(path, json=body, headers=head, timeout=120)
            assert answer.status_code == 200, answer.text
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if files is None else files
        assert process.num_fds() < limit
        # They are held for two seconds more, which cost next to nothing.
        used, begun = sum(process.cpu_times()[:2]), time.monotonic()
        time.sleep(2)
        share = (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - begun)
        assert share < 0.15
        assert "ulimit -n" in server.log.read_text() or files is None
        assert len(server.log.read_text()) - log < 2000, server.log.read_text()
        assert server.end() == 0


@pytest.mark.slow
def test_sigterm_finishes_what_runs(checkpoint, tmp_path):
    with serving(
        f"hf:{checkpoint}", tmp_path / "log", "--slots=8", "--window=1", "--no-warm-up"
    ) as server:
        # Many times as many choices as slots: it takes a while.
        body = {"model": "model", "prompt": PROMPT, "max_tokens": 50, "n": 96, "stream": True}
        path = f"{server.url}/v1/completions"
        with httpx.stream("POST", path, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            server.process.terminate()
            while httpx.get(f"{server.url}/health").status_code == 200:
                time.sleep(0.01)
            refused = httpx.post(path, json={**body, "stream": False, "n": 1})
            rest = [line for line in lines if line]
        assert refused.status_code == 503, refused.text
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"' in line for line in rest) == 96
        assert server.process.wait(30) == 0
        assert "accepting no more requests" in server.log.read_text()


@pytest.mark.slow
def test_a_run_is_followed_while_it_is_served(grpo_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(grpo_run, run)
    steps = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert len(steps) > 1, "there is nothing to follow"
    newer = run / "checkpoints" / str(steps[-1])
    newer.rename(tmp_path / "newer")
    flags = ["--slots=4", "--length=32", f"--api-key={KEY}", "--follow", "--no-warm-up"]
    with serving(str(run), tmp_path / "log", *flags) as server:
        head = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, headers=head, timeout=60) as http:

            def versions(**more):
                body = {"model": "run", "prompt": "1", "max_tokens": 8, **more}
                answer = http.post("/v1/completions", json=body)
                return answer.json()["system_fingerprint"]

            assert versions() == f"step-{steps[-2]}"
            loaded = http.post("/v1/load").json()
            assert loaded["version"] == steps[-2]
            (tmp_path / "newer").rename(newer)
            end = time.monotonic() + 30
            while versions() != f"step-{steps[-1]}":
                assert time.monotonic() < end, server.log.read_text()
            assert numbers(http.get("/metrics").text)["jrl_slots_live"] == 0
            chat = {"model": "run", "messages": CHAT}
            answer = http.post("/v1/chat/completions", json=chat)
            assert answer.json()["error"]["code"] == "no_chat_template"
        assert server.end() == 0


def test_defaults_of_a_checkpoint_are_told(tmp_path, capsys):
    mesh = fold(Layout(), jax.devices()[:1])
    source = PolicySource(tmp_path, ModelConfig(**SIZES), mesh)
    policy = ServedModel(
        "m", source.model, mesh, None, PromptFormat(chat_tokenizer(tmp_path)), source
    )
    assert serve._defaults(serve.ServeOptions("x"), policy) == ({}, None)
    assert capsys.readouterr().err == ""
    stated = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    found = serve._defaults(serve.ServeOptions("x"), policy)
    assert found == ({"temperature": 0.6, "top_k": 20}, 50)
    line = capsys.readouterr().err
    assert "temperature 0.6, top_k 20, at most 50 tokens of a chat (--generation-config" in line
    options = serve.ServeOptions("x", generation_config="none")
    assert serve._defaults(options, policy) == ({}, None)


def test_another_template_is_that_of_a_file(tmp_path):
    mesh = fold(Layout(), jax.devices()[:1])
    source = PolicySource(tmp_path, ModelConfig(**SIZES), mesh)
    tokenizer = chat_tokenizer(tmp_path)
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer), template_arguments={"a": 1})
    policy = ServedModel("m", source.model, mesh, None, format, source)
    file = tmp_path / "other.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    made = serve._with_template(serve.ServeOptions("x", chat_template=str(file)), policy).format
    assert made.template.render(ASKED) == "How many pens?<|endoftext|>"
    assert made.tokenizer.turn_end_id == tokenizer.special_tokens["<|endoftext|>"]
    assert made.template_arguments == {"a": 1}
    assert (
        serve._with_template(serve.ServeOptions("x", chat_template="none"), policy).format.template
        is None
    )
    assert serve._with_template(serve.ServeOptions("x"), policy) is policy
    with pytest.raises(ValueError, match=r"chat_template='missing.jinja' cannot be read"):
        serve._with_template(serve.ServeOptions("x", chat_template="missing.jinja"), policy)


SIZES = {"vocab_size": 8, "num_layers": 32, "num_kv_heads": 4, "head_dim": 128}


@pytest.mark.parametrize(
    ("positions", "slots", "length"),
    [
        (None, 16, 1024),
        (512, 16, 512),
        (8192, 2, 8192),
        # 2 x 4 x 128 x 4 bytes in each of 32 layers: 128 KiB a token and slot.
        (8192, 16, 2048),
        (131072, 1024, 1024),
    ],
)
def test_the_default_length_is_the_networks_where_there_is_room(positions, slots, length):
    found, why = serve.choose_length(ModelConfig(**SIZES, max_positions=positions), slots)
    assert found == length
    assert bool(why) == (positions is not None and length < positions)
    if why:
        assert (
            f"length: {length} of the {positions} tokens" in why and f"--length {positions}" in why
        )
