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
BEGIN, END = "\ufdd0", "\ufdd1"
"""Around what a template marks as the assistant's; no text has them, they are no characters."""


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
        began = datetime.fromisoformat(day or "1970-01-01")
        self._template = _compiled(source, began)
        self._marking = _compiled(source, began, (BEGIN, END)) if MARKED.search(source) else None
        # What a template cannot do without; the rest of its names are those of the special tokens.
        self._names = {"tools": None, "documents": None, **tokenizer.named_tokens}

    @property
    def marks(self) -> bool:
        """Whether it says by ``{% generation %}`` what the assistant wrote."""
        return self._marking is not None

    def write(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        opened: bool = False,
        marked: bool = False,
    ) -> str:
        """The text of a conversation with all the fields of its messages.

        Args:
          tools: descriptions of tools, None without.
          opened: whether the assistant's next turn is begun.
          marked: whether what the assistant wrote stands between `BEGIN` and `END`.

        Raises:
          ValueError: as for `render`.
        """
        template: Any = self._marking if marked else self._template
        names = self._names if tools is None else {**self._names, "tools": tools}
        try:
            return template.render(messages=list(turns), add_generation_prompt=opened, **names)
        except Exception as error:  # a template is a program, which may fail in any way
            said = [(turn.get("role"), turn.get("content")) for turn in turns]
            raise ValueError(
                f"the chat template refuses the messages {_short(said)}: {error}. Change them, "
                "or give --chat-template a file of your own."
            ) from error

    def render(self, messages: Sequence[tuple[str, str]], tools: Sequence[str] = ()) -> str:
        """The text of a conversation up to where the network takes over.

        Args:
          messages: role and content of each.
          tools: schemas of functions that may be called, as JSON texts.

        Raises:
          ValueError: when the template refuses the conversation, or fails.
        """
        conversation = [{"role": role, "content": content} for role, content in messages]
        return self.write(conversation, [json.loads(t) for t in tools] or None, opened=True)

    def encode(self, messages: Sequence[tuple[str, str]], tools: Sequence[str] = ()) -> list[int]:
        """The tokens of `render`.

        Raises:
          ValueError: as for `render`, and for what the tokenizer does not know.
        """
        mark = unused("".join(part for message in messages for part in message))
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
        text = "".join(part for message in (*before, *after) for part in message)
        mark = unused(text)
        turn = unused(text + mark)
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
        return [(role, cut_specials(text, special, mark)) for role, text in messages]

    def _tokens(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        for part in rendered.split(mark):
            ids += self._tokenizer.encode_special(part) if part else []
        return ids


def cut_specials(text: str, special: Mapping[str, int], mark: str) -> str:
    """The text with the mark between the characters of each special token that it spells."""
    return re.sub(special_pattern(special), lambda found: mark.join(found[0]), text)


def unused(text: str) -> str:
    """A character that the text does not have."""
    used = set(text)
    return next(chr(code) for code in PRIVATE_USE if chr(code) not in used)


MARKED = re.compile(r"\{%[-+]?\s*generation\b")


def _compiled(source: str, day: datetime, marks: tuple[str, str] | None = None) -> Any:
    """The template.

    Args:
      marks: what it writes around its ``{% generation %}``; None writes nothing.
    """
    if find_spec("jinja2") is None:
        raise ValueError(
            "the checkpoint has a chat template, which needs jinja2, and that is not installed: "
            'run pip install -e ".[hf]" in the clone, or give --chat-template none.'
        )
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}`` marks what an assistant said, for
        supervised training; the text is what lies between."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marks is None:
                return body
            begin, end = (nodes.Output([nodes.TemplateData(m)], lineno=line) for m in marks)
            return [begin, *body, end]

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


def _short(messages: Sequence[tuple[Any, Any]]) -> str:
    text = json.dumps(messages, ensure_ascii=False)
    return text if len(text) <= 90 else text[:87] + "..."
