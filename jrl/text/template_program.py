"""Program that renders chat templates in a process of its own, with limits of time and memory.

It is started by its path, and not as a part of `jrl`, so that it loads Jinja and little else. Its
arguments are the path of `jrl.tasks.tools.calls` and the processor seconds for an answer.
It reads one JSON object per line and answers each with another:

* ``{"key": K, "source": ..., "day": ..., "marks": ...}`` compiles a template: ``{}``, or
  ``{"syntax": [LINE, MESSAGE]}``.
* ``{"key": K, "given": [{...}, ...], "arguments": [[PATH, TEXT], ...]}`` renders it with each of
  these sets of names: ``{"texts": [...]}``, in which ``{"error": ...}`` replaces one that it
  rejects; or ``{"unknown": true}`` if no such template was compiled. A path leads to the
  arguments of a call.

Either may be answered with ``{"exceeded": PHRASE}``, the limit that the template exceeded.
"""

import json
import signal
import sys
from datetime import datetime
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

MAX_MEMORY = 2**30
"""Bytes of address space, the interpreter included."""
MAX_EXTRA_CHARACTERS = 2**20
"""Characters of a text beyond `MAX_GROWTH` times those of the conversation."""
MAX_GROWTH = 16
MAX_COMPILED = 64
"""Templates that stay compiled; the oldest is dropped."""


class TookTooLong(BaseException):
    """Raised in a template wherever it is, and caught by nothing in between."""


def main() -> None:
    """Serves questions from the standard input until it ends."""
    seconds = float(sys.argv[2])
    limit_memory()
    signal.signal(signal.SIGPROF, stop)
    templates: dict[str, Template] = {}
    write({})
    for line in sys.stdin:
        limit_time(seconds)
        try:
            reply = answer(templates, json.loads(line), seconds)
        except TookTooLong:
            reply = {"exceeded": f"took more than {seconds:g} seconds"}
        except MemoryError:
            reply = {"exceeded": f"needed more than {MAX_MEMORY >> 20} MB of memory"}
        write(reply)


def write(reply: Message) -> None:
    """Writes one line."""
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def limit_time(seconds: float) -> None:
    """Bounds the time of the processor for what follows, until the next call."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    # Where a single call does not come back to the interpreter, which would raise, this signal
    # ends the process, be there somebody who waits for it or not.
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)


def stop(number: int, frame: Any) -> NoReturn:
    """Handler of the signal that the time is up."""
    raise TookTooLong


def limit_memory() -> None:
    """Bounds the address space of this process, where the system knows how."""
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def answer(templates: dict[str, Template], question: Message, seconds: float) -> Message:
    """The reply to a question.

    Args:
      templates: those that are compiled, by key.
      seconds: for each text.
    """
    key = question["key"]
    if "source" in question:
        day = datetime.fromisoformat(question["day"])
        try:
            templates[key] = compile_template(question["source"], day, question["marks"])
        except TemplateSyntaxError as error:
            return {"syntax": [error.lineno, error.message]}
        while len(templates) > MAX_COMPILED:
            del templates[next(iter(templates))]
        return {}
    if key not in templates:
        return {"unknown": True}
    for (*before, last), text in question["arguments"]:
        value = question["given"]
        for step in before:
            value = value[step]
        value[last] = arguments_type()(value[last], text)
    texts: list[str | Message] = []
    for variables in question["given"]:
        limit_time(seconds)
        try:
            text = templates[key].render(**variables)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which may fail in any way
            texts.append({"error": str(error)})
            continue
        if len(text) > MAX_EXTRA_CHARACTERS and len(text) > MAX_EXTRA_CHARACTERS + MAX_GROWTH * len(
            json.dumps(variables)
        ):
            return {"exceeded": f"wrote {len(text)} characters, which is too many,"}
        texts.append(text)
    return {"texts": texts}


@cache
def arguments_type() -> Any:
    """The class of arguments of a call."""
    spec = spec_from_file_location("arguments", sys.argv[1])
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Arguments


def compile_template(source: str, day: datetime, markers: list[str] | None) -> Template:
    """The template of a source.

    Args:
      day: what it takes for today.
      markers: what it writes around its ``{% generation %}``; None writes nothing.

    Raises:
      TemplateSyntaxError: it is none.
    """

    class Generation(Extension):
        """``{% generation %}`` ... ``{% endgeneration %}`` marks what an assistant said, for
        supervised training; the text is what lies between."""

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
    """The filter of that name; Jinja's own writes for HTML pages."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


if __name__ == "__main__":
    main()
