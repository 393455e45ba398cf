"""Chat template of a checkpoint: a conversation as the text that the network was trained on.

Templates are Jinja programs that come with the checkpoint. They run in Jinja's sandbox, in a
process with limits of time and memory (`jrl.text.templates`). They get the names that published
templates rely on, and see nothing but the conversation.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from jrl.tasks.data.arguments import Arguments
from jrl.tasks.data.conversations import Conversation, Turn, content_of, role_content_pairs
from jrl.text.located.spelled import Marked, cut_specials, marked, unused
from jrl.text.located.tokens import special_pattern
from jrl.text.templates.renderer import Renderer, TemplateLimit, TemplateSyntax
from jrl.text.tokenizer import Tokenizer

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what a template marks as the assistant's; no text has them, they are no characters."""


def today() -> str:
    """The day on which a template is taken up, for `Usage.chat_date`, which a run keeps."""
    return date.today().isoformat()


class ChatTemplate:
    """Makes the tokens of a prompt from the messages of a conversation.

    The tokens are those of the whole text that it writes. Special tokens that it writes become
    their ids; where a message itself spells one, it is data and stays text, so that it cannot end a
    turn or begin another. The beginning of sequence is put before what the template makes where the
    checkpoint says that a text has one and the template writes none.
    """

    def __init__(self, tokenizer: Tokenizer, place: str | None = None):
        """Compiles the template of a tokenizer.

        Args:
          tokenizer: its `Usage.chat_template` is a Jinja source. `strftime_now` of a template gives
            `Usage.chat_date`, not the day of the call, so that a run can be repeated.
          place: the file that the template is from, for messages; None where that is not known.

        Raises:
          TemplateLimit: when to compile it takes too much time or memory.
          ValueError: when it is no Jinja template, or Jinja is not installed.
        """
        source, day = tokenizer.usage.chat_template, tokenizer.usage.chat_date
        assert source is not None
        self._tokenizer = tokenizer
        self._place = place
        began = day or "1970-01-01"
        marks = MARKED.search(source) is not None
        try:
            self._template = _compiled(source, began)
            self._marking = _compiled(source, began, (BEGIN, END)) if marks else None
        except TemplateLimit as error:
            raise self._limit(error, "to be compiled") from error
        self._knows_null = KNOWS_NULL.search(source) is not None
        # What a template cannot do without; the rest of its names are those of the special tokens.
        self._names = {"tools": None, "documents": None, **tokenizer.named_tokens}

    @property
    def marks(self) -> bool:
        """True if the template marks the assistant's text by ``{% generation %}``."""
        return self._marking is not None

    @cached_property
    def closing(self) -> str | None:
        """Text after the assistant's last message; None if it cannot be found."""
        for first in ((), (("system", "?"),)):
            asked = Conversation.from_pairs([*first, ("user", "?"), ("assistant", PROBE)])
            try:
                _, found, closing = self.write(asked).partition(PROBE)
            except TemplateLimit:
                raise
            except ValueError:
                continue
            return closing if found else None
        return None

    def opening(self, conversation: Conversation) -> str:
        """Text that opens the assistant's next turn; empty if it cannot be found."""
        try:
            asked = self.write_all([(conversation, False), (conversation, True)])
            before, opened = map(written, asked)
        except TemplateLimit:
            raise
        except ValueError:
            return ""
        return opened[len(before) :] if opened.startswith(before) else ""

    def write(
        self, conversation: Conversation, *, opened: bool = False, marked: bool = False
    ) -> str:
        """The text of a conversation with all the fields of its messages.

        A content that is null is one for templates that look for it, and empty for all others.

        Args:
          opened: whether the assistant's next turn is begun.
          marked: whether what the assistant wrote stands between `BEGIN` and `END`.

        Raises:
          TemplateLimit: when the template takes too much time or memory, or writes too much.
          ValueError: when it refuses the conversation, or fails.
        """
        (found,) = self.write_all([(conversation, opened)], marked=marked)
        return written(found)

    def write_all(
        self, asked: Sequence[tuple[Conversation, bool]], *, marked: bool = False
    ) -> list[str | ValueError]:
        """The texts of several conversations, which takes little longer than that of one; in place
        of those that the template refuses, the error.

        Args:
          asked: each, and whether the assistant's next turn is begun.
          marked: as of `write`.

        Raises:
          TemplateLimit: as for `write`.
        """
        template = self._marking if marked else self._template
        assert template is not None
        given = [self._given(conversation, opened) for conversation, opened in asked]
        try:
            texts = template.render(given)
        except TemplateLimit as error:
            raise self._limit(error, f"for the messages {_shown(given[0])}") from error
        except ValueError as error:
            texts = [error] * len(given)
        return [
            text if isinstance(text, str) else _refusal(text, names)
            for text, names in zip(texts, given, strict=True)
        ]

    def _given(self, conversation: Conversation, opened: bool) -> dict[str, Any]:
        """Names that the template is rendered with."""
        turns = [dict(turn) for turn in conversation.turns]
        if not self._knows_null:
            turns = [{**turn, "content": content_of(turn)} for turn in turns]
        given = {**self._names, **conversation.arguments}
        if conversation.tools is not None:
            given["tools"] = conversation.tools
        return {"messages": turns, "add_generation_prompt": opened, **given}

    def _limit(self, error: TemplateLimit, what: str) -> TemplateLimit:
        """The error with the template that it is about."""
        which = "" if self._place is None else f" {self._place}"
        return TemplateLimit(
            f"the chat template{which} {error} {what}: look into it, or give --chat-template a "
            "file of your own."
        )

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation up to where the network takes over.

        Raises:
          ValueError: as for `write`.
        """
        return self.write(conversation, opened=True)

    def encode(self, conversation: Conversation) -> list[int]:
        """The tokens of `render`.

        Raises:
          ValueError: as for `write`, and for what the tokenizer does not know.
        """
        own = marked(conversation, self._tokenizer.special_tokens)
        ids = self._tokenizer.located(self.render(own.conversation), own.mark).ids
        return self._tokenizer.begun_by_template(ids)

    def continued(
        self, conversation: Conversation, content: str, *, special: bool = False
    ) -> list[int]:
        """The tokens of what the network says after `encode`, without an end.

        Args:
          special: whether special tokens that it spells are tokens, as those of a call are.

        Raises:
          ValueError: as for `encode`.
        """
        tokenizer = self._tokenizer
        tokens = tokenizer.special_tokens
        own = marked(conversation, tokens, content)
        before = self.render(own.conversation)
        cut = content if special else cut_specials(content, tokens, own.mark)
        first = tokenizer.located(before, own.mark).ids
        both = tokenizer.located(before + cut, own.mark).ids
        # A token may have characters of both: the prompt ends before it then.
        alone = both[: len(first)] != first
        return tokenizer.located(cut, own.mark).ids if alone else both[len(first) :]

    def answer(
        self, before: Conversation, after: Sequence[Turn], *, ended: bool = True
    ) -> list[int]:
        """The tokens between a turn of the network and its next, as the template lays them out
        behind the stop token that ended the turn, whatever it makes of what stands before.

        Args:
          before: up to that turn, which is the last.
          after: what answers it.
          ended: whether the network wrote the stop token; else it comes first.

        Raises:
          ValueError: as for `encode`, and where the template does not write the turn.
        """
        tokenizer = self._tokenizer
        own = marked(replace(before, turns=(*before.turns, *after)), tokenizer.special_tokens)
        ends = {text: i for text, i in tokenizer.special_tokens.items() if i in tokenizer.stop_ids}
        written, found = self._behind_turn(own, len(before.turns) - 1, special_pattern(ends))
        # The network has written its end itself, where the template writes one; the rest is read
        # as what stands behind a token that ends a turn.
        rest = written if found is None else written[found.end() :]
        if not ended:
            # The template's own end, or what it writes in place of one before another turn.
            own_end = found or re.match(special_pattern(tokenizer.special_tokens), written)
            if own_end is not None:
                return tokenizer.located(written[own_end.start() :], own.mark).ids
        end = next((text for text, i in ends.items() if i == tokenizer.turn_end_id), "")
        ids = tokenizer.located(end + rest, own.mark).ids
        ids = ids[1:] if end else ids
        return ids if ended else [tokenizer.turn_end_id, *ids]

    def _behind_turn(self, own: Marked, place: int, ends: str) -> tuple[str, re.Match[str] | None]:
        """Text between a turn and the network's next, and the first token in it that ends a turn.

        The turn is rendered with a probe: in the last argument of its last call, or in its content.
        The text starts behind the probe. Some templates leave out the content of a turn with calls,
        some write calls before it, and some accept one call alone.

        Args:
          place: of the turn in the conversation.
          ends: a pattern of tokens that end turns.
        """
        probe, refused, count = unused(own.texts + own.mark), None, 0
        for turns, in_content in _probed(own.conversation.turns, place, probe):
            try:
                rendered = self.render(replace(own.conversation, turns=turns))
            except TemplateLimit:
                raise
            except ValueError as error:
                refused = error if refused is None else refused
                continue
            count = rendered.count(probe)
            written = rendered.partition(probe)[2]
            found = re.search(ends, written)
            calls = turns[place].get("tool_calls", ())
            unended = any(call["function"]["name"] in written for call in calls)
            if count == 1 and (found is not None or (in_content and not unended)):
                return written, found
        if refused is not None:
            raise refused
        after = _short(role_content_pairs(own.conversation.turns[place + 1 :]))
        if count == 1:
            raise ValueError(
                "the chat template ends a call of a tool with no token that ends turns, so that "
                f"{after} has no place behind it: give --chat-template a file of your own."
            )
        raise ValueError(
            f"the chat template writes the turn before {after} {count} times, and once is needed "
            "to find what follows it: give --chat-template a file of your own."
        )


def _probed(
    turns: Sequence[Turn], place: int, probe: str
) -> Iterator[tuple[tuple[Turn, ...], bool]]:
    """The turns with a probe in one of them, and whether it is its content."""
    if calls := turns[place].get("tool_calls"):
        last = calls[-1]
        own = {name: probe for name in list(last["function"]["arguments"])[-1:] or ["probe"]}
        asked = {**last, "function": {**last["function"], "arguments": Arguments(own)}}
        yield _with(turns, place, {"tool_calls": [*calls[:-1], asked]}), False
        if any(len(turn.get("tool_calls", ())) > 1 for turn in turns):
            single = [
                {**turn, "tool_calls": turn["tool_calls"][-1:]} if "tool_calls" in turn else turn
                for turn in turns
            ]
            yield _with(single, place, {"tool_calls": [asked]}), False
    yield _with(turns, place, {"content": probe}), True


def _with(turns: Sequence[Turn], place: int, changes: Turn) -> tuple[Turn, ...]:
    return (*turns[:place], {**turns[place], **changes}, *turns[place + 1 :])


MARKED = re.compile(r"\{%[-+]?\s*generation\b")
KNOWS_NULL = re.compile(
    r"content['\"]?\]?\s*(?:is\s+(?:not\s+)?none|[=!]=\s*none)\b", re.IGNORECASE
)
"""Of a template that asks whether a content is null."""
PROBE = "probe"
"""Content of an assistant's turn that is rendered to find the text behind it."""


def _compiled(source: str, day: str, marks: tuple[str, str] | None = None) -> Renderer:
    """The template, as a process renders it.

    Args:
      marks: what it writes around its ``{% generation %}``; None writes nothing.
    """
    if find_spec("jinja2") is None:
        raise ValueError(
            "the checkpoint has a chat template, which needs jinja2, and that is not installed: "
            'run pip install -e ".[hf]" in the clone, or give --chat-template none.'
        )
    try:
        return Renderer(source, day, marks)
    except TemplateSyntax as error:
        raise ValueError(
            f"the chat template is no Jinja template (line {error.line}: {error.message}): "
            "mend it, or give --chat-template none."
        ) from error


def written(found: str | ValueError) -> str:
    """One of the texts of `ChatTemplate.write_all`.

    Raises:
      ValueError: where it is the error in place of one.
    """
    if isinstance(found, ValueError):
        raise found
    return found


def _refusal(error: ValueError, given: Mapping[str, Any]) -> ValueError:
    """An error of a template with the messages that it is about."""
    made = ValueError(
        f"the chat template refuses the messages {_shown(given)}: {error}. Change them, "
        "or give --chat-template a file of your own."
    )
    made.__cause__ = error
    return made


def _shown(given: Mapping[str, Any]) -> str:
    return _short([(turn.get("role"), turn.get("content")) for turn in given["messages"]])


def _short(messages: Sequence[tuple[Any, Any]]) -> str:
    text = json.dumps(messages, ensure_ascii=False)
    return text if len(text) <= 90 else text[:87] + "..."
