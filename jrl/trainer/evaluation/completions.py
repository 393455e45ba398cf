"""Output of an evaluation's completions: a JSON line for each, and the first ones for display."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Any

from jrl.rollout.sampler import Completion
from jrl.text.prompt_format import PromptFormat


class Completions:
    """Writer of the completions of each phase.

    Args:
      path: of the file, which is overwritten when this is entered; None writes none.
      format: encoding of the prompts.
      show: number of prompts of which a completion is kept for display.

    Attributes:
      shown: the first sampled completion of each of the first prompts, as records of the file.
    """

    def __init__(self, path: str | None, format: PromptFormat, show: int):
        self._path, self._format, self._show = path, format, show
        self._file: IO[str] | None = None
        self._stack = ExitStack()
        self.shown: list[dict[str, Any]] = []

    def add(self, phase: str, completions: Sequence[Completion]) -> None:
        """Takes the completions of a phase, "sampled" or "greedy"."""
        for completion in completions:
            request = completion.trajectory.request
            # Held-out prompts count down from -1.
            position = {"kind": phase, "number": -1 - request.prompt, "sample": request.sample}
            shows = phase == "sampled" and request.sample == 0 and len(self.shown) < self._show
            if self._file is None and not shows:
                continue
            record = {**position, **completion.record(self._format)}
            if shows:
                self.shown.append(record)
            if self._file is not None:
                self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        if self._file is not None:
            self._file.flush()

    def __enter__(self) -> "Completions":
        if self._path is not None:
            self._file = self._stack.enter_context(open(self._path, "w", encoding="utf-8"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._file = None
