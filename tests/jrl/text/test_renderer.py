"""Chat templates in a process with limits: what they may take, and that they write the same."""

import datetime
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from chat_checkpoint import chat_tokenizer
from confinement import wait_until

from jrl.config.run import RunConfig
from jrl.tasks.data.conversations import Conversation
from jrl.tasks.tools.calls import Arguments
from jrl.text import chat
from jrl.text import template_program as program
from jrl.text.chat import ChatTemplate, Renderer, TemplateLimit, TemplateSyntax, with_turn_end
from jrl.text.prompt_format import PromptFormat, prompt_format, template_file, with_template

DAY = "2026-11-25"
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
ASKED = Conversation.from_pairs([("user", "2+2?")])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("checkpoint") / "qwen")


@pytest.fixture
def process(monkeypatch):
    """A process of the test's own, which waits for a fifth of a second."""
    made = chat.worker(0.2)
    monkeypatch.setattr(chat, "_worker", lambda: made)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOPS, r"took more than 0\.2 seconds"),
        ("{% set n = 10**8 %}{{ n ** n }}", r"took more than 0\.2 seconds"),
        ("{{ messages | tojson(indent=10**10) }}", "needed more than 1024 MB of memory"),
        ("{{ 'x' * 10**10 }}", "needed more than 1024 MB of memory"),
        ("{{ messages[0].content * 10**9 }}", "needed more than 1024 MB of memory"),
        ("{{ messages[0].content * 10**6 }}", "wrote 4000000 characters, which is too many,"),
    ],
)
def test_what_a_template_may_take(process, tokenizer, source, message):
    template = of(tokenizer, source)
    expected = (
        rf"the chat template DIR/chat\.jinja {message} for the messages "
        r'\[\["user", "2\+2\?"\]\]: fix it, or give another template with --chat-template FILE\.$'
    )
    with pytest.raises(TemplateLimit, match=expected) as raised:
        template.render(ASKED)
    assert "\n" not in str(raised.value)
    # The others go on, whether the process did or not.
    assert of(tokenizer, "{{ messages[0].content }}").render(ASKED) == "2+2?"


def of(tokenizer, source):
    usage = replace(tokenizer.usage, chat_template=source, chat_date=DAY)
    return ChatTemplate(tokenizer.with_usage(usage), "DIR/chat.jinja")


def test_to_be_compiled_is_limited_too(process, tokenizer):
    source = "{{ " + "+".join(["range(9)|list"] * 20000) + " }}"
    with pytest.raises(
        TemplateLimit, match=r"DIR/chat\.jinja took more than 0\.2 .* compiled: fix"
    ):
        of(tokenizer, source)


def test_a_call_that_does_not_come_back_is_ended(monkeypatch):
    made = chat.worker(1000)
    monkeypatch.setattr(chat, "_worker", lambda: made)
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    try:
        hangs, works = Renderer(LOOPS, DAY), Renderer("{{ a }}", DAY)
        with pytest.raises(TemplateLimit, match=r"^took more than 0\.5 seconds$"):
            hangs.render([{}])
        monkeypatch.undo()
        assert works.render([{"a": 1}]) == ["1"]
    finally:
        made.close()


def test_a_process_that_is_gone_is_started_again(process):
    made = Renderer("{{ a }}", DAY)
    assert made.render([{"a": 1}]) == ["1"]
    ended = process._process
    ended.kill()
    ended.wait()
    assert made.render([{"a": 2}]) == ["2"]
    assert process._process is not ended


def test_a_template_that_was_dropped_is_compiled_again(process):
    made = [Renderer(f"{{{{ a }}}}{number}", DAY) for number in range(program.MAX_COMPILED + 2)]
    found = [each.render([{"a": "n"}]) for each in made]
    assert found == [[f"n{i}"] for i in range(len(made))]


def test_several_threads(process):
    def render(number):
        return Renderer(f"{{{{ a }}}}{number % 3}", DAY).render([{"a": number}])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(render, range(40))) == [[f"{i}{i % 3}"] for i in range(40)]


def test_values_come_as_they_are(process):
    given = {
        "texts": ["é\u2028\x00", "\ud800", "\U0001f58a", ""],
        "numbers": [2**80, -0.0, 1e-320, 0.1, True, None],
        "mapping": {"b": {"z": 1}, "a": ()},
    }
    source = "{{ texts | tojson(true) }} {{ numbers }} {{ mapping }} {{ other }} {{ day }}"
    assert Renderer(source, DAY).render(
        [{**given, "other": math.nan, "day": datetime.date(2026, 11, 25)}]
    ) == [
        f"{json.dumps(given['texts'])} {given['numbers']} {{'b': {{'z': 1}}, 'a': []}} "
        "nan 2026-11-25"
    ]
    with pytest.raises(ValueError, match="a object cannot be written as JSON"):
        Renderer("", DAY).render([{"a": object()}])


def test_arguments_of_calls_are_mappings_and_texts(process):
    call = {"function": {"name": "f", "arguments": Arguments({"a": 1}, '{"a":1}')}}
    older = {"name": "g", "arguments": Arguments({})}
    source = "{% for m in messages %}{{ m }}{% endfor %}"
    source += "{{ 'x' + messages[1].tool_calls[0].function.arguments }}"
    source += "{{ messages[1].tool_calls[0].function.arguments.a }}{{ messages[2].function_call }}"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "function_call": older},
    ]
    here = program.compile_template(source, datetime.datetime(2026, 11, 25), None)
    expected = here.render(messages=messages)
    given = [{"messages": messages[:1], "a": 1}, {"messages": messages}]
    refused, found = Renderer(source, DAY).render(given)
    assert found == expected and "no element 1" in str(refused)


def test_a_source_that_is_no_template(process):
    with pytest.raises(TemplateSyntax) as raised:
        Renderer("a\n{% if %}", DAY)
    assert raised.value.line == 2 and "Expected" in raised.value.message


@pytest.mark.slow
def test_a_limit_is_no_answer_to_what_is_asked_of_a_template(process, tokenizer):
    """Of a template that refuses a system message it is told that it writes none: not of one that
    took too long this time."""
    slow = of(tokenizer, LOOPS)
    for ask in (
        lambda: slow.turn_suffix,
        lambda: slow.generation_prompt(ASKED),
        lambda: PromptFormat(tokenizer, slow)._takes_system,
    ):
        with pytest.raises(TemplateLimit):
            ask()


@pytest.mark.slow
def test_a_run_names_the_file(process, tokenizer, tmp_path):
    """The template of a checkpoint too; and one that the run does not use keeps nobody waiting."""
    path = tmp_path / "own.jinja"
    path.write_text(LOOPS)
    with pytest.raises(TemplateLimit, match=f"the chat template {path} took"):
        with_template(RunConfig(chat_template=str(path)), tokenizer)
    usage = replace(tokenizer.usage, chat_template=LOOPS, turn_end=None)
    theirs = tokenizer.with_usage(usage)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    run = RunConfig(model=f"hf:{tmp_path}")
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(TemplateLimit, match=f"the chat template {config} took"):
        with_template(run, theirs)
    with pytest.raises(TemplateLimit, match=f"the chat template {config} took"):
        prompt_format(run, theirs).template.render(ASKED)
    assert with_turn_end(theirs) is theirs
    assert with_template(replace(run, chat_template="none"), theirs) is theirs
    (tmp_path / "chat_template.jinja").touch()
    assert template_file(run) == str(tmp_path / "chat_template.jinja")
    assert template_file(RunConfig()) is None


TRAINER = """
import sys, time
from jrl.text.chat import Renderer
print(*Renderer("{{ a }}", "2026-11-25").render([{"a": 1}]), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_process_ends_with_a_trainer_that_is_killed():
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert trainer.stdout.readline() == b"1\n"
        (child,) = psutil.Process(trainer.pid).children()
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not child.is_running(), "the process goes on")
    finally:
        trainer.stdout.close()
        if trainer.poll() is None:
            os.killpg(trainer.pid, signal.SIGKILL)
