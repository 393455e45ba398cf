"""Chat template of a checkpoint: a conversation as the text that the network was trained on.

Templates are Jinja programs that come with the checkpoint. They run in Jinja's sandbox, in a
process that all templates share, with limits of time and memory (`Renderer`). They are passed the
variables that published templates rely on, and nothing but the conversation.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache, cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jrl.tasks.data.conversations import Conversation, Turn, content_of, role_content_pairs
from jrl.tasks.data.records import as_json
from jrl.tasks.data.training_fields import TRAINED
from jrl.tasks.tools import calls as calls_program
from jrl.tasks.tools.calls import Arguments
from jrl.tasks.tools.schema import shorten
from jrl.tasks.workers.process import Message, Worker, WorkerEnded, program_worker
from jrl.text.located import (
    SPAN_BEGIN,
    SPAN_END,
    EscapedConversation,
    escape_special_tokens,
    escape_text,
    special_pattern,
    unused_character,
)
from jrl.text.tokenizer import Tokenizer

PROCESSOR_SECONDS = 5.0
"""Processor time for one template and one conversation, limited within the process."""
SECONDS = 20.0
"""Wall-clock limit in seconds, in case that the process does not end by itself."""

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
NULL_CONTENT_CHECK = re.compile(
    r"content['\"]?\]?\s*(?:is\s+(?:not\s+)?none|[=!]=\s*none)\b", re.IGNORECASE
)
"""Pattern of a template that checks whether a content is null."""
PROBE = "probe"
"""Content of an assistant's turn that is rendered to locate the text after it."""


class TemplateLimit(ValueError):
    """Error of a template that exceeds a limit of time, memory or length."""


class TemplateSyntax(ValueError):
    """Syntax error of a template, with its line and message."""

    def __init__(self, line: int, message: str):
        super().__init__(f"line {line}: {message}")
        self.line, self.message = line, message


class Renderer:
    """A template that is compiled and rendered in another process.

    Args:
      source: Jinja source.
      day: the current date for the template, as "2024-07-26".
      markers: texts written around its ``{% generation %}`` blocks; None writes nothing.

    Raises:
      TemplateSyntax: if the source is not a template.
      TemplateLimit: if compiling it exceeds a limit.
    """

    def __init__(self, source: str, day: str, markers: tuple[str, str] | None = None):
        key = sha256(json.dumps([source, day, markers]).encode()).hexdigest()
        self._key = {"key": key}
        self._compile_request = {**self._key, "source": source, "day": day, "marks": markers}
        self._send_compile()

    def render(self, variables: Sequence[Mapping[str, Any]]) -> list[str | ValueError]:
        """Renders the template with each of these sets of variables; an error replaces the text of
        one that the template rejects. Values must be JSON (`jrl.tasks.data.records.to_json_value`).

        Raises:
          TemplateLimit: if one of them exceeds a limit.
          ValueError: for a value that JSON cannot represent.
        """
        argument_texts = [
            each
            for index, names in enumerate(variables)
            for each in _arguments(names.get("messages"), [index, "messages"])
        ]
        question = {**self._key, "given": variables, "arguments": argument_texts}
        # The process may have been restarted, or have dropped the template.
        while "unknown" in (reply := _ask(question, len(variables))):
            self._send_compile()
        texts = reply["texts"]
        return [each if isinstance(each, str) else ValueError(each["error"]) for each in texts]

    def _send_compile(self) -> None:
        reply = _ask(self._compile_request)
        if "syntax" in reply:
            raise TemplateSyntax(*reply["syntax"])


def _arguments(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str]]:
    """Paths of call arguments in messages, with their JSON texts, which conversion to JSON
    loses."""
    if isinstance(value, Arguments):
        yield path, str(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _arguments(each, [*path, name])
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _arguments(each, [*path, index])


def _ask(question: Message, texts: int = 1) -> Message:
    """Sends a question about a number of texts and returns the reply.

    Raises:
      TemplateLimit: if the reply exceeds a limit.
    """
    seconds = SECONDS * texts
    try:
        try:
            reply = _worker().ask(question, seconds=seconds)
        except TypeError:  # a value is not JSON; nothing was sent
            try:
                question = as_json(question)
            except TypeError as error:
                raise ValueError(str(error)) from error
            reply = _worker().ask(question, seconds=seconds)
    except TimeoutError:
        raise TemplateLimit(f"took more than {seconds:g} seconds") from None
    except WorkerEnded as error:
        raise TemplateLimit(f"took too long, or ended what renders it ({error}),") from None
    if "exceeded" in reply:
        raise TemplateLimit(reply["exceeded"])
    if "error" in reply:
        raise TemplateLimit(f"failed ({reply['error']}),")
    return reply


@cache
def _worker() -> Worker:
    return worker(PROCESSOR_SECONDS)


def worker(processor_seconds: float | int) -> Worker:
    """The worker process, which the first question starts."""
    program = Path(__file__).with_name("template_program.py")
    return program_worker(
        "template", str(program), calls_program.__file__, str(processor_seconds), seconds=SECONDS
    )


def today() -> str:
    """The current date, for `Usage.chat_date` of a new run, which keeps it."""
    return date.today().isoformat()


class TemplateRejection(ValueError):
    """Error of a template that rejects a conversation, or fails."""


class ChatTemplate:
    """Converts the messages of a conversation to the tokens of a prompt.

    The whole text of the template is tokenized. Special tokens that the template writes become
    their ids. Special tokens spelled in a message are data and stay text, so that a message cannot
    end a turn or begin another. The beginning of sequence is prepended if the checkpoint requires
    it for texts and the template does not write it.
    """

    def __init__(self, tokenizer: Tokenizer, path: str | None = None):
        """Compiles the template of a tokenizer.

        Args:
          tokenizer: its `Usage.chat_template` is a Jinja source. `strftime_now` of a template
            returns `Usage.chat_date`, not the current day, so that a run is reproducible.
          path: file of the template, for error messages; None if unknown.

        Raises:
          TemplateLimit: if compiling it takes too much time or memory.
          ValueError: if it is not a Jinja template, or Jinja is not installed.
        """
        source, day = tokenizer.usage.chat_template, tokenizer.usage.chat_date
        assert source is not None
        self._tokenizer = tokenizer
        self._path = path
        template_day = day or "1970-01-01"
        # Whether the template marks the assistant's text by ``{% generation %}``.
        self.has_generation_tags: bool = GENERATION_TAG.search(source) is not None
        try:
            self._template = _start_renderer(source, template_day)
            if self.has_generation_tags:
                markers = SPAN_BEGIN, SPAN_END
                self._tagging_template = _start_renderer(source, template_day, markers)
        except TemplateLimit as error:
            raise self._limit_error(error, "to be compiled") from error
        self._checks_null = NULL_CONTENT_CHECK.search(source) is not None
        # Variables that templates require; the others are the names of special tokens.
        self._names = {"tools": None, "documents": None, **tokenizer.named_tokens}

    @cached_property
    def turn_suffix(self) -> str | None:
        """Text after the assistant's last message; None if it cannot be found."""
        for first in ((), (("system", "?"),)):
            conversation = Conversation.from_pairs([*first, ("user", "?"), ("assistant", PROBE)])
            try:
                _, separator, suffix = self.write(conversation).partition(PROBE)
            except TemplateRejection:
                continue
            return suffix if separator else None
        return None

    def generation_prompt(self, conversation: Conversation) -> str:
        """Text that opens the assistant's next turn; empty if it cannot be found."""
        try:
            texts = self.write_all([(conversation, False), (conversation, True)])
            before, opened = map(text_or_raise, texts)
        except TemplateRejection:
            return ""
        return opened[len(before) :] if opened.startswith(before) else ""

    def write(
        self, conversation: Conversation, *, opened: bool = False, tagged: bool = False
    ) -> str:
        """Text of one conversation, as `write_all` writes several.

        Raises:
          TemplateLimit: if the template takes too much time or memory, or writes too much.
          TemplateRejection: if it rejects the conversation, or fails.
        """
        (text,) = self.write_all([(conversation, opened)], tagged=tagged)
        return text_or_raise(text)

    def write_all(
        self, requests: Sequence[tuple[Conversation, bool]], *, tagged: bool = False
    ) -> list[str | TemplateRejection]:
        """Texts of several conversations with all fields of their messages, in little more time
        than one; for a conversation that the template rejects, the error.

        A null content stays null for templates that check for it, and is empty for all others.

        Args:
          requests: conversations, each with whether the assistant's next turn is opened.
          tagged: whether the assistant's text is enclosed in `SPAN_BEGIN` and `SPAN_END`.

        Raises:
          TemplateLimit: as for `write`.
        """
        template = self._tagging_template if tagged else self._template
        variables = [
            self._template_variables(conversation, opened) for conversation, opened in requests
        ]
        try:
            texts = template.render(variables)
        except TemplateLimit as error:
            what = f"for the messages {_format_messages(variables[0])}"
            raise self._limit_error(error, what) from error
        except ValueError as error:
            texts = [error] * len(variables)
        return [
            text if isinstance(text, str) else _rejection_error(text, names)
            for text, names in zip(texts, variables, strict=True)
        ]

    def _template_variables(self, conversation: Conversation, opened: bool) -> dict[str, Any]:
        """Variables of the template for a conversation."""
        messages = [
            {name: value for name, value in turn.items() if name != TRAINED}
            for turn in conversation.turns
        ]
        if not self._checks_null:
            messages = [{**turn, "content": content_of(turn)} for turn in messages]
        variables = {**self._names, **conversation.arguments}
        if conversation.tools is not None:
            variables["tools"] = conversation.tools
        return {"messages": messages, "add_generation_prompt": opened, **variables}

    def _limit_error(self, error: TemplateLimit, what: str) -> TemplateLimit:
        """Adds the name of the template to an error."""
        which = "" if self._path is None else f" {self._path}"
        return TemplateLimit(
            f"the chat template{which} {error} {what}: fix it, or give another template with "
            "--chat-template FILE."
        )

    def render(self, conversation: Conversation) -> str:
        """Text of a conversation up to the start of the network's turn; errors as for `write`."""
        return self.write(conversation, opened=True)

    def encode(self, conversation: Conversation, *, opened: bool = True) -> list[int]:
        """The tokens of `write`.

        Raises:
          ValueError: as for `write`, and for text that the tokenizer cannot encode.
        """
        escaped = escape_special_tokens(conversation, self._tokenizer.special_tokens)
        text = self.write(escaped.conversation, opened=opened)
        ids = self._tokenizer.encode_special(text, escaped.escape)
        return self._tokenizer.with_template_prefix(ids)

    def encode_unfinished(self, conversation: Conversation) -> list[int]:
        """Tokens up to the end of the last message's content, which the network continues.

        Raises:
          ValueError: as for `encode`, and if the template does not write the content once.
        """
        escaped = escape_special_tokens(conversation, self._tokenizer.special_tokens)
        turns, probe = escaped.conversation.turns, unused_character(escaped.texts + escaped.escape)
        # Behind the content, so that a template does not trim blanks at its end.
        last = {"content": content_of(turns[-1]) + probe}
        turns = _replace_turn(turns, len(turns) - 1, last)
        text, *others = self.write(replace(escaped.conversation, turns=turns)).split(probe)
        if len(others) != 1:
            raise ValueError(
                f"the chat template writes the last message {len(others)} times, and once is "
                "needed to continue it: leave out continue_final_message."
            )
        ids = self._tokenizer.encode_special(text, escaped.escape)
        return self._tokenizer.with_template_prefix(ids)

    def encode_continuation(
        self, conversation: Conversation, content: str, *, special: bool = False
    ) -> list[int]:
        """Tokens of the network's text after `encode`, with no end token.

        Args:
          special: whether special tokens spelled in it become their ids, as in a tool call.

        Raises:
          ValueError: as for `encode`.
        """
        tokenizer = self._tokenizer
        tokens = tokenizer.special_tokens
        escaped = escape_special_tokens(conversation, tokens, content)
        before = self.render(escaped.conversation)
        escaped_content = content if special else escape_text(content, tokens, escaped.escape)
        first = tokenizer.encode_special(before, escaped.escape)
        both = tokenizer.encode_special(before + escaped_content, escaped.escape)
        if both[: len(first)] == first:
            return both[len(first) :]
        # A token spans the boundary: the prompt ends before it.
        return tokenizer.encode_special(escaped_content, escaped.escape)

    def answer(
        self, before: Conversation, after: Sequence[Turn], *, ended: bool = True
    ) -> list[int]:
        """Tokens between a turn of the network and its next one: the template's text after the stop
        token of the turn, whatever it writes before.

        Args:
          before: messages up to that turn, which is the last.
          after: messages that reply to it.
          ended: whether the network sampled the stop token; otherwise it is added first.

        Raises:
          ValueError: as for `encode`, and if the template does not write the turn.
        """
        tokenizer = self._tokenizer
        escaped = escape_special_tokens(
            replace(before, turns=(*before.turns, *after)), tokenizer.special_tokens
        )
        ends = {text: i for text, i in tokenizer.special_tokens.items() if i in tokenizer.stop_ids}
        text_after, end_match = self._text_after_turn(
            escaped, len(before.turns) - 1, special_pattern(ends)
        )
        # The network has sampled the end of the turn itself, if the template writes one; the rest
        # is tokenized as text after a token that ends a turn.
        remainder = text_after if end_match is None else text_after[end_match.end() :]
        if not ended:
            # The template's own end, or the token in its place before another turn.
            first_special = end_match or re.match(
                special_pattern(tokenizer.special_tokens), text_after
            )
            if first_special is not None:
                return tokenizer.encode_special(text_after[first_special.start() :], escaped.escape)
        end = next((text for text, i in ends.items() if i == tokenizer.turn_end_id), "")
        ids = tokenizer.encode_special(end + remainder, escaped.escape)
        ids = ids[1:] if end else ids
        return ids if ended else [tokenizer.turn_end_id, *ids]

    def _text_after_turn(
        self, escaped: EscapedConversation, index: int, ends: str
    ) -> tuple[str, re.Match[str] | None]:
        """Text between a turn and the network's next one, and the first token in it that ends a
        turn.

        The turn is rendered with a probe: in the last argument of its last call, or in its content.
        The text starts after the probe. Some templates omit the content of a turn with calls, some
        write calls before it, and some accept only one call.
        """
        probe, rejection, count = unused_character(escaped.texts + escaped.escape), None, 0
        for messages, in_content in _with_probes(escaped.conversation.turns, index, probe):
            try:
                rendered = self.render(replace(escaped.conversation, turns=messages))
            except TemplateRejection as error:
                rejection = error if rejection is None else rejection
                continue
            count = rendered.count(probe)
            text_after = rendered.partition(probe)[2]
            end_match = re.search(ends, text_after)
            calls = messages[index].get("tool_calls", ())
            unended = any(call["function"]["name"] in text_after for call in calls)
            if count == 1 and (end_match is not None or (in_content and not unended)):
                return text_after, end_match
        if rejection is not None:
            raise rejection
        after = shorten(role_content_pairs(escaped.conversation.turns[index + 1 :]), 90)
        if count == 1:
            raise ValueError(
                "the chat template ends a tool call without an end-of-turn token, so that "
                f"{after} cannot be located after it: give another template with --chat-template "
                "FILE."
            )
        raise ValueError(
            f"the chat template writes the turn before {after} {count} times, and once is needed "
            "to locate what follows it: give another template with --chat-template FILE."
        )


def _with_probes(
    messages: Sequence[Turn], index: int, probe: str
) -> Iterator[tuple[tuple[Turn, ...], bool]]:
    """The turns with a probe in one of them, and whether the probe is its content."""
    if calls := messages[index].get("tool_calls"):
        last = calls[-1]
        arguments = {name: probe for name in list(last["function"]["arguments"])[-1:] or ["probe"]}
        call = {**last, "function": {**last["function"], "arguments": Arguments(arguments)}}
        yield _replace_turn(messages, index, {"tool_calls": [*calls[:-1], call]}), False
        if any(len(turn.get("tool_calls", ())) > 1 for turn in messages):
            single = [
                {**turn, "tool_calls": turn["tool_calls"][-1:]} if "tool_calls" in turn else turn
                for turn in messages
            ]
            yield _replace_turn(single, index, {"tool_calls": [call]}), False
    yield _replace_turn(messages, index, {"content": probe}), True


def _replace_turn(messages: Sequence[Turn], index: int, changes: Turn) -> tuple[Turn, ...]:
    return (*messages[:index], {**messages[index], **changes}, *messages[index + 1 :])


def _start_renderer(source: str, day: str, markers: tuple[str, str] | None = None) -> Renderer:
    """A `Renderer`, with errors that name the remedy."""
    if find_spec("jinja2") is None:
        raise ValueError(
            "the checkpoint has a chat template, which needs jinja2, and that is not installed: "
            'run pip install -e ".[hf]" in the clone, or give --chat-template none.'
        )
    try:
        return Renderer(source, day, markers)
    except TemplateSyntax as error:
        raise ValueError(
            f"the chat template is not a Jinja template (line {error.line}: {error.message}): fix "
            "it, or give --chat-template none."
        ) from error


def text_or_raise(text: str | TemplateRejection) -> str:
    """A text of `ChatTemplate.write_all`; raises if it is an error."""
    if isinstance(text, TemplateRejection):
        raise text
    return text


def _rejection_error(error: ValueError, variables: Mapping[str, Any]) -> TemplateRejection:
    """An error of a template, with the messages that caused it."""
    rejection = TemplateRejection(
        f"the chat template rejects the messages {_format_messages(variables)}: {error}. Change "
        "them, or give another template with --chat-template FILE."
    )
    rejection.__cause__ = error
    return rejection


def _format_messages(variables: Mapping[str, Any]) -> str:
    return shorten([(turn.get("role"), turn.get("content")) for turn in variables["messages"]], 90)


def with_turn_end(tokenizer: Tokenizer, path: str | None = None) -> Tokenizer:
    """The tokenizer with the token that ends a turn of its chat template; unchanged if there is no
    template, and for one that ends turns with no token or is not usable.

    Args:
      path: file of the template if it will be used; else None.

    Raises:
      TemplateLimit: if it will be used, and takes too much time or memory.
    """
    usage = tokenizer.usage
    if usage.chat_template is None or find_spec("jinja2") is None:
        return tokenizer
    try:
        end_id = _find_turn_end(ChatTemplate(tokenizer, path), tokenizer)
    except ValueError as error:  # reported where the template is used, if it is
        if isinstance(error, TemplateLimit) and path is not None:
            raise  # immediately, as another attempt takes as long
        return tokenizer
    if end_id == usage.turn_end:
        return tokenizer
    return tokenizer.with_usage(replace(usage, turn_end=end_id))


def _find_turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    turn_suffix = template.turn_suffix
    if turn_suffix is None:
        return None
    tokens = tokenizer.spelled_tokens
    match = re.search(special_pattern(tokens), turn_suffix)
    # Some templates always open the next turn.
    if match is None or match[0] in template.generation_prompt(
        Conversation.from_pairs([("user", "?")])
    ):
        return None
    return tokens[match[0]]
