"""Arguments of a tool call, as chat templates take them.

The program that renders templates (`jrl.text.templates.program`) loads this file by its path; it
therefore imports nothing of `jrl`.
"""

import json
from collections.abc import Mapping
from typing import Any


class Arguments(dict[str, Any]):
    """The arguments of a call: a mapping for templates that write JSON themselves, and their JSON
    text for those that put it into a text."""

    def __init__(self, values: Mapping[str, Any], written: str | None = None):
        super().__init__(values)
        self.written: str = json.dumps(values, ensure_ascii=False) if written is None else written

    def __str__(self) -> str:
        return self.written

    def __add__(self, after: str) -> str:
        return self.written + after

    def __radd__(self, before: str) -> str:
        return before + self.written
