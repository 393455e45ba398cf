"""Reasoning in a turn of a model: the marks of each family, and the reader that tells reasoning,
answer and tool calls apart.

Rewards, tools and the server read turns here. A mark opens reasoning, and its own end closes it. An
end that nothing opened closes reasoning that began before the text. In Harmony (gpt-oss) each
message has a header with its channel: "final" is the answer, and every other channel reasoning.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple

REASONING = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>")),
    *(("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]")),
    *(("<seed:think>", "</seed:think>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel|>commentary", "<|channel|>final<|message|>"),
)
"""Marks that open and end the reasoning of checkpoints."""
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
"""Marks of Harmony: of a message's channel, of its text, and of the message itself."""
REASONING_TOKENS = frozenset({CHANNEL, MESSAGE, *(mark for pair in REASONING for mark in pair)})
"""Special tokens that these marks are, or consist of."""
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_TOKENS = frozenset({CHANNEL, MESSAGE, START, *MESSAGE_ENDS, "<|constrain|>"})
"""Special tokens of Harmony between and in messages."""
PEOPLE = ("assistant", "user", "system", "developer", "all")
"""Recipients of messages that are not calls."""
BLANKS = " \t\r\n\f\v\u00a0\u200b\ufeff"

_PAIRS = {opened: end for opened, end in REASONING if not opened.startswith(CHANNEL)}
PAIRS = {opened.lower(): end.lower() for opened, end in _PAIRS.items()}
"""End of reasoning by its opening mark, in lower case, without Harmony's channels."""
_ENDS = frozenset(PAIRS.values())
MAX_MARK = 64
"""Maximum characters of a mark."""
_FLAGS = re.IGNORECASE | re.ASCII
_OPENS = re.compile("|".join(re.escape(opened) for opened, _ in REASONING), _FLAGS)
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)", _FLAGS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(
    r"(?:<\|start\|>\s*\w*)?(?:\s*(?:to=[^\s<]*|<\|(?:channel|constrain)\|>\s*\w*|json|code))*\s*",
    _FLAGS,
)
_TURN = re.compile(r"<\|start\|>assistant\s*\Z")

_MARK_BEGINS = re.compile(
    "|".join(sorted({re.escape(mark[:2]) for mark in (*PAIRS, *_ENDS, CHANNEL)})), _FLAGS
)


def after_reasoning(completion: str) -> str | None:
    """Text after the last end of reasoning; None if reasoning is still open."""
    if not _MARK_BEGINS.search(completion):
        return completion
    reader = TurnReader()
    reader.add(completion)
    return None if reader.is_open else completion[reader.closed :]


def opens_reasoning(text: str) -> str:
    """The mark of open reasoning at the end of a text, with the blanks after it; empty if the text
    ends otherwise."""
    last = deque(_OPENS.finditer(text), maxlen=1)
    return text[last[0].start() :] if last and not text[last[0].end() :].strip(BLANKS) else ""


def opens_turn(text: str) -> str:
    """The end of a prompt that determines how a turn begins: a mark of open reasoning, or Harmony's
    start of a message; empty if there is none."""
    begun = _TURN.search(text)
    return opens_reasoning(text) if begun is None else begun[0]


def recipient_of(header: str) -> str | None:
    """The tool to which a message of Harmony with this header is addressed; None if it is no
    call."""
    recipient, channel = _RECIPIENT.search(header), _last_channel(header)
    if recipient is None or recipient[1] in PEOPLE or channel == "analysis":
        return None
    return recipient[1]


def _last_channel(header: str) -> str:
    channels = _CHANNEL.findall(header)
    return channels[-1].lower() if channels else ""


Kind = Literal["content", "reasoning"]


class Part(NamedTuple):
    """Part of a turn."""

    kind: Kind
    text: str


class TurnReader:
    """Incremental reader of a turn: its parts are the same however the text is divided.

    Marks and headers belong to no part. Text that may be the beginning of a mark is withheld.
    Blanks around reasoning are dropped, and so are those before an answer behind reasoning.

    Args:
      before: the end of the prompt (`opens_turn`).
      calls: marks with which a call may begin, besides a message of Harmony to a tool; the rest of
        the turn from there on is held. A mark of one character counts at the beginning of a line
        only. None does not look for calls.
      reasons: false if all text is answer, such as JSON of a schema.
    """

    def __init__(self, before: str = "", calls: Sequence[str] | None = None, reasons: bool = True):
        self._calls, self._reasons = None if calls is None else tuple(calls), reasons
        self._harmony = before.startswith(START)
        self._text, self._at, self._begin = "", 0, len(before)
        self._kind: Kind = "content"
        self._end = ""  # mark that closes reasoning; empty outside of it and in Harmony
        self._header: int | None = None  # position of an open header
        self._in_message = self._in_reasoning = self._has_marks = False
        self._blanks: dict[Kind, str] = {"content": "", "reasoning": ""}
        self._begun: dict[Kind, bool] = {"content": False, "reasoning": False}
        # Blanks at the end of an answer are withheld, as calls may follow, and then dropped.
        self._withholds, self._drops = calls is not None, False
        self._is_first = False  # the next text is the first of its block of reasoning
        self.closed = 0
        """Position in the text behind the last end of reasoning."""
        self.is_holding = False
        """True if a call may have begun."""
        if before and reasons:
            self.add(before)

    @property
    def is_open(self) -> bool:
        """True if reasoning is open."""
        if self._header is None:
            return self._in_reasoning
        channel = _last_channel(self._text[self._header :])
        return self._in_reasoning or channel.startswith(("analysis", "commentary"))

    @property
    def held(self) -> str:
        """Text from the mark of a call on."""
        return self._text[self._at :] if self.is_holding else ""

    def add(self, text: str) -> list[Part]:
        """Appends text, and returns the parts that are final."""
        self._text += text
        parts = list[Part]()
        while not self.is_holding and (match := self._pattern.search(self._text, self._at)):
            parts += self._read(match)
        if not self.is_holding and self._header is None:
            parts += self._emit(len(self._text) - self._num_withheld())
        return parts

    def finish(self) -> list[Part]:
        """The last parts, when no more text comes; held text stays held."""
        if self.is_holding:
            return []
        if self._header is not None:
            begin, self._header = self._header, None
            if _HEADER.fullmatch(self._text, begin):
                begin = len(self._text)
            self._at = max(begin, self._begin)  # what is no header is text
        parts = self._emit(len(self._text))
        if (blanks := self._blanks["content"]) and not self._drops:
            parts.append(Part("content", blanks))
        return parts

    def release(self, text: str, *, has_calls: bool = False) -> list[Part]:
        """Reads this to the end in place of the held text, without looking for calls. If it
        `has_calls`, the answer ends without blanks."""
        self._text, self._at, self._begin, self._calls = text, 0, 0, None
        self.is_holding = self._in_message = False
        self._withholds = self._drops = has_calls
        return [*self.add(""), *self.finish()]

    @property
    def _markers(self) -> tuple[str, ...]:
        """Marks that count at this position, except the marks of calls."""
        if self._header is not None:
            return MESSAGE, START, *MESSAGE_ENDS
        if self._in_message:
            return START, CHANNEL, *MESSAGE_ENDS
        if self._end:
            return (self._end,)
        harmony = (START, *MESSAGE_ENDS) if self._harmony else ()
        return (*PAIRS, *PAIRS.values(), CHANNEL, *harmony) if self._reasons else ()

    @property
    def _call_markers(self) -> tuple[str, ...]:
        is_answer = self._header is None and not self._in_message and not self._end
        return self._calls or () if is_answer else ()

    @property
    def _pattern(self) -> re.Pattern[str]:
        return _pattern(self._markers, self._call_markers)

    def _num_withheld(self) -> int:
        """Number of characters at the end that may be the beginning of a mark."""
        rest = self._text[max(self._at, len(self._text) - MAX_MARK) :]
        lower, calls = rest.lower(), self._call_markers
        num_withheld = [partial_match(lower, mark) for mark in self._markers]
        if not self._end:  # what follows a mark behind a backtick decides whether it is one
            num_withheld += [partial_match(lower, f"`{mark}`") for mark in self._markers]
            num_withheld += [partial_match(rest, f"`{mark}`") for mark in calls if len(mark) > 1]
        num_withheld += [partial_match(rest, mark) for mark in calls]
        if min(map(len, calls), default=0) == 1:  # the blanks before a bracket on its line
            blanks = len(self._text) - len(self._text[self._at :].rstrip(" \t")) - self._at
            is_line = self._text.endswith("\n", 0, len(self._text) - blanks) or self._at == 0
            num_withheld.append(blanks if is_line else 0)
        return max(num_withheld, default=0)

    def _read(self, match: re.Match[str]) -> list[Part]:
        """Reads up to a mark and the mark itself."""
        mark = match[0].lower()
        if self._header is not None:
            return self._read_header(mark, match)
        if match["call"]:
            self.is_holding = True
            return self._emit(match.start())
        is_stray = not self._end and mark in _ENDS
        parts = self._emit(match.end() if is_stray else match.start())
        self._at = match.end()
        if is_stray:  # it is text
            self.closed = match.end()
        elif mark in (CHANNEL, START):
            self._harmony, self._in_message, self._header = True, False, match.start()
        elif mark in MESSAGE_ENDS:
            self._in_message, self._kind = False, "content"
        elif self._end:
            self._end, self._kind, self._in_reasoning = "", "content", False
            self.closed, self._blanks["reasoning"] = match.end(), ""
        else:
            self._end = PAIRS[mark]
            self._open()
        return parts

    def _read_header(self, mark: str, match: re.Match[str]) -> list[Part]:
        """Reads a header of Harmony and the mark behind it."""
        begin, self._header = self._header, None
        self._at = match.end()
        if mark == START:
            self._header = match.start()
            return []
        if mark != MESSAGE:
            return []
        header = self._text[begin : match.start()]
        channel = _last_channel(header)
        if recipient_of(header) is not None:
            # A message to a tool is no answer.
            self._in_message, self._kind, self._in_reasoning = True, "content", True
            if self._calls is not None:
                assert begin is not None
                self.is_holding, self._at = True, begin
        elif channel in ("final", ""):
            self._in_message, self._kind, self._has_marks = True, "content", True
            self._in_reasoning &= not channel
            self.closed = match.end() if channel else self.closed
        else:
            self._in_message = True
            self._open()
        return []

    def _open(self) -> None:
        self._kind, self._in_reasoning, self._has_marks = "reasoning", True, True
        self._is_first, self._blanks["reasoning"] = True, ""

    def _emit(self, end: int) -> list[Part]:
        """The part up to a position, without the blanks that it ends with if these may be
        dropped."""
        kind, text, self._at = self._kind, self._text[self._at : end], end
        if self._is_first if kind == "reasoning" else self._has_marks and not self._begun[kind]:
            text = text.lstrip()
        text = self._blanks[kind] + text
        self._blanks[kind] = ""
        if kind == "reasoning" or self._withholds:
            text_before = text.rstrip()
            self._blanks[kind], text = text[len(text_before) :], text_before
        if not text:
            return []
        if kind == "reasoning" and self._is_first and self._begun[kind]:
            text = "\n" + text
        self._is_first &= kind != "reasoning"
        self._begun[kind] = True
        return [Part(kind, text)]


@cache
def _pattern(markers: tuple[str, ...], calls: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern of any mark; its group "call" matches the mark of a call."""
    # A bracket opens a call only at the beginning of a line.
    of_calls = [
        _unless_mentioned(mark) if len(mark) > 1 else rf"^[ \t]*{re.escape(mark)}" for mark in calls
    ]
    call = "|".join(of_calls) if of_calls else r"(?!)"
    return re.compile(f"(?P<call>(?-i:{call}))|{mark_pattern(markers)}", _FLAGS | re.MULTILINE)


def mark_pattern(markers: Iterable[str]) -> str:
    """Regular expression of any of these marks, for ``re.IGNORECASE``. A mark that opens reasoning
    is only mentioned between backticks."""
    patterns = [_unless_mentioned(mark) if mark in PAIRS else re.escape(mark) for mark in markers]
    return "|".join(patterns) or "(?!)"


def _unless_mentioned(mark: str) -> str:
    return f"(?<!`){re.escape(mark)}|(?<=`){re.escape(mark)}(?=[^`])"


def partial_match(text: str, mark: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark."""
    longest = min(len(mark) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
