"""Responses in OpenAI's format: full ones, and the chunks of a stream.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from jrl.serving.asked import Asked
from jrl.serving.job import Piece
from jrl.serving.transcript import Pieces, Place

DONE = "data: [DONE]\n\n"
"""The last event of a stream."""


class Answer:
    """Response to one request, built up incrementally.

    Args:
      asked: the request.
      pieces: text of single tokens.
      prompt_tokens: of all its prompts.
      echoes: texts of the prompts, if they precede the completions.
    """

    def __init__(
        self, asked: Asked, pieces: Pieces, prompt_tokens: int, echoes: Sequence[str] = ()
    ):
        self._asked, self._pieces, self._prompt_tokens = asked, pieces, prompt_tokens
        kind = "chatcmpl" if asked.chat else "cmpl"
        self._id, self._created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        prompts = 1 if asked.prompts is None else len(asked.prompts)
        number = prompts * asked.n
        self._texts = [echoes[index // asked.n] if echoes else "" for index in range(number)]
        self._places: list[list[Place]] = [[] for _ in range(number)]
        self._finishes: list[str | None] = [None] * number
        self._tokens, self._begun = [0] * number, [False] * number
        self._version = 0

    @property
    def finished(self) -> bool:
        """True if all choices have finished."""
        return None not in self._finishes

    def take(self, piece: Piece) -> None:
        """Appends a piece to its choice."""
        index = piece.index
        self._texts[index] += piece.text
        self._places[index] += piece.places
        self._tokens[index], self._finishes[index] = piece.num_tokens, piece.finish
        self._version = piece.version

    def whole(self) -> dict[str, Any]:
        """Body of a response that is not a stream."""
        choices = []
        for index, text in enumerate(self._texts):
            content: dict[str, Any] = {"text": text}
            if self._asked.chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(self._places[index]),
                    "finish_reason": self._finishes[index],
                }
            )
        kind = "chat.completion" if self._asked.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    def chunks(self, piece: Piece) -> str:
        """Server-sent events of a piece in a stream; `take` it first."""
        index, events = piece.index, ""
        if not self._begun[index]:
            self._begun[index] = True
            if self._asked.chat:
                events += self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif echo := self._texts[index][: len(self._texts[index]) - len(piece.text)]:
                events += self._chunk(index, {"text": echo})
        if piece.text or piece.places:
            content: dict[str, Any] = {"text": piece.text}
            if self._asked.chat:
                content = {"delta": {"content": piece.text}}
            content["logprobs"] = self._logprobs(piece.places)
            events += self._chunk(index, content)
        if piece.finish is not None:
            content = {"delta": {}} if self._asked.chat else {"text": ""}
            events += self._chunk(index, {**content, "finish_reason": piece.finish})
        return events

    def end(self) -> str:
        """The last events of a stream."""
        if not self._asked.include_usage:
            return DONE
        return event({**self._chunk_head(), "choices": [], "usage": self._usage()}) + DONE

    def _chunk(self, index: int, content: dict[str, Any]) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **content}
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._chunk_head(), "choices": [choice], **usage})

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._asked.chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": fingerprint(self._version),
        }

    def _usage(self) -> dict[str, int]:
        sampled = sum(self._tokens)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self._prompt_tokens + sampled,
        }

    def _logprobs(self, places: Sequence[Place]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        if self._asked.chat:
            return {"content": [self._of_place(place) for place in places], "refusal": None}
        written, likeliest = [], []
        for place in places:
            written.append(self._pieces.of(place.token))
            others = {self._pieces.of(token): value for token, value in place.likeliest}
            likeliest.append({**others, written[-1]: place.logprob})
        return {
            "tokens": written,
            "token_logprobs": [place.logprob for place in places],
            "top_logprobs": likeliest,
            "text_offset": [place.offset for place in places],
        }

    def _of_place(self, place: Place) -> dict[str, Any]:
        others = [self._of_token(token, value) for token, value in place.likeliest]
        return {**self._of_token(place.token, place.logprob), "top_logprobs": others}

    def _of_token(self, token: int, logprob: float) -> dict[str, Any]:
        content = list(self._pieces.bytes_of(token))
        return {"token": self._pieces.of(token), "logprob": logprob, "bytes": content}


def fingerprint(version: int) -> str:
    """`system_fingerprint` of a response: the policy version that generated it."""
    return f"step-{version}"


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
