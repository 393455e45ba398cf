"""Verdicts: a function beside the cases and the rules of a quantity."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from .cases import CONVENTIONS, TIES, Case, cases, document
from .frameworks import Call, Failure, Function, Results, accepted, framework_of, run
from .rules import RULES, Rule, Trial, hidden
from .views import PER_TOKEN, shape_of

EXACT = 1e-10
"""Of equal formulas in float64: six digits more than float32 has, and room for sums and
exponentials in another order."""
ROUNDED = 1e-6
"""Of a formula of which a part is computed in float32, or of 1e-8 added to a count."""
SCALE = 1e-3
"""Results below are compared as if they were as large: sums of larger terms that cancel."""

State = Literal["holds", "rounded", "convention", "misses", "raises", "not expressed"]


@dataclass(frozen=True)
class Finding:
    """Result of a case or a rule.

    Attributes:
      name: of the case or rule.
      state: "rounded" holds to 1e-6 but not to 1e-10; "convention" is right by another convention.
      difference: the largest of all results, relative to the largest right value.
      reason: the result that differs, the convention, the error, what is missing.
      example: inputs, settings, the result's name, what came and what is right.
    """

    name: str
    state: State
    difference: float = 0.0
    reason: str = ""
    example: Mapping[str, Any] | None = None

    @property
    def fails(self) -> bool:
        return self.state in ("misses", "raises")


@dataclass(frozen=True)
class Report:
    """Findings of a function: one per case and one per rule that says something about it."""

    quantity: str
    cases: tuple[Finding, ...]
    rules: tuple[Finding, ...]

    @property
    def verdict(self) -> str:
        """Of all cases and of the rules that any implementation needs."""
        needed = [rule for rule in self.rules if RULES[rule.name].needed]
        states = {finding.state for finding in (*self.cases, *needed)}
        if all(case.state == "not expressed" for case in self.cases):
            return "not expressed"
        if states & {"misses", "raises"}:
            return "differs"
        if "convention" in states:
            return "another convention"
        return "agrees to 1e-6" if "rounded" in states else "agrees"

    @property
    def difference(self) -> float:
        """The largest of all cases that are not right by another convention."""
        shown = (f.difference for f in self.cases if f.state != "convention")
        return max(shown, default=0.0)

    @property
    def smallest(self) -> Finding | None:
        """The failing case, or else rule, with the smallest inputs."""
        for findings in (self.cases, self.rules):
            failing = [f for f in findings if f.fails and f.example]
            if failing:
                return min(failing, key=lambda f: f.example["size"] if f.example else 0)
        return None

    def json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "quantity": self.quantity,
            "verdict": self.verdict,
            "difference": _plain(self.difference),
            "cases": [_plain(asdict(finding)) for finding in self.cases],
            "rules": [_plain(asdict(finding)) for finding in self.rules],
        }


def check(function: Function, quantity: str, framework: str | None = None) -> Report:
    """Runs a function on the cases and rules of a quantity.

    Args:
      function: takes the arrays and settings of the quantity by name; what it does not take is
        listed as not expressed. It returns the outputs of the quantity, or the first alone.
      quantity: one of `quantities()`, for example `"dapo_loss"`.
      framework: numpy, jax or torch; by default what the module of the function imports.
    """
    framework = framework or framework_of(function)
    published, takes = cases(quantity), accepted(function)
    missing = [_missing(case, takes) for case in published]
    asked = [
        _restricted(case, takes)
        for case, lacks in zip(published, missing, strict=True)
        if not lacks
    ]
    outputs = document(quantity)["outputs"]
    calls = [Call(case.inputs, case.settings, case.by) for case in asked]
    results = dict(
        zip((c.name for c in asked), run(function, outputs, calls, framework), strict=True)
    )
    tried = [_tried(case, takes) for case in published]
    if any(isinstance(x, Failure) and not x.expressed for x in results.values()):
        again = run(function, outputs, [Call(c.inputs, c.settings) for c in tried], framework)
        tried = [c for c, x in zip(tried, again, strict=True) if not isinstance(x, Failure)]
    bases = [*_bases(tried, takes)]
    trials = [
        (rule, n, trial)
        for n, case in enumerate(bases)
        for rule in RULES.values()
        if n == 0 or rule.name == "micro-batches"
        for trial in rule.trials(case, _names(takes))
    ]
    calls = [Call(case.inputs, case.settings, case.by) for case in bases]
    first = [len(calls)]
    for _, _, trial in trials:
        calls += [*trial.calls, *([trial.base] if trial.base else [])]
        first.append(len(calls))
    outcome = run(function, outputs, calls, framework)
    of_cases = tuple(
        Finding(case.name, "not expressed", reason=f"takes no {lacks}")
        if lacks
        else _of_case(case, results[case.name], published)
        for case, lacks in zip(published, missing, strict=True)
    )
    of_rules = [
        _of_trial(rule, trial, bases[n], outcome[n], outcome[start:end])
        for (rule, n, trial), start, end in zip(trials, first, first[1:], strict=False)
    ]
    return Report(quantity, of_cases, tuple(_worst(of_rules)))


def _names(takes: set[str] | None) -> tuple[str, ...]:
    return tuple(("num_tokens", "num_sequences") if takes is None else takes)


def _missing(case: Case, takes: set[str] | None) -> str:
    """The names that a case has and the function does not take."""
    if takes is None:
        return ""
    wanted = {*case.inputs, *case.named} - case.dropped - takes
    return ", ".join(sorted(wanted))


def _restricted(case: Case, takes: set[str] | None) -> Case:
    """The case with the settings that the function takes."""
    settings = {n: x for n, x in case.settings.items() if takes is None or n in takes}
    return replace(case, settings=settings)


def _tried(case: Case, takes: set[str] | None) -> Case:
    """The case for a rule, which compares a function with itself: without settings per token."""
    settings = {
        name: x
        for name, x in _restricted(case, takes).settings.items()
        if name in PER_TOKEN or not isinstance(x, np.ndarray)
    }
    return replace(case, settings=settings)


def _bases(published: list[Case], takes: set[str] | None) -> Iterator[Case]:
    """The cases on which rules are tried: the most uneven of the usual way to reduce a loss, and
    of the means of tokens and of sequences."""

    def fit(case: Case) -> tuple[Any, ...]:
        mask, shape = case.inputs.get("mask", np.ones(1)), shape_of(case)
        groups = len(np.unique(case.inputs.get("groups", 0)))
        uneven = len(np.unique(mask.sum(-1))), groups, shape, bool(mask.any())
        return *uneven, -len(case.named)

    def is_one(case: Case) -> bool:
        special = {"axis", "num_tokens", "num_sequences", "edges"} & case.settings.keys()
        counted = case.settings.get("empty_rows") == "count"
        passed = takes is None or case.inputs.keys() <= takes
        tokens = "mask" not in case.inputs or case.inputs["mask"].any()
        return bool(passed and tokens and shape_of(case) and not special and not counted)

    usable = [case for case in published if is_one(case)]
    reduced = [case for case in usable if case.settings.get("aggregation", "") is not None]
    modes = dict.fromkeys(str(case.settings.get("aggregation", "")) for case in reduced)
    usual = [
        str(c.settings.get("aggregation", "")) for c in reduced if "aggregation" not in c.named
    ]
    means = ("token-mean", "seq-mean-token-mean")
    for mode in dict.fromkeys((*usual, *(mode for mode in means if mode in modes))):
        of_mode = [c for c in reduced if str(c.settings.get("aggregation", "")) == mode]
        yield max(of_mode, key=fit)


def _of_case(case: Case, result: Results | Failure, published: list[Case]) -> Finding:
    if isinstance(result, Failure):
        return _failure(case.name, result, case)
    difference, worst = _distance(result, case.results, _outside(case))
    state = _state(difference)
    if state != "misses":
        return Finding(case.name, state, difference)
    convention = _convention(case, result, published, worst)
    if convention:
        return Finding(case.name, "convention", difference, convention)
    return Finding(case.name, "misses", difference, worst, _example(case, result, worst))


def _convention(case: Case, result: Results, published: list[Case], worst: str) -> str:
    """The convention by which the results are right; empty if there is none."""
    outside, right = _outside(case), case.results

    def fits(got: dict[str, Any], wanted: Mapping[str, np.ndarray]) -> bool:
        return _distance(got, wanted, outside)[0] <= ROUNDED

    for other in published:
        names = _differing(case, other)
        if names and fits(result, other.results):
            return ", ".join(f"{n}={other.settings.get(n, 'default')}" for n in sorted(names))
    if case.name in TIES and fits(result, {n: x for n, x in right.items() if "grad" not in n}):
        return f"another subgradient where {TIES[case.name]}"
    if outside is not None and outside.all():
        return f"{worst} is {result.get(worst)} without a true token"
    if outside is not None and outside.all(1).any() and "loss" in right:
        counted = {n: x * len(outside) / np.sum(~outside.all(1)) for n, x in result.items()}
        if fits(counted, right):
            return "empty_rows=count"
    if "groups" in case.inputs:
        groups = case.inputs["groups"]
        multiple = (groups[:, None] == groups).sum(1) > 1
        if fits(result, {n: np.where(multiple.T, x.T, np.nan).T for n, x in right.items()}):
            return "another advantage of a group of one response"
    return ""


def _differing(case: Case, other: Case) -> set[str]:
    """The conventions in which two cases differ; empty if anything else differs."""
    same = case.inputs.keys() == other.inputs.keys() and all(
        np.array_equal(x, other.inputs[name]) for name, x in case.inputs.items()
    )
    settings = {
        name
        for name in case.settings.keys() | other.settings.keys()
        if not np.array_equal(case.settings.get(name, "-"), other.settings.get(name, "-"))
    }
    return settings if same and settings <= CONVENTIONS.keys() else set()


def _of_trial(
    rule: Rule,
    trial: Trial,
    case: Case,
    result: Results | Failure,
    outcome: list[Results | Failure],
) -> Finding:
    *outcome, base = [*outcome, result] if trial.base is None else outcome
    if trial.missing:
        return Finding(rule.name, "not expressed", reason=trial.missing)
    if isinstance(base, Failure):
        return Finding(rule.name, "not expressed", reason=base.reason)
    base = hidden(case, base)
    failed = next((x for x in outcome if isinstance(x, Failure)), None)
    if failed:
        return _failure(rule.name, failed, trial.calls[0])
    done = [x for x in outcome if not isinstance(x, Failure)]
    total = sum(x["loss"] for x in done) if trial.summed else None
    difference, worst, where = 0.0, "", 0
    for n, (got, right) in enumerate(zip(done, trial.right(base), strict=True)):
        got = got if total is None else {**got, "loss": np.asarray(total)}
        here, name = _distance(got, right, None)
        if here > difference:
            difference, worst, where = here, name, n
    state = _state(difference, trial.tolerance)
    if state != "misses":
        return Finding(rule.name, state, difference)
    right = trial.right(base)[where].get(worst, np.asarray(np.nan))
    got = total if total is not None and worst == "loss" else done[where].get(worst)
    example = _of_call(trial.calls[where], worst, got, right)
    return Finding(rule.name, state, difference, worst, example)


def _worst(findings: list[Finding]) -> Iterator[Finding]:
    """One finding for each rule, of all its trials."""
    order = ("raises", "misses", "rounded", "holds", "not expressed")
    for name in dict.fromkeys(finding.name for finding in findings):
        of_rule = [finding for finding in findings if finding.name == name]
        yield min(of_rule, key=lambda f: (order.index(f.state), -f.difference))


def _state(difference: float, tolerance: float | None = None) -> State:
    if difference <= (tolerance or EXACT):
        return "holds"
    return "rounded" if difference <= ROUNDED else "misses"


def _outside(case: Case) -> np.ndarray | None:
    """Mask of results per token that are not compared: outside of the loss mask."""
    mask = case.inputs.get("mask")
    return None if mask is None else ~mask.astype(bool)


def _distance(
    got: Mapping[str, Any], right: Mapping[str, np.ndarray], outside: np.ndarray | None
) -> tuple[float, str]:
    """The largest difference, relative to the largest right value, and the result that has it."""
    largest, worst = 0.0, ""
    for name, wanted in right.items():
        if name not in got:
            continue
        x, wanted = got[name], np.asarray(wanted, float)
        if x.shape != wanted.shape:
            return np.inf, f"{name} has shape {x.shape}, not {wanted.shape}"
        counts = ~np.isnan(wanted)
        if outside is not None and outside.shape == wanted.shape and "gradient" not in name:
            counts &= ~outside
        if not counts.any():
            continue
        x, wanted = x[counts], wanted[counts]
        finite = np.isfinite(wanted)
        scale = max(np.max(np.abs(wanted[finite]), initial=0), SCALE)
        with np.errstate(invalid="ignore"):
            far = np.where(x == wanted, 0, np.abs(x - wanted)) / scale
        here = float(np.max(np.where(np.isnan(far), np.inf, far)))
        if here > largest:
            largest, worst = here, name
    return largest, worst


def _failure(name: str, failure: Failure, call: Case | Call) -> Finding:
    if not failure.expressed:
        return Finding(name, "not expressed", reason=failure.reason)
    example = _of_call(call, "", None, None)
    return Finding(name, "raises", np.inf, failure.reason, example)


def _example(case: Case, result: Results, worst: str) -> dict[str, Any]:
    return _of_call(case, worst, result.get(worst), case.results.get(worst))


def _of_call(call: Case | Call, name: str, got: Any, right: Any) -> dict[str, Any]:
    size = sum(x.size for x in call.inputs.values())
    inputs, settings = _plain(dict(call.inputs)), _plain(dict(call.settings))
    values = {"result": name, "got": _plain(got), "right": _plain(right)}
    return {"size": size, "inputs": inputs, "settings": settings, **values}


def _plain(x: Any) -> Any:
    """JSON values; NaN and infinities are words."""
    if isinstance(x, Mapping):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, np.ndarray | np.generic):
        return _plain(x.tolist())
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return x if np.isfinite(x) else str(x)
    return x
