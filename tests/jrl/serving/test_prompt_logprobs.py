"""Log-probabilities of prompts, as evaluation harnesses ask for them: echo with logprobs."""

import asyncio
import json
import threading
from itertools import pairwise

import pytest
from scripted import TOKENIZER, House, asking, until

PROMPTS = ["abc", "hh de"]


def ids_of(prompt):
    return TOKENIZER.with_prefix(TOKENIZER.encode(prompt))


def expected(prompt):
    ids = ids_of(prompt)
    return [None, *(-(b + a / 100) for a, b in pairwise(ids))]


def chunks_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
@pytest.mark.parametrize("top", [0, 2])
def test_a_prompt_comes_with_the_log_probability_of_each_of_its_tokens(max_tokens, top):
    body = asking(prompt=PROMPTS, n=2, echo=True, logprobs=top, max_tokens=max_tokens)
    house = House(slots=2, queue=2)

    async def scene(client):
        whole = await client.post("/v1/completions", json=body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return whole, await client.post("/v1/completions", json={**body, **options})

    whole, streamed = house.run(scene)
    answer, chunks = whole.json(), chunks_of(streamed.text)
    tokens = sum(len(ids_of(prompt)) for prompt in PROMPTS)
    usage = {"prompt_tokens": tokens, "completion_tokens": 4 * max_tokens}
    usage["total_tokens"] = sum(usage.values())
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    assert answer["usage"] == chunks[-1]["usage"] == usage
    for choice in answer["choices"]:
        prompt, logprobs = PROMPTS[choice["index"] // 2], choice["logprobs"]
        assert choice["text"].startswith(prompt) and choice["finish_reason"] == "length"
        # The beginning of sequence has a name and no text, all others are one character each.
        assert logprobs["tokens"] == ["<s>", *choice["text"]]
        assert logprobs["text_offset"] == [0, *range(len(choice["text"]))]
        generated = [-0.5] * max_tokens
        assert logprobs["token_logprobs"] == pytest.approx([*expected(prompt), *generated])
        assert logprobs["top_logprobs"][0] is None
        for token, found in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert token in found
        if top:
            # Of the second place: the first may be the prompt's own token, which has its own value.
            assert logprobs["top_logprobs"][1][TOKENIZER.decode([5])] == -2.0
        parts = [c["choices"][0] for c in chunks[:-1]]
        parts = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in logprobs.items():
            told = [part["logprobs"][name] for part in parts if part["logprobs"]]
            assert [each for one in told for each in one] == values
    assert house.engine.scored == [[4, 6]] * 2, "the choices of a prompt share its scores"
    assert house.number('jrl_choices_total{finish="length"}') == 8
    assert house.number("jrl_queue_length") == 0 == house.number("jrl_slots_live")


def test_nothing_but_the_prompt_is_returned_where_no_token_is_asked_for():
    house = House()

    async def scene(client):
        bodies = [asking(max_tokens=0, echo=echo) for echo in (False, True)]
        # As long as the context: there is no token to come.
        bodies.append(asking(max_tokens=0, prompt="a" * 39, echo=True, logprobs=1))
        return [(await client.post("/v1/completions", json=body)).json() for body in bodies]

    none, echo, full = house.run(scene)
    assert [each["choices"][0]["text"] for each in (none, echo)] == ["", "ab"]
    assert none["usage"]["completion_tokens"] == 0
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 40
    assert house.engine.asked == []


def test_prompts_are_scored_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr("jrl.serving.prompt_scoring.MAX_TOKENS_PER_PASS", 8)
    house = House(slots=2, queue=20)

    async def scene(client):
        body = asking(prompt=["ab", "abcd", "abc", "a" * 9, "ab"], echo=True, logprobs=1)
        return (await client.post("/v1/completions", json={**body, "max_tokens": 1})).json()

    answer = house.run(scene)
    assert house.engine.scored == [[3, 5], [4], [10], [3]]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert lengths == [4, 6, 5, 11, 4]


def test_a_client_that_leaves_while_its_prompts_are_scored_is_gone(monkeypatch):
    monkeypatch.setattr("jrl.serving.prompt_scoring.MAX_TOKENS_PER_PASS", 2)
    house = House(slots=2, queue=30)
    score, count = house.engine.score, 0

    def slow(prompts, needs_top_tokens=False):
        nonlocal count
        count += 1
        house.pause.wait(0.02)
        return score(prompts, needs_top_tokens)

    house.pause, house.engine.score = threading.Event(), slow

    async def scene(client):
        body = asking(prompt=["ab"] * 30, echo=True, logprobs=1, max_tokens=0)
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: count > 1)
        task.cancel()
        first = asking(max_tokens=2)
        answer = await client.post("/v1/completions", json=first)
        await until(lambda: house.number("jrl_queue_length") == 0)
        return answer

    assert house.run(scene).status_code == 200


def test_devices_that_do_not_score_say_so():
    house = House()
    house.engine.scores_prompts = False

    async def scene(client):
        body = asking(echo=True, logprobs=1)
        return await client.post("/v1/completions", json=body)

    error = house.run(scene).json()["error"]
    assert error["param"] == "echo" and "serve without --split" in error["message"]
