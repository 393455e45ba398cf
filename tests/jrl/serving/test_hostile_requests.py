"""Requests that are large, costly or from a foreign page leave the others alone."""

import asyncio
import json
import threading
import time

import httpx
import pytest
from scripted import LENGTH, TOKENIZER, House, asking, until

from jrl.serving.api.fields import ApiError
from jrl.serving.application import SHORT_BODY
from jrl.serving.grammar import MAX_PROPERTIES, MAX_RULE, check_size
from jrl.serving.policy import ApiModel

HEALTH_SECONDS = 0.2


def test_a_prompt_with_more_characters_than_fit_is_refused_before_it_is_tokenized(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "encode", None)
    house = House(most_bytes=4000)
    answer = house.run(lambda c: c.post("/v1/completions", json=asking(prompt="a" * (40 * LENGTH))))
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert f"has {40 * LENGTH} characters" in error["message"]


@pytest.mark.parametrize("kind", ["tokenizing", "compiling"])
def test_long_requests_freeze_no_other(kind, monkeypatch):
    """Eight at a time, while the health is asked for and a text is generated."""
    house, may_go_on, begun = House(queue=8, most_bytes=2 * SHORT_BODY), threading.Event(), []
    prompts = ApiModel.prompts

    def wait(*_):
        begun.append(threading.current_thread())
        assert may_go_on.wait(20)
        raise ApiError(400, "it is refused")

    def prompts_of(self, request):
        return wait() if request.prompts == ("slow",) else prompts(self, request)

    monkeypatch.setattr(ApiModel, "prompts", prompts_of)
    monkeypatch.setattr(ApiModel, "grammar", wait)
    long = asking(prompt="slow", user="x" * SHORT_BODY)
    slow = long if kind == "tokenizing" else asking(guided_regex="a")

    async def scene(client):
        asked = [asyncio.create_task(client.post("/v1/completions", json=slow)) for _ in range(8)]
        await until(lambda: begun)
        answers = [await client.get("/health") for _ in range(3)]
        answers.append(await client.post("/v1/completions", json=asking()))
        assert not any(task.done() for task in asked)
        may_go_on.set()
        return answers, await asyncio.gather(*asked)

    try:
        answers, slow_answers = house.run(scene)
    finally:
        may_go_on.set()
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.status_code for answer in slow_answers} == {400}
    assert threading.main_thread() not in begun


@pytest.mark.slow
def test_health_answers_while_large_prompts_are_refused():
    """Of 1 MB, through the parser, on the machine's own cores."""
    house = House(most_bytes=2**21)

    async def scene(client):
        body = json.dumps(asking(prompt="a b " * 2**18)).encode()
        refused = [
            asyncio.create_task(client.post("/v1/completions", content=body)) for _ in range(4)
        ]
        seconds = []
        while not all(task.done() for task in refused):
            begin = time.perf_counter()
            assert (await client.get("/health")).status_code == 200
            seconds.append(time.perf_counter() - begin)
            await asyncio.sleep(0)
        return [task.result().status_code for task in refused], max(seconds)

    statuses, longest = house.run(scene)
    assert statuses == [400] * 4 and longest < HEALTH_SECONDS


def test_rules_that_take_long_to_compile_are_refused():
    properties = {f"p{index}": {"type": "string"} for index in range(MAX_PROPERTIES + 1)}
    nested = {"type": "array", "items": {"type": "object", "properties": properties}}
    for value, message in (
        (nested, f"an object with {MAX_PROPERTIES + 1} properties"),
        ("a" * (MAX_RULE + 1), f"has {MAX_RULE + 1} characters"),
        ({"enum": ["a" * MAX_RULE]}, "characters"),
    ):
        with pytest.raises(ApiError, match=message) as refused:
            check_size("guided_json", value)
        assert refused.value.param == "guided_json"
    check_size("guided_json", {"properties": dict(list(properties.items())[1:])})


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("localhost:8000", {}, 200),
        ("127.0.0.1:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("10.0.0.7", {}, 200),
        ("app.localhost", {}, 200),
        ("evil.example", {}, 403),
        ("evil.example:8000", {}, 403),
        ("localhost.evil.example", {}, 403),
        ("127.0.0.1.evil.example", {}, 403),
        ("gpu7:8000", {"allowed_hosts": ("gpu7",)}, 200),
        ("GPU7", {"allowed_hosts": ("gpu7",)}, 200),
        ("evil.example", {"allowed_hosts": ("*",)}, 200),
        ("evil.example", {"api_key": "k"}, 200),
    ],
)
def test_a_foreign_host_is_refused_without_a_key(host, options, status):
    house = House(**options)

    async def scene(client: httpx.AsyncClient):
        headers = {"Host": host, "Authorization": "Bearer k"}
        return await client.get("/v1/models", headers=headers)

    answer = house.run(scene)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "foreign_host"
