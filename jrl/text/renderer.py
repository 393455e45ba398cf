"""Rendering of chat templates in a subprocess, which all templates share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jrl.tasks.data.records import as_json
from jrl.tasks.tools import calls
from jrl.tasks.tools.calls import Arguments
from jrl.tasks.workers.process import Message, Worker, WorkerEnded, program_worker

PROCESSOR_SECONDS = 5.0
"""For one template and one conversation; the program counts them itself."""
SECONDS = 20.0
"""Of the clock, where the program does not end by itself."""


class TemplateLimit(ValueError):
    """A template that went over a limit of time, memory or length."""


class TemplateSyntax(ValueError):
    """A source that is no template.

    Attributes:
      line: where.
      message: why.
    """

    def __init__(self, line: int, message: str):
        super().__init__(f"line {line}: {message}")
        self.line, self.message = line, message


class Renderer:
    """A template that is compiled and rendered in another process.

    Args:
      source: of Jinja.
      day: what it takes for today, as "2024-07-26".
      markers: what it writes around its ``{% generation %}``; None writes nothing.

    Raises:
      TemplateSyntax: where it is none.
      TemplateLimit: where to compile it takes too much.
    """

    def __init__(self, source: str, day: str, markers: tuple[str, str] | None = None):
        key = sha256(json.dumps([source, day, markers]).encode()).hexdigest()
        self._key = {"key": key}
        self._compile_request = {**self._key, "source": source, "day": day, "marks": markers}
        self._send_compile()

    def render(self, variables: Sequence[Mapping[str, Any]]) -> list[str | ValueError]:
        """The texts that it writes, or its own errors in place of what it refuses.

        Args:
          variables: for each the names that it sees, with what JSON holds
            (`jrl.tasks.data.records.to_json_value`).

        Raises:
          TemplateLimit: where it takes too much for one of them.
          ValueError: where JSON does not hold a value.
        """
        argument_texts = list(_arguments(variables))
        question = {**self._key, "given": variables, "arguments": argument_texts}
        reply = _ask(question, len(variables))
        while "unknown" in reply:  # the process has been started again, or has dropped it
            self._send_compile()
            reply = _ask(question, len(variables))
        rendered = reply["texts"]
        return [each if isinstance(each, str) else ValueError(each["error"]) for each in rendered]

    def _send_compile(self) -> None:
        reply = _ask(self._compile_request)
        if "syntax" in reply:
            raise TemplateSyntax(*reply["syntax"])


def _arguments(variables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[str | int], str]]:
    """Paths of call arguments in messages, and the JSON text of each, which JSON drops."""
    for conversation_index, names in enumerate(variables):
        for index, message in enumerate(names.get("messages", ())):
            # All others have texts alone.
            if not message.keys() <= {"role", "content"}:
                yield from _arguments_in(message, [conversation_index, "messages", index])


def _arguments_in(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str]]:
    if isinstance(value, Arguments):
        yield path, str(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _arguments_in(each, [*path, name])
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _arguments_in(each, [*path, index])


def _ask(question: Message, texts: int = 1) -> Message:
    """The reply to a question.

    Args:
      texts: that it asks for.

    Raises:
      TemplateLimit: where it asks for too much.
    """
    seconds = SECONDS * texts
    try:
        try:
            reply = _worker().ask(question, seconds=seconds)
        except TypeError:  # of what JSON does not hold; nothing was sent
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
    """The process, which the first question starts."""
    program = Path(__file__).with_name("template_program.py")
    return program_worker(
        "template", str(program), calls.__file__, str(processor_seconds), seconds=SECONDS
    )
