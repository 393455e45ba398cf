"""Conversations in the terminal: answers, folded reasoning, tools, commands and errors."""

import io
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from scripted import Newer, Turns
from tool_templates import TEMPLATES, tool_tokenizer

from jrl.serving.chat.conversation import Conversation, ToolOutput
from jrl.serving.chat.terminal import Terminal, printable
from jrl.serving.metrics import NoMetrics
from jrl.serving.policy import ApiModel
from jrl.serving.service import Service
from jrl.tasks.tools.calculator import CALCULATOR
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "3+4"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tool_tokenizer(tmp_path_factory.mktemp("turns"), TEMPLATES["hermes"].source)


@contextmanager
def conversing(tokenizer, *texts, length=4000, **fields):
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer))
    engine, served = Turns(tokenizer, texts), ApiModel("m", format, length, None, 0)
    service = Service(engine, served, Newer(), NoMetrics(), queue=0, window=3)
    service.start(warm_up=False)
    try:
        yield Conversation(service, served, **fields), engine
    finally:
        engine.held = False
        service.close()
        service.join(5.0)
        assert service.ended


def typed(conversation, lines, **options):
    """What the terminal prints for lines of input."""
    output = io.StringIO()
    Terminal(conversation, io.StringIO(lines), output, **options).run()
    return output.getvalue()


def test_answer_streams_and_conversation_continues(tokenizer):
    with conversing(tokenizer, "It is 4.", "Yes.", system="Be short.") as (conversation, engine):
        parts = list(conversation.answer("2+2?"))
        assert len(parts) > 1 and "".join(part.content for part in parts) == "It is 4."
        assert "".join(part.content for part in conversation.answer("Sure?")) == "Yes."
        prompt = tokenizer.decode_special(engine.prompts[1])
    turns = ("system\nBe short.", "user\n2+2?", "assistant\nIt is 4.", "user\nSure?", "assistant\n")
    assert [turn.removesuffix("<|im_end|>\n") for turn in prompt.split("<|im_start|>")[1:]] == [
        *turns
    ]


def test_tool_calls_run_and_their_outputs_are_in_the_next_prompt(tokenizer):
    with conversing(tokenizer, CALL, "It is 7.", tools=[CALCULATOR]) as (conversation, engine):
        parts = list(conversation.answer("3+4?"))
        assert ToolOutput("7") in parts
        assert [call.name for part in parts[:-1] if part != ToolOutput("7") for call in part.calls]
        assert "<tool_response>\n7\n" in tokenizer.decode_special(engine.prompts[1])
        roles = [message["role"] for message in conversation.messages]
        assert roles == ["user", "assistant", "tool", "assistant"]


def test_policy_that_only_calls_is_ended(tokenizer):
    with conversing(tokenizer, CALL, tools=[CALCULATOR]) as (conversation, engine):
        assert list(conversation.answer("3+4?")).count(ToolOutput("7")) == len(engine.prompts) == 9


def test_answer_that_is_stopped_is_kept_and_its_slot_is_free(tokenizer):
    with conversing(tokenizer, "one two three four", CALL) as (conversation, _):
        with closing(conversation.answer("Count.")) as parts:
            first = next(parts).content
        assert conversation.messages[-1] == {"role": "assistant", "content": first}
        conversation.tools = [CALCULATOR]
        with closing(conversation.answer("3+4?")) as parts:
            next(part for part in parts if not isinstance(part, ToolOutput) and part.calls)
        assert "tool_calls" not in conversation.messages[-1]
        assert len(list(conversation.answer("Again."))) > 1


def test_rejected_message_is_not_kept(tokenizer):
    with conversing(tokenizer, "It is 4.", length=60) as (conversation, _):
        with pytest.raises(ValueError, match=r"tokens and max_tokens=1, \d+ in all.*shorten"):
            typed(conversation, "2+2?\n" + 60 * "word ")
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


THOUGHT = "<think>two and two</think>It is 4."


@pytest.mark.parametrize(
    ("lines", "shows", "printed"),
    [
        ("2+2?\n", False, "[reasoning: 3 words; /reasoning shows them]\nIt is 4.\n"),
        ("2+2?\n", True, "two and two\n\nIt is 4.\n"),
        ("2+2?\n/reasoning\n", True, "two and two\n\nIt is 4.\ntwo and two\n"),
        ("\n  \n/exit\n2+2?\n", True, ""),
        ("/quit", True, ""),
    ],
    ids=["folded", "shown", "asked", "left", "quit"],
)
def test_terminal_folds_reasoning(tokenizer, lines, shows, printed):
    with conversing(tokenizer, THOUGHT) as (conversation, _):
        assert typed(conversation, lines, shows_reasoning=shows) == printed


def test_terminal_prints_calls_and_outputs(tokenizer):
    with conversing(tokenizer, f"Adding. {CALL}", "It is 7.", tools=[CALCULATOR]) as (talk, _):
        printed = typed(talk, "3+4?\n")
    assert printed == 'Adding.\n  calc({"expression": "3+4"})\n  = 7\nIt is 7.\n'


def test_terminal_commands(tokenizer):
    with conversing(tokenizer, "Yes.") as (conversation, engine):
        lines = (
            "a\\\nb\n/set temperature 0\n/set top_k 3\n//x\n/system Be short.\nc\n/clear\n/help\n"
        )
        assert "/exit" in typed(conversation, lines)
        prompts = [tokenizer.decode_special(prompt) for prompt in engine.prompts]
        assert conversation.arguments == {"temperature": 0.0, "top_k": 3}
        assert conversation.messages == []
    assert "user\na\nb<" in prompts[0] and "user\n/x<" in prompts[1]
    assert "system\nBe short.<" in prompts[2] and "user\na" not in prompts[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/celar", "command '/celar' is unknown"),
        ("/set temprature 1", "must be one of temperature, top_p"),
        ("/set top_k 1.5", "'1.5' must be an integer"),
        ("/set temperature hot", "'hot' must be a number"),
        ("/set temperature 3\nhi", "temperature=3.0 must be"),
    ],
)
def test_terminal_names_wrong_commands(tokenizer, line, message):
    with (
        conversing(tokenizer, "Yes.") as (conversation, _),
        pytest.raises(ValueError, match=message),
    ):
        typed(conversation, line + "\n")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_interactive_terminal_continues_after_errors_and_interrupts(tokenizer, monkeypatch):
    with conversing(tokenizer, "Yes.") as (conversation, _):
        output = Screen()
        terminal = Terminal(conversation, Screen("/celar\nhi\nhi\n"), output)
        answer, interrupted = conversation.answer, []

        def answering(text):
            if interrupted:
                return answer(text)
            interrupted.append(text)
            raise KeyboardInterrupt

        proxy = SimpleNamespace(service=conversation.service, answer=answering)
        terminal._conversation = proxy
        terminal.run()
        lines = output.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "").splitlines()
    assert lines[1:] == [
        "error: command '/celar' is unknown: /help lists them.",
        "[stopped]",
        "Yes.",
    ]


def test_engine_failure_ends_the_conversation(tokenizer):
    with conversing(tokenizer, "Yes.") as (conversation, engine):
        engine.error = RuntimeError("out of memory")
        with pytest.raises(RuntimeError, match="the engine has failed: out of memory"):
            Terminal(conversation, Screen("hi\nhi\n"), io.StringIO()).run()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\n", "a\tb\n"),
        ("\x1b[2Jx\rz\x07\x9b", "\ufffd[2Jx\ufffdz\ufffd\ufffd"),
        ("é 水 \u2028", "é 水 \ufffd"),
    ],
)
def test_printable_replaces_control_characters(text, shown):
    assert printable(text) == shown
