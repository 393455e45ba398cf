"""Terminal of a conversation: reads messages and commands by line, and prints answers as they are
generated.

Input that is no terminal, such as a pipe, is read to its end; then no prompt is printed and an
error ends the conversation.
"""

import io
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from importlib import import_module
from typing import TextIO

from jrl.serving.api.fields import ApiError
from jrl.serving.chat.conversation import Conversation, ToolOutput

PROMPT, CONTINUATION = "> ", "... "
HELP = """\
/system TEXT   set the system message and start again; without TEXT leave it out
/set NAME N    set temperature, top_p, top_k, min_p, max_tokens or seed
/reasoning     show the reasoning of the last answer
/clear         start a new conversation
/exit          leave; so does Ctrl-D
A line that ends in \\ continues in the next. Ctrl-C stops an answer. // begins a message with /."""
SETTINGS: Mapping[str, type[float] | type[int]] = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
}
"""Arguments of requests that `/set` changes, with their types."""
UNPRINTABLE = re.compile(r"[^\S\n\t ]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move a terminal's cursor or change its state."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TextStream = TextIO | io.TextIOBase
"""Stream of text, for example `sys.stdin` or an `io.StringIO`."""


class Terminal:
    """Terminal of one conversation.

    Args:
      lines: the user's input.
      output: for answers.
      shows_reasoning: true prints reasoning in full; false as the number of its words.
    """

    def __init__(
        self,
        conversation: Conversation,
        lines: TextStream,
        output: TextStream,
        *,
        shows_reasoning: bool = False,
    ):
        self._conversation, self._lines, self._output = conversation, lines, output
        self._shows_reasoning, self._is_interactive = shows_reasoning, lines.isatty()
        self._is_styled = output.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._print(HELP),
            "/clear": lambda _: conversation.messages.clear(),
            "/system": self._set_system,
            "/set": self._set,
            "/reasoning": lambda _: self._print(printable(conversation.reasoning)),
        }

    def run(self) -> None:
        """Converses until the end of the input or ``/exit``.

        Raises:
          ValueError: for a rejected message or command of input that is no terminal.
          RuntimeError: if the engine has failed.
        """
        if self._is_interactive:
            with suppress(ImportError):  # edits lines and keeps their history
                import_module("readline")
            self._print("/help lists the commands, /exit leaves.")
        while (text := self._read()) is not None:
            name, _, argument = text.partition(" ")
            if name in ("/exit", "/quit"):
                return
            try:
                if text.startswith("/") and not text.startswith("//"):
                    self._command(name, argument.strip())
                elif text.strip():
                    self._answer(text[1:] if text.startswith("//") else text)
            except (ApiError, ValueError) as error:
                if self._conversation.service.failure is not None:
                    raise RuntimeError(str(error)) from error
                if not self._is_interactive:
                    raise ValueError(str(error)) from error
                self._print(f"error: {error}")

    def _read(self) -> str | None:
        """The next message or command; None at the end of the input."""
        parts, prompt = list[str](), PROMPT
        while True:
            try:
                line = self._read_line(prompt)
            except KeyboardInterrupt:
                self._print("")
                return None
            if not line and not parts:
                return None
            parts.append(line.rstrip("\n").removesuffix("\\"))
            if not line.rstrip("\n").endswith("\\"):
                return "\n".join(parts)
            prompt = CONTINUATION

    def _read_line(self, prompt: str) -> str:
        if not (self._is_interactive and self._lines is sys.stdin):
            return self._lines.readline()
        try:
            return input(prompt) + "\n"
        except EOFError:
            self._print("")
            return ""

    def _command(self, name: str, argument: str) -> None:
        if name not in self._commands:
            raise ValueError(f"command {name!r} is unknown: /help lists them.")
        self._commands[name](argument)

    def _set_system(self, text: str) -> None:
        self._conversation.system = text
        self._conversation.messages.clear()

    def _set(self, words: str) -> None:
        name, _, text = words.partition(" ")
        if name not in SETTINGS:
            raise ValueError(f"/set {name!r} must be one of {', '.join(SETTINGS)}.")
        try:
            value = SETTINGS[name](text)
        except ValueError as error:
            kind = "a number" if SETTINGS[name] is float else "an integer"
            raise ValueError(f"/set {name} {text!r} must be {kind}.") from error
        self._conversation.arguments[name] = value

    def _answer(self, text: str) -> None:
        """Prints the answer to a message; Ctrl-C stops it."""
        printer = _AnswerPrinter(self._output, self._is_styled, self._shows_reasoning)
        try:
            with closing(self._conversation.answer(text)) as parts:
                for part in parts:
                    if isinstance(part, ToolOutput):
                        printer.add_line(f"  = {part.text}")
                        continue
                    printer.add_reasoning(part.reasoning)
                    printer.add_content(part.content)
                    for call in part.calls:
                        printer.add_line(f"  {call.name}({call.arguments})")
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            printer.add_line("[stopped]")
        finally:
            printer.end()

    def _print(self, text: str) -> None:
        print(text, file=self._output, flush=True)


class _AnswerPrinter:
    """Prints an answer piece by piece: content, folded reasoning, and lines of tools."""

    def __init__(self, output: TextStream, is_styled: bool, shows_reasoning: bool):
        self._output, self._is_styled = output, is_styled
        self._shows_reasoning, self._num_words = shows_reasoning, 0
        self._reasoning, self._at_line_start = "", True

    def add_reasoning(self, text: str) -> None:
        if not text:
            return
        self._reasoning += text
        if self._shows_reasoning:
            self._write(text, dim=True)
        elif self._is_styled:
            self._write_raw(f"\r{DIM}reasoning: {len(self._reasoning.split())} words{PLAIN}")

    def add_content(self, text: str) -> None:
        if text:
            self._fold()
            self._write(text)

    def add_line(self, text: str) -> None:
        """Adds a line that is no text of the policy."""
        self._fold()
        self._write(("" if self._at_line_start else "\n") + text + "\n", dim=True)

    def end(self) -> None:
        """Ends the last line."""
        self._fold()
        if not self._at_line_start:
            self._write("\n")

    def _fold(self) -> None:
        """Ends the reasoning, if there is any: by its number of words unless it was shown."""
        if not self._reasoning:
            return
        number, self._reasoning = len(self._reasoning.split()), ""
        if self._shows_reasoning:
            self._write("\n\n")
            return
        self._write_raw("\r" if self._is_styled else "")
        self._write(f"[reasoning: {number} words; /reasoning shows them]\n", dim=True)

    def _write(self, text: str, dim: bool = False) -> None:
        clean = printable(text)
        self._at_line_start = clean.endswith("\n")
        self._write_raw(f"{DIM}{clean}{PLAIN}" if dim and self._is_styled else clean)

    def _write_raw(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def printable(text: str) -> str:
    """Replaces control characters, which would act on the terminal, with U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", text)
