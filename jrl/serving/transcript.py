"""Tokens of a choice as text, while they come."""

from collections.abc import Sequence
from dataclasses import dataclass

from jrl.text.tokenizer import Tokenizer

UNREADABLE = "\ufffd"
"""What bytes that are no whole character are read as."""
LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, at most: so many marks less one may become a character."""
PATIENCE = 64
"""Tokens after which bytes that no others completed are given up."""
CONTEXT = 5
"""Tokens of a prompt in whose light the first of its completion is read."""


class Unfolding:
    """The text of tokens that come one after another, each character when it is whole.

    The pieces that it gives are, end to end, the text of all tokens together, the last by `rest`.
    A tokenizer may read a token in the light of the one before, so a piece is what its tokens add
    to the text of some before them.

    Args:
      tokenizer: special tokens give no text.
      before: tokens that the text goes on from.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(before[-CONTEXT:])
        self._given = tokenizer.decode(self._ids)  # of the ids that are read, as far as it went out
        if self._given.endswith(UNREADABLE):
            self._ids, self._given = [], ""
        # Where the ids that are read begin, and those that are not settled yet.
        self._begin, self._whole = 0, len(self._ids)

    def add(self, ids: Sequence[int]) -> str:
        """What becomes readable by some more tokens."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids[self._begin :])
        # Few marks at the end may be the beginning of a character; earlier ones stay marks.
        sure = max(len(text.rstrip(UNREADABLE)), len(text) - LONGEST_CHARACTER + 1)
        waits = len(self._ids) - self._whole < PATIENCE
        settled = text[:sure] if waits else text
        if waits and not settled.startswith(self._given):
            return ""
        piece = settled[len(self._given) :]
        self._given = settled
        if len(settled) == len(text):
            # The tokens that have just come are what the next ones are read in the light of.
            self._begin, self._whole = self._whole, len(self._ids)
            self._given = self._tokenizer.decode(self._ids[self._begin :])
        return piece

    def rest(self) -> str:
        """What is left when no more tokens come: bytes that are no character, as marks."""
        text = self._tokenizer.decode(self._ids[self._begin :])
        piece = text[len(self._given) :]
        self._given = text
        return piece


class Stops:
    """Where a text ends before one of some strings, which may come in pieces.

    Args:
      stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held = tuple(stops), ""
        self.met = False
        """Whether one of them has come."""

    def add(self, piece: str) -> str:
        """The text that certainly comes before any stop, of what has come so far."""
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
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """Characters at the end of the text that the stop may begin with."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Pieces:
    """How each token is written on its own: as its text, or, where it is a part of a character, as
    the bytes in the form ``bytes:\\xe2\\x82``.

    Args:
      tokenizer: whose tokens they are.
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
        """What it is written as, a blank at its beginning included; the name of a special
        token."""
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def bytes_of(self, token: int) -> bytes:
        """What it adds to a text."""
        own = self._tokenizer.bytes_of(token)
        return self.of(token).encode() if own is None else own

    def _read(self, token: int) -> str:
        if token in self._tokenizer.special_ids:
            return self._special.get(token, "")
        # Some tokenizers drop the blank that a text begins with: the token is read after another.
        ids, text = self._before
        both, own = self._tokenizer.decode([*ids, token]), self._tokenizer.bytes_of(token)
        if UNREADABLE in both and own is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)
        return both[len(text) :] if both.startswith(text) else self._tokenizer.decode([token])


@dataclass(frozen=True)
class Place:
    """A token of a choice, for a client that asked for log-probabilities.

    Attributes:
      token: its id.
      logprob: in the policy at temperature 1, nats.
      likeliest: ids and log-probabilities of the likeliest tokens there.
      offset: characters of the choice before it.
    """

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    offset: int


class Transcript:
    """A choice while it is written.

    Args:
      tokenizer: of the policy.
      stops: texts before which it ends.
      keeps_places: whether its tokens are given one by one.
      before: tokens of the text that it goes on with.
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
        # Where it matters which token a character came with they are read one by one.
        self._one_by_one = keeps_places or bool(stops)
        self._keeps_places = keeps_places
        self._read = 0  # characters unfolded
        self._given = 0  # characters that went out
        self._waiting: list[Place] = []
        self.num_tokens = 0
        """Tokens sampled so far, as they are counted: up to the one that ended it."""

    @property
    def stopped(self) -> bool:
        """Whether one of the stops has come."""
        return self._stops.met

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        likeliest: Sequence[Sequence[tuple[int, float]]] | None,
        last: bool,
    ) -> tuple[str, list[Place]]:
        """Some more tokens.

        Args:
          tokens, logprobs, likeliest: of the places, in order; the likeliest where they are kept.
          last: whether no more come.

        Returns:
          The text that can be given out and the tokens that it begins with.
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
        """Tokens whose first character went out; at the end those without one too, unless a stop
        cut them off."""
        ready = [
            place
            for place in self._waiting
            if place.offset < self._given or (all_of_them and not self.stopped)
        ]
        self._waiting = self._waiting[len(ready) :]
        return ready
