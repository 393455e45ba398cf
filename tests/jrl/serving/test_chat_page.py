"""The chat page in a browser: streams, reasoning, tool calls, a key, and markup that stays text."""

import json
import os
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from chromium import Chromium, find_browser
from scripted import House, Turns
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.serving.policy import ApiModel
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

BROWSER = find_browser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None and "JRL_GATE" not in os.environ, reason="needs a Chromium"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script> & <b>"
DONE = """new Promise((done, failed) => {
  const until = Date.now() + 15000;
  const wait = () => {
    if (CONDITION) done(true);
    else if (Date.now() > until) failed(new Error("CONDITION"));
    else setTimeout(wait, 20);
  };
  setTimeout(wait, 20);
})"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("turns"), TEMPLATES["hermes"].source)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert BROWSER is not None, "the gate has no Chromium: apt-get install chromium"
    browser = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@contextmanager
def page(browser, tokenizer, *texts, key=None):
    """The page of a server whose policy says these texts in turn."""
    engine = Turns(tokenizer, texts)
    served = ApiModel("m", PromptFormat(tokenizer, ChatTemplate(tokenizer)), 4000, None, 0)
    house = House(engine=engine, served=served, most_bytes=9000, api_key=key)
    config = uvicorn.Config(house.application, port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
        browser.complaints.clear()
        browser.requests.clear()
        browser.open(address, 900, 700)
        yield engine
        assert all(url.startswith((address, "data:")) for url in browser.requests)
    finally:
        engine.held = False
        server.should_exit = True
        thread.join(20)
        house.service.close()
        house.service.join(5.0)


def fill(browser, identity, text):
    browser.evaluate(f"document.getElementById({identity!r}).value = {json.dumps(text)}")


def say(browser, text, condition="!document.getElementById('send').hidden"):
    fill(browser, "text", text)
    browser.evaluate("document.getElementById('form').requestSubmit()")
    wait(browser, condition)


def wait(browser, condition):
    assert browser.evaluate(DONE.replace("CONDITION", condition))


def texts(browser, selector):
    return browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].map((x) => x.textContent)"
    )


def test_answers_stream_and_the_conversation_is_sent(browser, tokenizer):
    with page(browser, tokenizer, "<think>two and two</think>It is 4.", "Yes.") as engine:
        wait(browser, "document.title === 'm'")
        say(browser, "2+2?")
        assert texts(browser, "details.reasoning > .text") == ["two and two"]
        assert browser.evaluate("document.querySelector('details.reasoning').open") is False
        say(browser, "Sure?")
        assert texts(browser, ".assistant > .text") == ["It is 4.", "Yes."]
        prompt = tokenizer.decode_special(engine.prompts[1])
        assert "user\n2+2?<" in prompt and "assistant\nIt is 4.<" in prompt
        assert browser.complaints == []


def test_markup_of_a_model_is_text(browser, tokenizer):
    with page(browser, tokenizer, MARKUP):
        say(browser, "<i>a</i>")
        assert texts(browser, ".assistant > .text") == [MARKUP]
        assert texts(browser, ".user") == ["<i>a</i>"]
        assert browser.evaluate("document.querySelectorAll('main img, main i, main b').length") == 0
        assert browser.evaluate("document.title") == "m"


def test_calls_are_shown_and_answered(browser, tokenizer):
    with page(browser, tokenizer, CALL, "It is 7.") as engine:
        fill(browser, "arguments", json.dumps({"tools": [TOOL], "temperature": 0}))
        say(browser, "Call.")
        assert texts(browser, ".call") == ['f({"x": 1})']
        assert browser.evaluate("document.getElementById('text').placeholder") == "Output of f"
        say(browser, "7")
        assert texts(browser, ".assistant > .text") == ["It is 7."]
        assert "<tool_response>\n7\n" in tokenizer.decode_special(engine.prompts[1])


def test_stop_ends_an_answer_and_errors_are_shown(browser, tokenizer):
    with page(browser, tokenizer, "It is 4.") as engine:
        engine.held = True
        say(browser, "2+2?", "!document.getElementById('stop').hidden")
        browser.evaluate("document.getElementById('stop').click()")
        wait(browser, "!document.getElementById('send').hidden")
        engine.held = False
        fill(browser, "arguments", '{"temperature": 9}')
        say(browser, "2+2?")
        fill(browser, "arguments", "{")
        say(browser, "2+2?")
        first, second = texts(browser, ".error.text")
        assert "temperature=9 must be" in first and "JSON" in second
        fill(browser, "arguments", "")
        say(browser, "2+2?")
        assert texts(browser, ".assistant > .text") == ["It is 4."]


def test_key_is_requested_and_sent(browser, tokenizer):
    with page(browser, tokenizer, "It is 4.", key="secret"):
        wait(browser, "!document.getElementById('keyed').hidden")
        fill(browser, "key", "secret")
        say(browser, "2+2?")
        assert texts(browser, ".assistant > .text") == ["It is 4."]
