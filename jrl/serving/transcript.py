"""Incremental detokenization of a choice, with stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from jrl.text.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
"""Replacement character, to which incomplete UTF-8 sequences are decoded."""
LONGEST_CHARACTER = 4
"""Most bytes of a UTF-8 character: one fewer replacement characters may still become one."""
PATIENCE = 64
"""Tokens after which incomplete bytes are emitted as replacement characters."""
CONTEXT = 5
"""Prompt tokens that are decoded as context of the completion's first tokens."""


class Unfolding:
    """Incremental detokenizer that emits each character once it is complete.

    The concatenated pieces, the last by `rest`, are the text of all tokens. A tokenizer may decode
    a token depending on the one before, so a piece is what its tokens add to the text of the
    preceding ones.

    Args:
      tokenizer: special tokens give no text.
      before: tokens of the preceding text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(before[-CONTEXT:])
        self._given = tokenizer.decode(self._ids)  # text of the decoded ids, as far as emitted
        if self._given.endswith(UNREADABLE):
            self._ids, self._given = [], ""
        # Start of the ids that are decoded, and start of those that are not final yet.
        self._begin, self._whole = 0, len(self._ids)

    def add(self, ids: Sequence[int]) -> str:
        """Appends tokens and returns the text that they complete."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids[self._begin :])
        # A few replacement characters at the end may be the start of a character; earlier ones
        # are final.
        sure = max(len(text.rstrip(UNREADABLE)), len(text) - LONGEST_CHARACTER + 1)
        waits = len(self._ids) - self._whole < PATIENCE
        settled = text[:sure] if waits else text
        if waits and not settled.startswith(self._given):
            return ""
        piece = settled[len(self._given) :]
        self._given = settled
        if len(settled) == len(text):
            # The newest tokens are the context of the next ones.
            self._begin, self._whole = self._whole, len(self._ids)
            self._given = self._tokenizer.decode(self._ids[self._begin :])
        return piece

    def rest(self) -> str:
        """Remaining text when no more tokens come: incomplete bytes as replacement characters."""
        text = self._tokenizer.decode(self._ids[self._begin :])
        piece = text[len(self._given) :]
        self._given = text
        return piece


class Stops:
    """Stop strings of a streamed text, which may span pieces.

    Args:
      stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = tuple(stops), ""
        self.met = False
        """True if one of them has occurred."""

    def add(self, piece: str) -> str:
        """Appends a piece and returns the text that certainly precedes any stop string."""
        if not self._stops or self.met:
            return "" if self.met else piece
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.met, self._held = True, ""
            return text[: min(places)]
        held = max(self._begun(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Number of characters at the end of the text that may be the start of the stop string."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Pieces:
    """Strings of single tokens, as log-probabilities list them.

    A token is written as its text, or, if it is a part of a character, as its bytes in the form
    ``bytes:\\xe2\\x82``.

    Args:
      tokenizer: of the tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {identity: text for text, identity in tokenizer.special_tokens.items()}
        self._known: dict[int, str] = {}
        self._before = next(
            (
                ([identity], text)
                for identity in range(tokenizer.vocab_size)
                if identity not in tokenizer.special_ids
                and (text := tokenizer.decode([identity])).isalnum()
            ),
            ([], ""),
        )

    def of(self, token: int) -> str:
        """String of a token, a leading blank included; the name of a special token."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def bytes_of(self, token: int) -> bytes:
        """Bytes that a token adds to a text."""
        own = self._tokenizer.bytes_of(token)
        return self.of(token).encode() if own is None else own

    def _read(self, token: int) -> str:
        if token in self._tokenizer.special_ids:
            return self._special.get(token, "")
        # Some tokenizers drop a leading blank of a text: the token is decoded after another.
        ids, text = self._before
        both, own = self._tokenizer.decode([*ids, token]), self._tokenizer.bytes_of(token)
        if UNREADABLE in both and own is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
        return both[len(text) :] if both.startswith(text) else self._tokenizer.decode([token])


@dataclass(frozen=True)
class Place:
    """Token of a choice with its log-probabilities.

    Attributes:
      token: its id.
      logprob: in the policy at temperature 1, nats.
      likeliest: ids and log-probabilities of the top tokens at this position.
      offset: characters of the choice before it.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    offset: int


class Transcript:
    """Text and tokens of a choice while it is generated.

    Args:
      tokenizer: of the policy.
      stops: stop strings; it ends before the first.
      keeps_places: true if its tokens are returned with log-probabilities.
      before: tokens of the text that it continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        keeps_places: bool,
        before: Sequence[int] = (),
    ):
        self._unfolding, self._stops = Unfolding(tokenizer, before), Stops(stops)
        self._ends = frozenset(tokenizer.stop_ids)
        # If the token of each character matters, tokens are decoded one by one.
        self._one_by_one = keeps_places or bool(stops)
        self._keeps_places = keeps_places
        self._read = 0  # characters unfolded
        self._given = 0  # characters that went out
        self._waiting: list[Place] = []
        self.num_tokens = 0
        """Tokens sampled so far, up to the one that ended it."""

    @property
    def stopped(self) -> bool:
        """True if a stop string has occurred."""
        return self._stops.met

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        likeliest: Sequence[Sequence[tuple[int, float]]] | None,
        last: bool,
    ) -> tuple[str, list[Place]]:
        """Appends tokens.

        Args:
          tokens, logprobs, likeliest: of the positions, in order; the likeliest where they are
            recorded.
          last: true if no more come.

        Returns:
          The text that is final and the tokens that start in it.
        """
        text, ended = "", bool(tokens) and last and tokens[-1] in self._ends
        readable = tokens[:-1] if ended else tokens
        if not self._one_by_one:
            text = self._unfolding.add(readable)
            self.num_tokens += len(tokens)
        else:
            for number, token in enumerate(readable):
                if self._keeps_places:
                    others = tuple(likeliest[number]) if likeliest is not None else ()
                    self._waiting.append(Place(token, logprobs[number], others, self._read))
                piece = self._unfolding.add([token])
                self._read += len(piece)
                text += self._stops.add(piece)
                self.num_tokens += 1
                if self.stopped:
                    break
            self.num_tokens += ended and not self.stopped
        if last and not self.stopped:
            rest = self._unfolding.rest()
            text += self._stops.add(rest) + ("" if self.stopped else self._stops.rest())
        self._given += len(text)
        return text, self._places(last or self.stopped)

    def _places(self, all_of_them: bool) -> list[Place]:
        """Tokens whose first character was emitted, removed from those that wait.

        At the end they are joined by tokens without text, unless a stop string ended the choice.
        """
        ready = [
            place
            for place in self._waiting
            if place.offset < self._given or (all_of_them and not self.stopped)
        ]
        self._waiting = self._waiting[len(ready) :]
        return ready
