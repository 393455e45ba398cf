"""Chat templates in a worker process: compiled and rendered, with limits of time and memory.

The worker program loads this file by its path; it therefore imports nothing of `jrl`, and loads
Jinja and little else. The questions that it answers:

* ``{"key": K, "source": ..., "day": ..., "marks": ...}`` compiles a template: ``{}``, or
  ``{"syntax": [LINE, MESSAGE]}``.
* ``{"key": K, "given": [{...}, ...], "arguments": [[PATH, TEXT], ...]}`` renders it with each of
  these sets of variables: ``{"texts": [...]}``, in which ``{"error": ...}`` replaces one that it
  rejects; or ``{"unknown": true}`` if no such template was compiled. A path leads to the
  arguments of a call.

Either may be answered with ``{"exceeded": PHRASE}``, the limit that the template exceeded.
"""

import json
import signal
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

MAX_MEMORY = 2**30
"""Bytes of address space, the interpreter included."""
MAX_EXTRA_CHARACTERS = 2**20
"""Characters that a text may have beyond `MAX_GROWTH` times the conversation's."""
MAX_GROWTH = 16
MAX_COMPILED = 64
"""Number of templates that are kept compiled; the oldest is dropped."""


class TookTooLong(BaseException):
    """Raised at the time limit; as a `BaseException`, templates' handlers do not catch it."""


class Templates:
    """Compiled templates, by key.

    Args:
      arguments: class of the arguments of a call, `jrl.tasks.tools.calls.Arguments`.
      seconds: processor time for each template and each text.
    """

    def __init__(self, arguments: type, seconds: float):
        self._arguments, self._seconds = arguments, seconds
        self._templates: dict[str, Template] = {}
        signal.signal(signal.SIGPROF, stop)

    def __call__(self, question: Message) -> Message:
        """The reply to a question."""
        limit_time(self._seconds)
        try:
            return self._compile(question) if "source" in question else self._render(question)
        except TookTooLong:
            return {"exceeded": f"took more than {self._seconds:g} seconds"}
        except MemoryError:
            return {"exceeded": f"needed more than {MAX_MEMORY >> 20} MB of memory"}
        finally:
            limit_time(0)

    def _compile(self, question: Message) -> Message:
        day = datetime.fromisoformat(question["day"])
        try:
            template = compile_template(question["source"], day, question["marks"])
        except TemplateSyntaxError as error:
            return {"syntax": [error.lineno, error.message]}
        self._templates[question["key"]] = template
        while len(self._templates) > MAX_COMPILED:
            del self._templates[next(iter(self._templates))]
        return {}

    def _render(self, question: Message) -> Message:
        if question["key"] not in self._templates:
            return {"unknown": True}
        template = self._templates[question["key"]]
        for (*before, last), text in question["arguments"]:
            value = question["given"]
            for step in before:
                value = value[step]
            value[last] = self._arguments(value[last], text)
        texts: list[str | Message] = []
        for variables in question["given"]:
            limit_time(self._seconds)
            try:
                text = template.render(**variables)
            except MemoryError:
                raise
            except Exception as error:  # a template is a program, which may fail in any way
                texts.append({"error": str(error)})
                continue
            most = MAX_EXTRA_CHARACTERS
            if len(text) > most and len(text) > most + MAX_GROWTH * len(json.dumps(variables)):
                return {"exceeded": f"wrote {len(text)} characters, which is too many,"}
            texts.append(text)
        return {"texts": texts}


def limit_time(seconds: float) -> None:
    """Limits the processor time of the code that follows, until the next call."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # If a call does not return to the interpreter, no exception can be raised: this second signal
    # then ends the process.
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)


def stop(number: int, frame: Any) -> NoReturn:
    """Signal handler of the time limit."""
    raise TookTooLong


def compile_template(source: str, day: datetime, markers: list[str] | None) -> Template:
    """The template of a source, as `jrl.text.chat.Renderer` describes it.

    Raises:
      TemplateSyntaxError: if the source is not a template.
    """

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}`` enclose the assistant's text, for
        supervised training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if markers is None:
                return body
            begin, end = (nodes.Output([nodes.TemplateData(m)], lineno=line) for m in markers)
            return [begin, *body, end]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = day.strftime
    return environment.from_string(source)


def raise_exception(message: str) -> NoReturn:
    """Raises an error; templates call it as ``raise_exception``."""
    raise TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Filter ``tojson``; Jinja's own escapes for HTML pages."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
