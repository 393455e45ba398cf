"""Who is served, in which order and by which policy, with an engine that says what it is told."""

import asyncio
import json

import pytest
from scripted import LENGTH, House, asking, until

from jrl.serving import application
from jrl.serving.api.fields import ApiError


def events(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_and_its_stream_say_the_same():
    house, body = House(), asking(n=2, logprobs=0, stop=["ca"], max_tokens=9)

    async def scene(client):
        whole = await client.post("/v1/completions", json=body)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return whole, await client.post("/v1/completions", json=streamed)

    whole, streamed = house.run(scene)
    answer, chunks = whole.json(), events(streamed.text)
    assert [choice["text"] for choice in answer["choices"]] == ["bad ", "ad "]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    # "bad ca" and "ad ca": up to the token that completed the stop.
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 11,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["usage"] == chunks[-1]["usage"] == usage
    for index, choice in enumerate(answer["choices"]):
        parts = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == "stop"
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert [each for one in told for each in one[name]] == values
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert house.engine.num_live == 0
    assert house.number('jrl_choices_total{finish="stop"}') == 4
    assert house.number("jrl_generated_tokens_total") == 22


def test_usage_so_far_comes_with_each_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = asking(max_tokens=7, stream=True, stream_options=options)
    chunks = events(House().run(lambda client: client.post("/v1/completions", json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # Three tokens at a time, the end, and the usage alone.
    assert counts == [3, 6, 7, 7, 7]


def test_prompts_are_echoed_and_numbered_through():
    body = asking(prompt=["ab", "cd"], echo=True, n=2)
    answer = House(slots=4).run(lambda client: client.post("/v1/completions", json=body)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["abbad cab", "abad cab ", "cdd cab b", "cd cab ba"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_completion_without_a_limit_has_sixteen_tokens_or_what_there_is_room_for():
    async def scene(client):
        bodies = [{"model": "m", "prompt": "a" * length} for length in (1, 34)]
        return [(await client.post("/v1/completions", json=body)).json() for body in bodies]

    answers = House().run(scene)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [16, 5]


def test_more_than_may_wait_are_turned_away_and_nobody_is_lost():
    house = House(slots=2, queue=1)
    house.engine.held = True

    async def scene(client):
        calls = []
        for number in range(3):  # two are seated, one waits
            calls.append(asyncio.create_task(client.post("/v1/completions", json=asking())))
            seated = min(2, number + 1)
            await until(lambda n=seated: len(house.engine.sitting) == n)
            await until(lambda n=number + 1 - seated: house.number("jrl_queue_length") == n)
        refused = await client.post("/v1/completions", json=asking())
        house.engine.held = False
        return refused, await asyncio.gather(*calls)

    refused, answers = house.run(scene)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert house.number("jrl_queue_length") == 0 == house.number("jrl_slots_live")
    assert house.number('jrl_requests_total{endpoint="completions",status="200"}') == 3
    assert house.number('jrl_requests_total{endpoint="completions",status="429"}') == 1


def test_choices_are_what_is_counted():
    """A request of many does not pass for one, and what can never be taken is not asked again."""
    house = House(slots=2, queue=1)
    house.engine.held = True

    async def scene(client):
        many = asyncio.create_task(client.post("/v1/completions", json=asking(n=3)))
        await until(lambda: house.number("jrl_slots_live") == 2)
        assert house.number("jrl_queue_length") == 1
        refused = [await client.post("/v1/completions", json=asking(n=n)) for n in (1, 4)]
        house.engine.held = False
        return await many, *refused, await client.post("/v1/completions", json=asking())

    many, refused, never, later = house.run(scene)
    assert (many.status_code, later.status_code) == (200, 200)
    assert refused.status_code == 429
    message = "3 choices are decoded or queued already, of at most 3, and 1 more"
    assert message in refused.json()["error"]["message"]
    assert never.status_code == 400 and never.json()["error"]["code"] == "too_many_choices"
    assert "has 4 choices, n of each prompt, and this server takes 3" in never.text
    assert house.number("jrl_queue_length") == 0 == house.number("jrl_slots_live")


def test_the_end_of_a_choice_looks_at_no_other():
    class Counted(dict):
        looks = 0

        def __contains__(self, key):
            Counted.looks += 1
            return super().__contains__(key)

    house, n = House(slots=2, queue=62), 32
    house.service._choices = Counted()
    answer = house.run(
        lambda client: client.post(
            "/v1/completions", json=asking(prompt=["ab", "cd"], n=n, max_tokens=1)
        )
    )
    assert len(answer.json()["choices"]) == 2 * n
    assert Counted.looks <= 2 * n
    assert not house.service._choices and not house.service._jobs


def call(application, body, more_body=False):
    """A call whose client sends nothing after this, until it leaves; the event of that, what was
    sent to it, and the task."""
    gone, sent = asyncio.Event(), []
    first = [{"type": "http.request", "body": body, "more_body": more_body}]

    async def receive():
        if first:
            return first.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
    return gone, sent, asyncio.create_task(application(scope, receive, send))


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(application, "BODY_SECONDS", 0.05)
    house = House()

    async def scene(client):
        _, sent, task = call(house.application, b"{", more_body=True)
        await asyncio.wait_for(task, 5)
        return sent

    start, answer = house.run(scene)
    error = json.loads(answer["body"])["error"]
    assert start["status"] == 408 and (b"connection", b"close") in start["headers"]
    assert error["message"].startswith("1 bytes of the body came within 0.05 s, and not its end")
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")
    assert house.number('jrl_requests_total{endpoint="completions",status="408"}') == 1
    assert house.front.num_open == 0


def test_who_leaves_frees_a_slot_and_a_place_in_the_queue():
    """The first client leaves while it is served, the second while it waits."""
    house = House(slots=1, queue=5)
    house.engine.held = True

    async def scene(client):
        left = []
        for number in range(2):
            left.append(call(house.application, json.dumps(asking()).encode()))
            await until(lambda: house.engine.sitting)
            await until(lambda n=number: house.number("jrl_queue_length") == n)
        for gone, _, task in left:
            gone.set()
            await task
        house.engine.held = False
        answer = await client.post("/v1/completions", json=asking())
        return answer, [sent for _, sent, _ in left]

    answer, sent = house.run(scene)
    assert answer.status_code == 200 and sent == [[], []]
    assert house.number('jrl_requests_total{endpoint="completions",status="gone"}') == 2
    assert house.engine.num_live == 0 == house.number("jrl_queue_length")


def test_a_later_policy_waits_for_what_runs_and_those_who_wait_get_it():
    house = House(slots=1, queue=5, api_key="k")
    house.engine.held = True
    head = {"Authorization": "Bearer k"}

    async def scene(client):
        post = client.post
        early = asyncio.create_task(post("/v1/completions", json=asking(), headers=head))
        await until(lambda: house.engine.sitting)
        house.versions.version = 5
        load = asyncio.create_task(post("/v1/load", headers=head))
        await until(lambda: house.service._loads)
        late = asyncio.create_task(post("/v1/completions", json=asking(), headers=head))
        await until(lambda: house.number("jrl_queue_length") == 1)
        assert not load.done() and house.engine.loaded == [0]
        house.engine.held = False
        answers = [(await each).json() for each in (early, load, late)]
        house.versions.error = ValueError("it is damaged")
        answers.append((await post("/v1/load", headers=head)).json())
        still = (await post("/v1/completions", json=asking(), headers=head)).json()
        return [*answers, still]

    early, load, late, failed, still = house.run(scene)
    assert early["system_fingerprint"] == "step-0"
    assert load == {"version": 5, "system_fingerprint": "step-5"}
    assert late["system_fingerprint"] == still["system_fingerprint"] == "step-5"
    assert failed["error"]["message"] == "no policy could be loaded: it is damaged"
    assert house.number('jrl_policy_loads_total{outcome="failed"}') == 1


@pytest.mark.parametrize("where", ["versions", "engine"])
def test_whatever_a_load_fails_by_the_policy_before_goes_on(where):
    house = House(api_key="k")
    head = {"Authorization": "Bearer k"}

    async def scene(client):
        house.versions.version = 5
        house.engine.has_no_room = where == "engine"
        if where == "versions":
            house.versions.error = RuntimeError("RESOURCE_EXHAUSTED: no room\nfor two policies")
        failed = await client.post("/v1/load", headers=head)
        # An engine that gave the policy up gets it again.
        assert house.engine.loaded == [0]
        answer = await client.post("/v1/completions", json=asking(), headers=head)
        house.versions.error = None
        return failed, answer, await client.post("/v1/load", headers=head)

    failed, answer, loaded = house.run(scene)
    said = "no policy could be loaded: RuntimeError: RESOURCE_EXHAUSTED: no room for two policies"
    assert (failed.status_code, failed.json()["error"]["message"]) == (409, said)
    assert answer.json()["system_fingerprint"] == "step-0"
    assert loaded.json()["version"] == 5


def test_what_few_need_is_compiled_while_nobody_asks():
    house = House(warm_up=True)

    async def scene(client):
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=asking()) for _ in range(3))
        )
        assert [answer.json()["choices"][0]["text"] for answer in answers] == ["bad cab"] * 3
        await until(lambda: house.service.num_uncompiled == 0)
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert house.number("jrl_uncompiled") == 0

    house.run(scene)
    # Prompts as wide as fit into each size of the cache, and two of them.
    assert {LENGTH // 2 - 1, LENGTH - 1} <= {length for length, _ in house.engine.asked}
    assert house.number("jrl_generated_tokens_total") == 3 * 7, "trials are no requests"


def test_an_engine_that_fails_says_so_to_everyone():
    house = House()
    house.engine.error = RuntimeError("no memory")

    async def scene(client):
        first = await client.post("/v1/completions", json=asking())
        await until(lambda: house.service.ended)
        return (
            first,
            await client.post("/v1/completions", json=asking()),
            await client.get("/health"),
        )

    first, second, health = house.run(scene)
    assert [first.status_code, second.status_code, health.status_code] == [500, 500, 503]
    assert first.json()["error"]["message"] == "the engine has failed: no memory"
    assert isinstance(house.service.failure, RuntimeError)
    with pytest.raises(ApiError, match="the engine has failed: restart the server"):
        house.service.load()


@pytest.mark.parametrize(
    ("holder", "name"), [(application, "parse_completion"), (application.ResponseBuilder, "body")]
)
def test_a_mistake_of_the_server_is_in_openais_form_and_counted(holder, name, monkeypatch):
    def broken(*arguments):
        raise KeyError("a mistake")

    monkeypatch.setattr(holder, name, broken)
    house = House()
    answer = house.run(lambda client: client.post("/v1/completions", json=asking()), raises=False)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "server_error")
    assert "internal server error" in error["message"]
    assert house.number('jrl_requests_total{endpoint="completions",status="500"}') == 1
    # What logs it gets to know it.
    with pytest.raises(KeyError, match="a mistake"):
        House().run(lambda client: client.post("/v1/completions", json=asking()))


def test_a_server_that_ends_takes_nothing_more_and_finishes_what_runs():
    house = House()
    house.engine.held = True

    async def scene(client):
        running = asyncio.create_task(client.post("/v1/completions", json=asking()))
        await until(lambda: house.engine.sitting)
        house.service.close()
        refused = await client.post("/v1/completions", json=asking())
        health = await client.get("/health")
        house.engine.held = False
        return await running, refused, health

    running, refused, health = house.run(scene)
    assert (running.status_code, refused.status_code, health.status_code) == (200, 503, 503)
    assert refused.json()["error"]["code"] == "server_ending"


@pytest.mark.parametrize(
    ("path", "given", "status", "message"),
    [
        ("/v1/completions", {"json": asking(model="x")}, 404, "model='x' is not served here"),
        ("/v1/completions", {"content": b"{"}, 400, "the body is not JSON"),
        ("/v1/completions", {"content": b"[]"}, 400, "a JSON list, not an object"),
        ("/v1/completions", {"content": rb'{"model": "m", "\ud800": 1}'}, 400, r"body has \ud800,"),
        (
            "/v1/completions",
            {"content": rb'{"prompt": ["\udc0f"]}'},
            400,
            r"has \udc0f, a lone UTF-16 surrogate",
        ),
        ("/v1/completions", {"content": b'{"user": "\xed\xa0\x80"}'}, 400, r"body has \ud800,"),
        ("/v1/completions", {"json": asking(prompt="a" * 400)}, 413, "more than 400 bytes"),
        ("/v1/completions", {"json": asking(prompt="x")}, 400, "the character 'x'"),
        ("/v1/completions", {"json": asking(prompt=[99])}, 400, "prompt has 99, an id that no"),
        (
            "/v1/completions",
            {"json": asking(prompt="a" * 34)},
            400,
            "has 35 tokens and max_tokens=7, 42 in all, and the model is served with a length of",
        ),
        ("/v1/completions", {"json": asking(max_tokens=31)}, 400, "request at most 30"),
        (
            "/v1/chat/completions",
            {"json": {"model": "m", "messages": [{"role": "user", "content": "a"}]}},
            400,
            "has no chat template",
        ),
        ("/v1/load", {}, 403, "this server has none"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/chat/completions", {}, 404, "set the base_url of a client to end in /v1"),
    ],
)
def test_refusals_are_in_openais_form(path, given, status, message):
    answer = House().run(lambda client: client.post(path, **given))
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


def test_the_key_is_asked_for():
    house = House(api_key="k")

    async def scene(client):
        wrong = {"Authorization": "Bearer x"}
        answers = [await client.post("/v1/completions", json=asking(), headers=wrong)]
        answers += [await client.get(path) for path in ("/v1/models", "/health", "/metrics")]
        right = {"Authorization": "Bearer k"}
        answers += [await client.get(path, headers=right) for path in ("/metrics", "/v1/models")]
        return answers

    answers = house.run(scene)
    assert [answer.status_code for answer in answers] == [401, 401, 200, 401, 200, 200]
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert answers[2].json() == {"status": "ok"}, "it says more than strangers need"
    assert b"jrl_slots" not in answers[3].content and b"jrl_slots" in answers[4].content
    assert answers[-1].json()["data"][0]["id"] == "m"


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "http://page", None),
        (("http://page",), "http://page", "http://page"),
        (("http://page",), "http://other", None),
        (("*",), "null", "*"),
    ],
)
def test_a_web_page_reads_answers_if_its_origin_is_allowed(origins, origin, allowed):
    """Also if a key is required: a browser asks with none first, and shows an error's text."""
    house, header = House(api_key="k", allowed_origins=origins), "access-control-allow-origin"
    headers = {"Origin": origin}
    preflight = headers | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }

    async def scene(client):
        asked = await client.options("/v1/completions", headers=preflight)
        refused = await client.post("/v1/completions", json=asking(), headers=headers)
        headers["Authorization"] = "Bearer k"
        body = asking(stream=True)
        return asked, refused, await client.post("/v1/completions", json=body, headers=headers)

    asked, refused, answer = house.run(scene)
    assert [asked.is_success, refused.status_code, answer.status_code] == [
        allowed is not None,
        401,
        200,
    ]
    assert {each.headers.get(header) for each in (asked, refused, answer)} == {allowed}


def test_metrics_need_no_key_where_there_is_none():
    answer = House().run(lambda client: client.get("/metrics"))
    assert answer.status_code == 200 and "jrl_uncompiled" in answer.text
