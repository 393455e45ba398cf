"""Minder detector: the outlier machine, the metric, and the start of the deviation.

Every metric is denoised window by window. In each window the machine farthest from all others is a
candidate if it is far enough. A machine that remains the candidate for minutes raises the alarm.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.faults.collect.fleet import NO_MACHINE, Alarm, Fleet, Report, Trace
from jrl.faults.collect.vocabulary import PRIORITY, meaning, search_order
from jrl.faults.minder import vae
from jrl.faults.minder.embedding import (
    BLOCK,
    Method,
    Points,
    Prepared,
    View,
    denoise,
    distance_sums,
    gather,
    normal_score,
    prepare,
)

MAX_EMBEDDED = 2**14
"""Machines times windows that are embedded in one compiled call; bounds its memory."""
COMPUTE_LOCK = threading.Lock()
"""Computations started from more threads than the CPU backend has can deadlock."""
MAX_WINDOWS = 64
"""Windows that are embedded in one compiled call, however few the machines are."""
UNSEEN = -2
"""Marks a window that has not been scored yet."""


@dataclass(frozen=True)
class Span:
    """The windows, first to last, in which a machine is the outlier."""

    machine: int
    first: int
    last: int
    hits: int


def find_span(
    named: Int[np.ndarray, " window"], *, length: int, share: float | int = 1.0
) -> Span | None:
    """The stretch with the most hits in which one machine is the outlier for long enough.

    Every `length` windows of the stretch in a row name the machine in at least ``share length`` of
    them. The stretch is trimmed to the first and last window that name it.

    Args:
      named: the machine that each window names, or `NO_MACHINE`.
      length: windows in a row, at least 1.
      share: of them that must name the machine, in (0, 1].
    """
    best = None
    for machine in np.unique(named[named >= 0]):
        for first, last in _stretches(_has_enough_hits(named == machine, length, share), length):
            hits = np.flatnonzero(named[first : last + 1] == machine)
            span = Span(int(machine), int(first + hits[0]), int(first + hits[-1]), len(hits))
            if best is None or span.hits > best.hits:
                best = span
    return best


def _has_enough_hits(
    hit: Bool[np.ndarray, " window"], length: int, share: float | int
) -> np.ndarray:
    """Mask of the windows from which on `length` windows hold enough hits."""
    if hit.size < length:
        return np.zeros(0, bool)
    total = np.r_[0, np.cumsum(hit)]
    return total[length:] - total[:-length] >= max(1, math.ceil(share * length - 1e-9))


def _stretches(enough: np.ndarray, length: int) -> list[tuple[int, int]]:
    """First and last window of each run of windows from which on there are enough hits."""
    edge = np.flatnonzero(np.diff(np.r_[False, enough, False].astype(np.int8)))
    return [(first, last + length - 2) for first, last in edge.reshape(-1, 2).tolist()]


def score_where_needed(
    score_windows: Callable[[Int[np.ndarray, " subset"]], Int[np.ndarray, " subset"]],
    num_windows: int,
    *,
    length: int,
    share: float | int,
) -> Int[np.ndarray, " window"]:
    """Machine that each window names, scoring only windows that can affect `find_span`.

    Every eighth window is scored first. If these already name other machines too often, no stretch
    of `length` windows can hold enough hits, whatever the windows between them name. The windows of
    the other stretches are scored with decreasing stride. `find_span` returns the same as if all
    windows were scored.

    Returns:
      One name per window; `UNSEEN` for those that cannot matter.
    """
    named = np.full(num_windows, UNSEEN)
    matters = np.full(num_windows, num_windows >= length)
    for stride in (8, 4, 2, 1):
        due = np.flatnonzero(matters & (named == UNSEEN))
        due = due[due % stride == 0]
        if due.size:
            named[due] = score_windows(due)
        matters = _can_matter(named, length, share)
    return named


def _can_matter(named: np.ndarray, length: int, share: float | int) -> np.ndarray:
    """Windows inside a stretch that may hold enough hits of one machine, the unseen all hits."""
    matters = np.zeros(named.size, bool)
    # Windows not scored yet may all name a machine that no window names so far.
    for machine in (*np.unique(named[named >= 0]), UNSEEN):
        possible = _has_enough_hits((named == machine) | (named == UNSEEN), length, share)
        for first, last in _stretches(possible, length):
            matters[first : last + 1] = True
    return matters


Search = tuple[Int[np.ndarray, " window"], Float[np.ndarray, " window"], Span | None]
"""The row that each window of a view names, `NO_MACHINE` or `UNSEEN`; the greatest score of each,
NaN where unseen; and the stretch that raises an alarm."""


def per_metric(
    metrics: tuple[str, ...], models: Mapping[str, vae.Weights] | None = None
) -> list[View]:
    """Minder's method with `models`, by default the package's; `vae.ANY` serves metrics that have
    none."""
    models = vae.shipped_models() if models is None else models
    return [
        View(name, (channel,), partial(denoise, models.get(meaning(name), models[vae.ANY])))
        for channel, name in enumerate(metrics)
    ]


@dataclass(frozen=True)
class Minder:
    """The detector: called with a fleet it returns alarms; `examine` returns the scores as well.

    Attributes:
      threshold: score from which a machine is a candidate, above 1. The paper's is not known; this
        one was chosen on simulated fleets by ``python -m benchmarks.faults benchmark --calibrate``.
      continuity: seconds for which the same machine must be the candidate; the paper's 4 minutes.
      share: fraction of the windows in that time that must name it. The paper's 1 lets one noisy
        window in 233 hide a fault.
      floor: distance, in ranges of a metric, below which machines count as equal. Without it the
        farthest of four machines that agree to a thousandth would be an outlier.
      priority: metrics in the order in which they are searched, by any name of
        `jrl.faults.collect.vocabulary`; others follow in the fleet's order, but for memory in use
        (`LEVELS` there) and fatal error counters (`FATAL`).
      roles: one label per machine of the fleet; machines are compared within their role only.
        Under expert parallelism the load of experts differs: take (pipeline stage, expert rank).
      tokens: ``[machine, time]`` tokens that a machine received; metrics in `per_token` are divided
        by them, as another way to compare ranks of unequal load.
      per_token: the metrics that grow with the tokens a machine receives.
      method: embedding that distances are measured in; see `benchmarks.faults.baselines`.
    """

    threshold: float | int = 3.08
    continuity: float | int = 240
    share: float | int = 0.85
    floor: float | int = 0.02
    priority: Sequence[str] = PRIORITY
    roles: Sequence[str] | None = None
    tokens: np.ndarray | None = None
    per_token: Sequence[str] = ()
    method: Method = per_metric

    def __call__(self, fleet: Fleet) -> list[Alarm]:
        """The alarms of a fleet: none, or the outlier machine."""
        return self.examine(fleet).alarms

    def examine(self, fleet: Fleet) -> Report:
        """Searches the metrics in order until one raises an alarm."""
        return self.judge(self.prepare_fleet(fleet))

    def judge(self, record: "ScoredFleet") -> Report:
        """`examine` for a prepared fleet, which other detectors may have scored already."""
        prepared, alarms, traces = record.prepared, [], {}
        if record.reasons:
            return Report([], (*prepared.notes, *record.reasons), comparable=False)
        for view in self.method(prepared.metrics):
            named, scores, span = self._search(record.scorer(view, self), prepared)
            times = prepared.start + np.arange(scores.size) * prepared.period
            leader = np.maximum(named, NO_MACHINE)
            traces[view.name] = Trace(times, scores, leader, float(self.threshold))
            if span is not None:
                alarms.append(self._alarm(prepared, view.name, span, scores))
                break
        return Report(alarms, prepared.notes, machines=prepared.machines, traces=traces)

    def _search(self, scorer: "WindowScorer", prepared: Prepared) -> Search:
        length = self._continuity_windows(prepared)
        named = score_where_needed(
            partial(scorer.name_machines, threshold=self.threshold),
            scorer.scores.size,
            length=length,
            share=self.share,
        )
        scores = np.where(named == UNSEEN, np.nan, scorer.scores)
        return named, scores, find_span(named, length=length, share=self.share)

    def _continuity_windows(self, prepared: Prepared) -> int:
        return max(1, round(self.continuity / prepared.period) - vae.WINDOW + 1)

    def prepare_fleet(self, fleet: Fleet) -> "ScoredFleet":
        """The prepared fleet with role numbers, and reasons for which it cannot be compared."""
        if self.tokens is not None:
            fleet = divide_by_tokens(fleet, self.tokens, self.per_token)
        prepared = prepare(fleet.select(search_order(self.priority, fleet.metrics)))
        roles = role_numbers(fleet, self.roles)[prepared.rows]
        sizes = np.bincount(roles) if roles.size else np.zeros(1, int)
        reasons = []
        if not prepared.metrics:
            reasons.append("no metric can be compared: no verdict.")
        if sizes.max() < 3:
            reasons.append(
                f"{len(prepared.machines)} machines, at most {sizes.max()} of one role: two "
                "cannot tell which one is off. Compare at least 3."
            )
        seconds = prepared.values.shape[2] * fleet.period
        if seconds < self.continuity:
            reasons.append(
                f"the record holds {seconds:.0f} s, less than the {self.continuity:.0f} s for "
                "which a machine must stand out: no verdict."
            )
        return ScoredFleet(prepared, roles, tuple(reasons))

    def _alarm(self, prepared: Prepared, metric: str, span: Span, scores: np.ndarray) -> Alarm:
        within = scores[span.first : span.last + 1]
        evidence = {
            "score": float(np.nanmedian(within)),
            "threshold": float(self.threshold),
            "windows": span.hits,
            "machines": len(prepared.machines),
            "scores": scores,
        }
        # A window is an outlier as soon as its last samples are.
        start = prepared.start + (span.first + vae.WINDOW - 1) * prepared.period
        end = prepared.start + (span.last + vae.WINDOW) * prepared.period
        return Alarm(prepared.machines[span.machine], metric, start, end, evidence)


def role_numbers(fleet: Fleet, roles: Sequence[str] | None) -> Int[np.ndarray, " machine"]:
    """Numbers of the roles, one per machine; all machines have the same by default.

    Raises:
      ValueError: unless there is one role per machine.
    """
    if roles is None:
        return np.zeros(len(fleet.machines), int)
    if len(roles) != len(fleet.machines):
        raise ValueError(
            f"roles has {len(roles)} labels for {len(fleet.machines)} machines: give one each."
        )
    return np.unique(np.array(roles, np.str_), return_inverse=True)[1]


def divide_by_tokens(fleet: Fleet, tokens: np.ndarray, metrics: Sequence[str]) -> Fleet:
    """The fleet with `metrics` per token received, times the fleet's mean number of tokens.

    Args:
      tokens: ``[machine, time]`` received in each sample; 0 tokens give a missing sample.

    Raises:
      ValueError: for tokens of another shape, or a metric that was not recorded.
    """
    expected = (len(fleet.machines), fleet.num_samples)
    if tokens.shape != expected:
        raise ValueError(f"tokens has shape {tokens.shape}, which must be {expected}.")
    unknown = [name for name in metrics if name not in fleet.metrics]
    if unknown:
        raise ValueError(f"per_token names {unknown[0]!r}, which was not recorded.")
    positive = np.where(tokens > 0, tokens, np.nan).astype(np.float32)
    relative = positive / np.nanmean(positive)
    values = fleet.values.copy()
    for name in metrics:
        values[:, fleet.metrics.index(name)] /= relative
    return replace(fleet, values=values)


@dataclass(frozen=True)
class ScoredFleet:
    """A prepared fleet with cached scores, shared by multiple detectors.

    Attributes:
      prepared: the compared fleet.
      roles: number of the role of each machine in it.
      reasons: those for which it cannot be compared, one line each.
      scorers: by method, view and floor: scores do not depend on anything else.
    """

    prepared: Prepared
    roles: Int[np.ndarray, " machine"]
    reasons: tuple[str, ...] = ()
    scorers: dict[tuple, "WindowScorer"] = field(default_factory=dict)

    def scorer(self, view: View, minder: Minder) -> "WindowScorer":
        """The cached scorer of a view."""
        key = (minder.method, view.name, minder.floor)
        if key not in self.scorers:
            self.scorers[key] = WindowScorer(self.prepared, self.roles, view, minder.floor)
        return self.scorers[key]


class WindowScorer:
    """Computes and caches the farthest machine of each window of one view, and its score."""

    def __init__(self, prepared: Prepared, roles: np.ndarray, view: View, floor: float | int = 0.0):
        values = prepared.values[list(view.channels)]
        # Wider windows begin earlier: the first sample is repeated for times before the record.
        early = view.width - vae.WINDOW
        values = np.pad(values, ((0, 0), (0, 0), (early, 0)), mode="edge")
        num_windows = values.shape[2] - view.width + 1
        self.floor, self.view = floor, view
        self.members = [
            rows for role in np.unique(roles) if (rows := np.flatnonzero(roles == role)).size > 2
        ]
        self.values = [
            values[:, rows] if rows.size < values.shape[1] else values for rows in self.members
        ]
        if view.summary is not None:
            self.view = replace(view, width=1)
            self.values = [view.summary(of_role, view.width) for of_role in self.values]
        self.machine = np.full(num_windows, UNSEEN)
        self.scores = np.full(num_windows, -np.inf, np.float32)

    def score(self, starts: Int[np.ndarray, " subset"]) -> None:
        """Fills in `machine` and `scores` of the windows at `starts`: the farthest of any role."""
        starts = starts[self.machine[starts] == UNSEEN]
        for rows, values in zip(self.members, self.values, strict=True):
            for chunk in _chunks(starts, rows.size):
                machine, score = farthest(values, chunk, self.view, self.floor)
                better = score > self.scores[chunk]
                self.machine[chunk] = np.where(better, rows[machine], self.machine[chunk])
                self.scores[chunk] = np.where(better, score, self.scores[chunk])

    def name_machines(
        self, starts: Int[np.ndarray, " subset"], threshold: float | int
    ) -> Int[np.ndarray, " subset"]:
        """The machines that the windows at `starts` name."""
        self.score(starts)
        return np.where(self.scores[starts] > threshold, self.machine[starts], NO_MACHINE)


def _padded_size(num_machines: int) -> int:
    """Padded number of machines: 16, 32, 48, 64, 96, 128, 192, ..., to compile few variants."""
    size = BLOCK
    while size < num_machines:
        is_power = size & (size - 1) == 0
        size = size * 3 // 2 if is_power and size > BLOCK else 1 << size.bit_length()
    return size


def _chunks(starts: np.ndarray, num_machines: int) -> list[np.ndarray]:
    """Splits the starts into chunks that respect `MAX_EMBEDDED`."""
    size = max(1, min(MAX_WINDOWS, MAX_EMBEDDED // _padded_size(num_machines)))
    return [starts[i : i + size] for i in range(0, len(starts), size)]


def farthest(
    values: Float[np.ndarray, "channel machine time"],
    starts: Int[np.ndarray, " window"],
    view: View,
    floor: float | int = 0.0,
) -> tuple[Int[np.ndarray, " window"], Float[np.ndarray, " window"]]:
    """The machine with the greatest score in each window, and that score.

    Args:
      values: scaled, without gaps; at least 3 machines.
      starts: first sample of each window.
      floor: see `Minder`.
    """
    num_machines = values.shape[1]
    size = _padded_size(num_machines)
    # The last chunk is padded with its first window, so that all chunks share one compilation.
    full = max(len(starts), len(_chunks(np.arange(MAX_WINDOWS), num_machines)[0]))
    windows = gather(values, np.r_[starts, np.repeat(starts[:1], full - len(starts))], view.width)
    windows = np.pad(windows, ((0, 0), (0, 0), (0, size - num_machines), (0, 0)))
    machine_mask = jnp.asarray(np.arange(size) < num_machines)
    with COMPUTE_LOCK:
        points = view.embed(jnp.asarray(windows))
        machine, score = _farthest(points, machine_mask, float(floor) * vae.WINDOW**0.5)
        return np.asarray(machine)[: len(starts)], np.asarray(score)[: len(starts)]


@jax.jit
def _farthest(
    points: Points, machine_mask: Bool[jax.Array, " machine"], floor: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    scores = normal_score(distance_sums(points, machine_mask), machine_mask, floor=floor)
    return scores.argmax(-1), scores.max(-1)
