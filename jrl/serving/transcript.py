"""Incremental detokenization of a choice, with stop strings."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jrl.serving.api.output import Output
from jrl.tasks.answers.reasoning import partial_match
from jrl.text.tokenizer import Tokenizer

Decode = Callable[[Sequence[int]], str]
"""Decoder of token ids to text, with or without special tokens."""

REPLACEMENT_CHARACTER = "\ufffd"
"""Replacement character, to which incomplete UTF-8 sequences are decoded."""
MAX_CHARACTER_BYTES = 4
"""Most bytes of a UTF-8 character: one fewer replacement characters may still become one."""
MAX_INCOMPLETE_TOKENS = 64
"""Tokens after which incomplete bytes are emitted as replacement characters."""
CONTEXT_TOKENS = 5
"""Prompt tokens that are decoded as context of the completion's first tokens."""


class Detokenizer:
    """Incremental detokenizer that emits each character once it is complete.

    The concatenated segments, the last by `rest`, are the text of all tokens. A tokenizer may
    decode a token depending on the one before, so a segment is what its tokens add to the text of
    the preceding ones.

    Args:
      decode: of the tokens.
      before: tokens of the preceding text.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()):
        self._decode = decode
        self._ids = list(before[-CONTEXT_TOKENS:])
        self._emitted = decode(self._ids)  # text of the decoded ids, as far as emitted
        if self._emitted.endswith(REPLACEMENT_CHARACTER):
            self._ids, self._emitted = [], ""
        # Start of the ids that are decoded, and start of those that are not final yet.
        self._begin, self._final = 0, len(self._ids)

    def add(self, ids: Sequence[int]) -> str:
        """Appends tokens and returns the text that they complete."""
        self._ids += ids
        text = self._decode(self._ids[self._begin :])
        # A few replacement characters at the end may be the start of a character; earlier ones
        # are final.
        sure_length = max(
            len(text.rstrip(REPLACEMENT_CHARACTER)), len(text) - MAX_CHARACTER_BYTES + 1
        )
        is_pending = len(self._ids) - self._final < MAX_INCOMPLETE_TOKENS
        final_text = text[:sure_length] if is_pending else text
        if is_pending and not final_text.startswith(self._emitted):
            return ""
        new_text = final_text[len(self._emitted) :]
        self._emitted = final_text
        if len(final_text) == len(text):
            # The newest tokens are the context of the next ones.
            self._begin, self._final = self._final, len(self._ids)
            self._emitted = self._decode(self._ids[self._begin :])
        return new_text

    def rest(self) -> str:
        """Remaining text when no more tokens come: incomplete bytes as replacement characters."""
        text = self._decode(self._ids[self._begin :])
        new_text = text[len(self._emitted) :]
        self._emitted = text
        return new_text


class StopStrings:
    """Stop strings of a streamed text, none of them empty, which may span calls of `add`.

    Args:
      keeps: true if the text includes the one that has occurred.
    """

    def __init__(self, stops: Sequence[str], keeps: bool = False):
        self._stops, self._keeps, self._withheld = tuple(stops), keeps, ""
        self.stopped = False
        """True if one of them has occurred."""

    def add(self, new_text: str) -> str:
        """Appends text and returns the text that certainly precedes any stop string."""
        if not self._stops or self.stopped:
            return "" if self.stopped else new_text
        text = self._withheld + new_text
        matches = [(begin, -len(stop)) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._withheld = True, ""
            begin, minus_length = min(matches)
            return text[: begin - minus_length if self._keeps else begin]
        withheld = max(partial_match(text, stop) for stop in self._stops)
        self._withheld = text[len(text) - withheld :]
        return text[: len(text) - withheld]

    def rest(self) -> str:
        """Text that was held back, when no more comes."""
        withheld, self._withheld = self._withheld, ""
        return withheld


class TokenStrings:
    """Strings of single tokens, as log-probabilities list them.

    A token is written as its text, or, if it is a part of a character, as its bytes in the form
    ``bytes:\\xe2\\x82``.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {identity: text for text, identity in tokenizer.special_tokens.items()}
        self._cached: dict[int, str] = {}
        self._before = next(
            (
                ([identity], text)
                for identity in range(tokenizer.vocab_size)
                if identity not in tokenizer.special_ids
                and (text := tokenizer.decode([identity])).isalnum()
            ),
            ([], ""),
        )

    def string_of(self, token: int) -> str:
        """String of a token, a leading blank included; the name of a special token."""
        if token not in self._cached:
            self._cached[token] = self._read(token)
        return self._cached[token]

    def bytes_of(self, token: int) -> bytes:
        """Bytes that a token adds to a text."""
        token_bytes = self._tokenizer.bytes_of(token)
        return self.string_of(token).encode() if token_bytes is None else token_bytes

    def _read(self, token: int) -> str:
        if token in self._tokenizer.special_ids:
            return self._special.get(token, "")
        # Some tokenizers drop a leading blank of a text: the token is decoded after another.
        ids, text = self._before
        joint_text = self._tokenizer.decode([*ids, token])
        token_bytes = self._tokenizer.bytes_of(token)
        if REPLACEMENT_CHARACTER in joint_text and token_bytes is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        if joint_text.startswith(text):
            return joint_text[len(text) :]
        return self._tokenizer.decode([token])


@dataclass(frozen=True)
class TokenLogprobs:
    """Token of a choice with its log-probabilities.

    Attributes:
      logprob: in the policy at temperature 1, nats; None of the first token of a prompt.
      top_logprobs: ids and log-probabilities of the top tokens at this position.
      offset: characters of the choice before it.
      rank: of a token of a prompt by its log-probability, 1 for the most probable; else None.
    """

    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    offset: int
    rank: int | None = None


class Transcript:
    """Text and tokens of a choice while it is generated.

    Args:
      decode: of its tokens.
      ends: tokens that end it in the engine.
      output: its stops.
      keeps_logprobs: true if its tokens are returned with log-probabilities.
      before: tokens of the text that it continues.
      keeps_all: true if each sampled token is returned with its log-probability, also the one that
        ends it and those of a stop string; otherwise those that start in its text.
    """

    def __init__(
        self,
        decode: Decode,
        ends: Collection[int],
        output: Output,
        keeps_logprobs: bool,
        before: Sequence[int] = (),
        keeps_all: bool = False,
    ):
        self._detokenizer = Detokenizer(decode, before)
        self._stops = StopStrings(output.stops, output.keeps_stop)
        self._ends, self._output = frozenset(ends), output
        # If the token of each character matters, tokens are decoded one by one.
        self._token_by_token = bool(keeps_logprobs or output.stops or output.stop_ids)
        self._keeps_logprobs, self._keeps_all = keeps_logprobs, keeps_all
        self._read = 0  # number of characters processed
        self._emitted = 0  # number of characters emitted
        self._pending: list[TokenLogprobs] = []
        self._has_stop_token = False
        self.num_tokens = 0
        """Tokens sampled so far, up to the one that ended it."""

    @property
    def stopped(self) -> bool:
        """True if a stop string or token of the request has occurred."""
        return self._stops.stopped or self._has_stop_token

    def add(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None,
        last: bool,
    ) -> tuple[str, list[TokenLogprobs]]:
        """Appends tokens.

        Args:
          tokens, logprobs, top_logprobs: of the positions, in order; the top tokens only if they
            are recorded.
          last: true if no more come.

        Returns:
          The text that is final and the tokens that start in it.
        """
        ended = bool(tokens) and last and tokens[-1] in self._ends
        readable = tokens[:-1] if ended and not self._output.keeps_stop else tokens
        if self._token_by_token:
            text = self._add_each(tokens, len(readable), logprobs, top_logprobs)
        else:
            text = self._detokenizer.add(readable)
            self.num_tokens += len(tokens)
        if (last or self._has_stop_token) and not self._stops.stopped:
            rest = self._detokenizer.rest()
            text += self._stops.add(rest) + ("" if self._stops.stopped else self._stops.rest())
        self._emitted += len(text)
        # At the end tokens without text come too, unless a stop string ended the choice.
        takes_all = self._keeps_all or (last and not self.stopped)
        ready = [token for token in self._pending if takes_all or token.offset < self._emitted]
        self._pending = self._pending[len(ready) :]
        return text, ready

    def _add_each(
        self,
        tokens: Sequence[int],
        num_readable: int,
        logprobs: Sequence[float],
        top_logprobs: Sequence[Sequence[tuple[int, float]]] | None,
    ) -> str:
        """Appends tokens one by one up to a stop, and returns the text that precedes any."""
        text = ""
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            may_stop = self.num_tokens > self._output.min_tokens
            self._has_stop_token = may_stop and token in self._output.stop_ids
            is_end = index >= num_readable
            is_end |= self._has_stop_token and not self._output.keeps_stop
            if self._keeps_logprobs and (self._keeps_all or not is_end):
                top = () if top_logprobs is None else tuple(top_logprobs[index])
                self._pending.append(TokenLogprobs(token, logprobs[index], top, self._read))
            if not is_end:
                new_text = self._detokenizer.add([token])
                self._read += len(new_text)
                text += self._stops.add(new_text) if may_stop else new_text
            if is_end or self.stopped:
                break
        return text
