"""Token ids in and out, with their log-probabilities, and the stops of vLLM's names."""

import json
from itertools import pairwise

import numpy as np
import pytest
from scripted import SAYS, TOKENIZER, House, Scripted, Turns, asking
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.rollout.adjustments import WORD_BITS
from jrl.serving.grammar import LeastTokens
from jrl.serving.policy import ApiModel
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

END = TOKENIZER.eos_id
IDS = TOKENIZER.with_prefix(TOKENIZER.encode("ab"))


def posted(house, path, body):
    return house.run(lambda client: client.post(path, json=body))


def chunks_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def choice_of(**more):
    """The only choice of a completion."""
    says = [*TOKENIZER.encode("bad cab "), END]
    house = House(engine=Scripted(2, says, (END,)))
    answer = posted(house, "/v1/completions", asking(max_tokens=20, **more))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0], says


@pytest.mark.parametrize("stop", [None, "d c", "a"])
def test_token_ids_are_those_that_were_sampled(stop):
    choice, says = choice_of(return_token_ids=True, logprobs=0, stop=stop)
    assert choice["prompt_token_ids"] == IDS
    ids, logprobs = choice["token_ids"], choice["logprobs"]
    num_tokens = {None: 9, "d c": 5, "a": 2}[stop]
    assert ids == says[:num_tokens]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == num_tokens
    assert choice["text"] == {None: "bad cab ", "d c": "ba", "a": "b"}[stop]


def test_streams_have_the_token_ids_of_the_whole_answer():
    whole, _ = choice_of(return_token_ids=True, logprobs=1)
    house = House(engine=Scripted(2, [*TOKENIZER.encode("bad cab "), END], (END,)))
    body = asking(max_tokens=20, return_token_ids=True, logprobs=1, stream=True)
    choices = [x["choices"][0] for x in chunks_of(posted(house, "/v1/completions", body).text)]
    assert choices[0]["prompt_token_ids"] == IDS
    assert [i for x in choices for i in x.get("token_ids", ())] == whole["token_ids"]
    assert "".join(x["text"] for x in choices) == whole["text"]
    tokens = [i for x in choices if x["logprobs"] for i in x["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_tokens_are_named_by_their_ids():
    choice, says = choice_of(return_tokens_as_token_ids=True, logprobs=1)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in says[:8]]
    assert all(
        set(x) == {t}
        for x, t in zip(
            choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"], strict=True
        )
    )


@pytest.mark.parametrize(
    ("given", "text", "finish"),
    [
        ({"stop_token_ids": TOKENIZER.encode("d")}, "ba", "stop"),
        (
            {"stop_token_ids": TOKENIZER.encode("d"), "include_stop_str_in_output": True},
            "bad",
            "stop",
        ),
        ({"stop": "d c", "include_stop_str_in_output": True}, "bad c", "stop"),
        ({"stop": "a", "min_tokens": 3}, "bad c", "stop"),
        ({"stop_token_ids": TOKENIZER.encode("b"), "min_tokens": 1}, "bad ca", "stop"),
        ({}, "bad cab ", "stop"),
    ],
)
def test_stops_end_a_choice(given, text, finish):
    choice, _ = choice_of(**given)
    assert (choice["text"], choice["finish_reason"]) == (text, finish)


def adjustments_of(**given):
    house, asked = House(), []
    submit = house.engine.submit
    house.engine.submit = lambda requests: (asked.extend(requests), submit(requests))
    assert posted(house, "/v1/completions", asking(**given)).status_code == 200
    return asked[0].sampling.adjustments


def test_ends_that_are_ignored_are_never_sampled():
    adjustments = adjustments_of(ignore_eos=True, logit_bias={"5": 1})
    assert dict(adjustments.biases) == {5: 1.0, **dict.fromkeys(TOKENIZER.stop_ids, -np.inf)}


def allowed_of(constraint):
    return set(
        np.flatnonzero(np.unpackbits(constraint.allowed().view(np.uint8), bitorder="little"))
    )


def test_no_end_is_allowed_before_the_least_tokens():
    constraint = adjustments_of(min_tokens=2, stop_token_ids=[5]).constraint
    everything = set(range(TOKENIZER.vocab_size))
    for _ in range(2):
        assert allowed_of(constraint) == everything - {*TOKENIZER.stop_ids, 5}
        constraint.accept([6])
    assert allowed_of(constraint) == everything


def test_a_grammar_that_is_at_its_end_ends_before_the_least_tokens():
    class Ended:
        failure = None

        def allowed(self):
            return np.array([1 << 3, 0], np.uint32)

        def accept(self, tokens):
            assert tokens == [7]

    constraint = LeastTokens(5, (3,), 2 * WORD_BITS, Ended())
    assert allowed_of(constraint) == {3}
    constraint.accept([7])


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_a_prompt_come_by_token_id(top):
    choice, _ = choice_of(prompt_logprobs=top)
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(IDS) - 1
    for (before, token), entry in zip(pairwise(IDS), others, strict=True):
        value = entry[str(token)]
        assert value["logprob"] == pytest.approx(-(token + before / 100))
        assert value["decoded_token"] == TOKENIZER.decode([token])
        assert value["rank"] == token + 1
        assert set(entry) >= {str(4 + rank) for rank in range(top)}
        assert len(entry) <= top + 1


def test_generate_takes_and_returns_token_ids():
    says = [*TOKENIZER.encode("bad cab "), END]
    house = House(engine=Scripted(2, says, (END,)))
    parameters = {"max_tokens": 20, "logprobs": 1, "skip_special_tokens": False, "seed": 7}
    body = {"model": "m", "token_ids": IDS, "sampling_params": parameters, "cache_salt": "1"}
    answer = posted(house, "/inference/v1/generate", body).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == says and choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in says]
    assert all(np.isfinite(each["logprob"]) and each["logprob"] > -9999 for each in content)
    assert answer["request_id"] and answer["usage"]["completion_tokens"] == len(says)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "ab"}, "token_ids"),
        ({"token_ids": [9999]}, "prompt"),
        ({"stream": True}, "stream"),
        ({"priority": 3}, "priority"),
        ({"sampling_params": {"echo": True}}, "sampling_params.echo"),
        ({"sampling_params": {"what": 1}}, "what"),
        ({"features": {}}, "features"),
    ],
)
def test_generate_refuses_by_name(given, param):
    body = {"model": "m", "token_ids": IDS, **given}
    answer = posted(House(), "/inference/v1/generate", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_texts_and_conversations_are_tokenized_as_they_are_run(tmp_path):
    made = tool_tokenizer(tmp_path, TEMPLATES["hermes"].source)
    format = PromptFormat(made, ChatTemplate(made))
    house = House(served=ApiModel("m", format, 400, None, 0), most_bytes=2000)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}]

    async def scene(client):
        async def ask(path, **body):
            return (await client.post(path, json=body)).json()

        found = {
            "text": await ask("/tokenize", prompt="a b", return_token_strs=True),
            "opened": await ask("/tokenize", model="m", messages=messages),
            "closed": await ask("/tokenize", messages=messages, add_generation_prompt=False),
            "continued": await ask("/tokenize", messages=messages, continue_final_message=True),
            "wrong": await ask("/tokenize", prompt=["a"]),
            "unknown": await ask("/detokenize", tokens=[9999]),
        }
        tokens = {name: each["tokens"] for name, each in found.items() if "tokens" in each}
        texts = {n: (await ask("/detokenize", tokens=t))["prompt"] for n, t in tokens.items()}
        routes = [(await client.get(path)).status_code for path in ("/version", "/ping")]
        return found, texts, routes, (await client.post("/ping")).status_code

    found, texts, routes, ping = house.run(scene)
    assert found["text"]["token_strs"] == ["a", " ", "b"]
    assert (found["text"]["count"], found["text"]["max_model_len"]) == (3, 400)
    start = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n b "
    assert texts == {
        "text": "a b",
        "opened": f"{start}<|im_end|>\n<|im_start|>assistant\n",
        "closed": f"{start}<|im_end|>\n",
        "continued": start,
    }
    assert found["wrong"]["error"]["param"] == "prompt"
    assert found["unknown"]["error"]["param"] == "tokens"
    assert (routes, ping) == ([200, 200], 200)


def test_an_effort_that_a_template_does_not_read_is_refused(tmp_path):
    for source, status in ((TEMPLATES["hermes"].source, 400), ("{{ reasoning_effort }}", 200)):
        made = tool_tokenizer(tmp_path, source)
        served = ApiModel("m", PromptFormat(made, ChatTemplate(made)), 400, None, 0)
        body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"}
        answer = posted(House(served=served), "/tokenize", body)
        assert answer.status_code == status
        if status == 200:
            assert answer.json()["tokens"] == made.encode("low")
        else:
            assert answer.json()["error"]["param"] == "reasoning_effort"


def test_more_least_tokens_than_a_completion_may_have_are_refused():
    answer = posted(House(), "/v1/completions", asking(max_tokens=None, min_tokens=17))
    assert answer.json()["error"]["param"] == "min_tokens"


def test_a_token_outside_of_the_vocabulary_is_refused_as_a_stop():
    answer = posted(House(), "/v1/completions", asking(stop_token_ids=[9999], seed=len(SAYS)))
    assert answer.json()["error"]["param"] == "stop_token_ids"


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("says", "more", "kept"),
    [
        ("<think>a</think>It is 4.", {}, None),
        ("<think>a</think>It is 4.", {"include_reasoning": False}, None),
        (f"Look. {CALL}", {"tools": TOOLS}, None),
        (f"Look. {CALL} now", {"tools": TOOLS, "stop": "</tool_call> n"}, -3),
        ("It is 4.", {"stop": "is"}, len("It is")),
        ("It is 4.", {"max_tokens": 3}, 3),
        ("It<|im_start|> is", {}, None),
        ("\u00e4\u20ac", {"max_tokens": 4}, 4),
    ],
)
def test_token_ids_of_chats_are_those_that_were_sampled(says, more, kept, tmp_path):
    """With reasoning, calls, stops and limits, whole and streamed; each has a log-probability."""
    tokenizer = tool_tokenizer(tmp_path, TEMPLATES["hermes"].source)
    engine = Turns(tokenizer, [says])
    served = ApiModel("m", PromptFormat(tokenizer, ChatTemplate(tokenizer)), 4000, None, 0)
    house = House(served=served, engine=engine, most_bytes=9000)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "logprobs": True, **more}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}

    async def scene(client):
        path = "/v1/chat/completions"
        whole = await client.post(path, json=body)
        return whole.json(), await client.post(path, json={**body, "stream": True})

    whole, stream = house.run(scene)
    sampled = engine.texts[0][:kept]
    (choice,), chunks = whole["choices"], chunks_of(stream.text)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert choice["token_ids"] == [i for x in parts for i in x.get("token_ids", ())] == sampled
    named = [f"token_id:{token}" for token in sampled]
    assert [x["token"] for x in choice["logprobs"]["content"]] == named
    content = [i for x in parts if x["logprobs"] for i in x["logprobs"]["content"]]
    assert content == choice["logprobs"]["content"]
    assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == engine.prompts[0]
