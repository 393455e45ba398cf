"""The row of an objective: all that the tests know about it, and what its file of vectors holds."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jrl.conformance.cases import FOLDER
from vectors.call import Call

# Arrays by name, in the order of the function's positional arguments.
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One call: arrays by position, settings by keyword. A None in an array is under the mask."""

    name: str
    inputs: Inputs
    parameters: Mapping[str, Any] = field(default_factory=dict)


def per_token(cases: Sequence[Case]) -> list[Case]:
    """The cases of a loss, each asked for one loss per token."""
    return [
        Case(f"{case.name}, per token", case.inputs, {**case.parameters, "aggregation": None})
        for case in cases
    ]


@dataclass(frozen=True)
class Objective:
    """A function with its cases, its defaults and the calls on which the rules are tried.

    Attributes:
      function: its public name in `jrl`.
      formula: what it computes, in plain text, for someone who reads only the file.
      source: the paper and its equation.
      outputs: the names of what it returns, in order; "metrics" is a mapping.
      oracle: from the inputs, as lists of floats, and the settings to a mapping that has each
        output, and under "gradients" the derivatives of the first output (of its sum, if it is an
        array) by the inputs that carry them.
      cases: the calls whose numbers are published.
      defaults: of its settings, but for None, which is "off" or "counted here".
      required: settings for a usual call: settings that have no default, and settings that
        replace one which small arrays cannot have.
      calls: inputs of the rules for arrays, by what is special about them.
    """

    function: str
    formula: str
    source: str
    outputs: Sequence[str]
    oracle: Callable[..., Mapping[str, Any]]
    cases: Sequence[Case]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.function}.json"

    def results(self, inputs: Inputs, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Results of the oracle for a case, as JSON values."""
        return plain(self.oracle(**inputs, **parameters))

    def document(self) -> dict[str, Any]:
        """The file's content, every number worked out by the oracle."""
        return {
            "function": self.function,
            "formula": self.formula,
            "source": self.source,
            "arguments": list(self.cases[0].inputs),
            "outputs": list(self.outputs),
            "cases": [
                {
                    "name": case.name,
                    "inputs": plain(case.inputs),
                    "parameters": plain(case.parameters),
                    **self.results(case.inputs, case.parameters),
                }
                for case in self.cases
            ],
        }


def plain(x: Any) -> Any:
    """Lists, floats and mappings only; what JSON cannot say (NaN) is null."""
    if isinstance(x, Mapping):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, np.ndarray):
        return plain(x.tolist())
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    if isinstance(x, np.generic):
        return plain(x.item())
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else ("inf" if x > 0 else "-inf")
    return x


def numbers(x: Any) -> Any:
    """The reverse of `plain` for a number that JSON cannot say."""
    if isinstance(x, dict):
        return {name: numbers(value) for name, value in x.items()}
    if isinstance(x, list):
        return [numbers(value) for value in x]
    return float(x) if x in ("inf", "-inf") else x


def text(document: Mapping[str, Any]) -> str:
    """JSON with one array a line: readable, and small differences stay small."""
    head = {name: value for name, value in document.items() if name != "cases"}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    cases = []
    for case in document["cases"]:
        parts = []
        for name, value in case.items():
            if isinstance(value, dict):
                inner = ",\n".join(
                    f"        {json.dumps(n)}: {json.dumps(v)}" for n, v in value.items()
                )
                parts.append(
                    f"      {json.dumps(name)}: {{\n{inner}\n      }}"
                    if inner
                    else f"      {json.dumps(name)}: {{}}"
                )
            else:
                parts.append(f"      {json.dumps(name)}: {json.dumps(value)}")
        cases.append("    {\n" + ",\n".join(parts) + "\n    }")
    return "{\n" + "\n".join(lines) + '\n  "cases": [\n' + ",\n".join(cases) + "\n  ]\n}\n"
