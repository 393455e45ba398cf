"""Published cases: a quantity of a paper, its inputs and settings, and the right values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "vectors"
USUAL = Path(__file__).parent / "usual_settings.json"

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo_loss": ("ppo_loss", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"})
}
"""Names of papers for settings of another quantity: its file, and these settings."""

CONVENTIONS = {
    "max_log_ratio": "no paper clamps log-ratios",
    "max_value": "no paper clamps an estimate of the KL divergence",
    "clip_dual": "dual clip is an addition to PPO",
    "empty_rows": "no paper says if a response without tokens counts",
    "unbiased": "papers write std: of the sample or of the population",
    "epsilon": "papers leave open what is added to a standard deviation",
    "whiten_epsilon": "papers leave open what is added to a standard deviation",
    "singleton": "no paper has a group of one response",
    "gradient": "GSPO's equation and its variant per token have equal values",
    "lone_tail": "no paper says what a lone response's baseline is",
}
"""Settings in which implementations may differ and be right, and why."""
TIES = {"CLIP-1 A=-1 c=4": "the ratio is the cap itself"}
"""Cases on a kink of the loss, and where: its gradient may be any between both sides."""
OFF = ("max_log_ratio", "max_value", "clip_dual", "floor")
"""Settings that a function need not have if a case turns them off by None."""


@dataclass(frozen=True)
class Case:
    """One call and the right results.

    Attributes:
      quantity: its name in the list of quantities.
      name: the case's own.
      inputs: arrays by the name of the argument, float64; 0 under the mask.
      settings: numbers, words and arrays by keyword, the usual ones of the quantity among them.
      named: the settings that the file names in this case.
      results: right values by name, for example `loss` and `gradient by logprobs`; NaN marks an
        entry that is not compared.
      dropped: settings that a function without that keyword has all the same.
    """

    quantity: str
    name: str
    inputs: Mapping[str, np.ndarray]
    settings: Mapping[str, Any]
    named: frozenset[str]
    results: Mapping[str, np.ndarray]
    dropped: frozenset[str] = frozenset()

    @property
    def by(self) -> tuple[str, ...]:
        """The inputs by which the first result is differentiated."""
        start = "gradient by "
        return tuple(name.removeprefix(start) for name in self.results if name.startswith(start))


@cache
def document(name: str) -> dict[str, Any]:
    """A file of vectors: `formula`, `source`, `arguments`, `outputs` and `cases`."""
    file, _ = NAMED.get(name, (name, {}))
    path = FOLDER / f"{file}.json"
    if not path.exists():
        raise ValueError(f"quantity {name!r} is unknown: one of {', '.join(quantities())}")
    return json.loads(path.read_text(encoding="utf-8"))


def quantities() -> list[str]:
    """The names of all quantities."""
    return sorted([*NAMED, *(path.stem for path in FOLDER.glob("*.json"))])


@cache
def cases(name: str) -> list[Case]:
    """The cases of a quantity."""
    content = document(name)
    file, fixed = NAMED.get(name, (name, {}))
    published = [_case(name, content["outputs"], case, file, {*fixed}) for case in content["cases"]]
    return [
        case
        for case in published
        if all(np.array_equal(case.settings[key], x) for key, x in fixed.items())
    ]


@cache
def _usual(file: str) -> dict[str, Any]:
    """The values of the settings that a case does not name."""
    values = json.loads(USUAL.read_text(encoding="utf-8")).get(file, {})
    return {name: _setting(name, x) for name, x in values.items()}


def _case(name: str, outputs: list[str], case: dict[str, Any], file: str, fixed: set[str]) -> Case:
    inputs = {key: _array(values) for key, values in case["inputs"].items()}
    results: dict[str, np.ndarray] = {}
    for key in outputs:
        if isinstance(case[key], dict):
            results |= {f"{key}.{one}": _right(x) for one, x in case[key].items()}
        else:
            results[key] = _right(case[key])
    for key, values in case.get("gradients", {}).items():
        results[f"gradient by {key}"] = _right(values)
    passed = {key: _setting(key, x) for key, x in case["parameters"].items()}
    off = {key for key in OFF if key in passed and passed[key] is None}
    settings, named = {**_usual(file), **passed}, frozenset(passed)
    return Case(name, case["name"], inputs, settings, named, results, frozenset(fixed | off))


def _array(values: Any) -> np.ndarray:
    """An array of a file; what is under the mask is 0, which the rules replace."""
    x = np.array(values, dtype=object)
    if all(isinstance(one, bool) for one in x.flat):
        return x.astype(bool)
    if all(isinstance(one, int) for one in x.flat):
        return x.astype(np.int32)
    return np.where(x == None, 0, x).astype(float)  # noqa: E711 - elementwise


def _right(values: Any) -> np.ndarray:
    x = np.array(values, dtype=object)
    return np.where(x == None, np.nan, x).astype(float)  # noqa: E711 - elementwise


def _setting(name: str, value: Any) -> Any:
    if isinstance(value, list):
        # Edges of buckets decide the shape of the result.
        return tuple(value) if name == "edges" else _array(value)
    return float(value) if value in ("inf", "-inf") else value
