"""A conversation as the text a network was trained on: the chat template of its checkpoint.

Templates are Jinja programs that come with the checkpoint. They run in Jinja's sandbox, with the
names that the ecosystem's templates count on, and see nothing but the conversation.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from importlib.util import find_spec
from typing import Any

from jrl.text.tokenizer import Tokenizer, special_pattern

PRIVATE_USE = range(0xE000, 0xF900)
"""Characters that stand for nothing in Unicode."""


def today() -> str:
    """The day on which a template is taken up, for `Usage.chat_date`, which a run keeps."""
    return date.today().isoformat()


class ChatTemplate:
    """Makes the tokens of a prompt from the messages of a conversation.

    Special tokens that the template writes become their ids. Where a message itself spells one, it
    is data and stays text, cut into single characters so that it cannot end a turn or begin
    another; the network reads the same characters. Nothing is put before what the template makes:
    it writes the beginning of sequence itself where its network expects one.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Compiles the template of a tokenizer.

        Args:
          tokenizer: its `Usage.chat_template` is a Jinja source. `strftime_now` of a template gives
            `Usage.chat_date`, not the day of the call, so that a run can be repeated.

        Raises:
          ValueError: when it is no Jinja template, or Jinja is not installed.
        """
        source, day = tokenizer.usage.chat_template, tokenizer.usage.chat_date
        assert source is not None
        self._tokenizer = tokenizer
        self._template = _compiled(source, datetime.fromisoformat(day or "1970-01-01"))
        # What a template cannot do without; the rest of its names are those of the special tokens.
        self._names = {"tools": None, "documents": None, **tokenizer.named_tokens}

    def render(self, messages: Sequence[tuple[str, str]], tools: Sequence[str] = ()) -> str:
        """The text of a conversation up to where the network takes over.

        Args:
          messages: role and content of each.
          tools: schemas of functions that may be called, as JSON texts.

        Raises:
          ValueError: when the template refuses the conversation, or fails.
        """
        conversation = [{"role": role, "content": content} for role, content in messages]
        names = dict(self._names)
        if tools:
            names["tools"] = [json.loads(tool) for tool in tools]
        try:
            return self._template.render(messages=conversation, add_generation_prompt=True, **names)
        except Exception as error:  # a template is a program, which may fail in any way
            raise ValueError(
                f"the chat template refuses the messages {_short(messages)}: {error}. Change them, "
                "or give --chat-template a file of your own."
            ) from error

    def encode(self, messages: Sequence[tuple[str, str]], tools: Sequence[str] = ()) -> list[int]:
        """The tokens of `render`.

        Raises:
          ValueError: as for `render`, and for what the tokenizer does not know.
        """
        mark, _ = _unused(messages)
        return self._tokens(self.render(self._cut(messages, mark), tools), mark)

    def answer(
        self,
        before: Sequence[tuple[str, str]],
        after: Sequence[tuple[str, str]],
        tools: Sequence[str] = (),
    ) -> list[int]:
        """The tokens between a turn of the network and its next, as the template lays them out
        behind the stop token that ended the turn, whatever it makes of what stands before.

        Args:
          before: messages up to that turn, which is the last.
          after: what answers it.

        Raises:
          ValueError: as for `encode`, and where the template does not write the turn.
        """
        mark, turn = _unused([*before, *after])
        said = [*self._cut(before[:-1], mark), (before[-1][0], turn), *self._cut(after, mark)]
        rendered = self.render(said, tools)
        if rendered.count(turn) != 1:
            raise ValueError(
                f"the chat template writes the turn before {_short(after)} "
                f"{rendered.count(turn)} times, and once is needed to find what follows it: give "
                "--chat-template a file of your own."
            )
        ids = self._tokens(rendered.partition(turn)[2], mark)
        # The network has written its end itself, where the template writes one.
        stops = [place for place, token in enumerate(ids) if token in self._tokenizer.stop_ids]
        return ids[stops[0] + 1 :] if stops else ids

    def _cut(self, messages: Sequence[tuple[str, str]], mark: str) -> list[tuple[str, str]]:
        """The messages with the mark in each special token that they spell."""
        special = self._tokenizer.special_tokens
        return [(role, _cut(text, special, mark)) for role, text in messages]

    def _tokens(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        for part in rendered.split(mark):
            ids += self._tokenizer.encode_special(part) if part else []
        return ids


def _cut(text: str, special: Mapping[str, int], mark: str) -> str:
    """The text with the mark between the characters of each special token that it spells."""
    return re.sub(special_pattern(special), lambda found: mark.join(found[0]), text)


def _unused(messages: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Two characters that the messages do not have."""
    used = set("".join(part for message in messages for part in message))
    first, second, *_ = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    return first, second


def _compiled(source: str, day: datetime) -> Any:
    if find_spec("jinja2") is None:
        raise ValueError(
            "the checkpoint has a chat template, which needs jinja2, and that is not installed: "
            'run pip install -e ".[hf]" in the clone, or give --chat-template none.'
        )
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}`` marks what an assistant said, for
        supervised training; the text is what lies between."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter writes for HTML pages."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = day.strftime
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is no Jinja template (line {error.lineno}: {error.message}): "
            "mend it, or give --chat-template none."
        ) from error


def _short(messages: Sequence[tuple[str, str]]) -> str:
    text = json.dumps(messages, ensure_ascii=False)
    return text if len(text) <= 90 else text[:87] + "..."
