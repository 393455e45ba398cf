"""A crossing beside one device with everything off: how far apart the two are."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from campaign.drawing import Crossing
from campaign.observing import (
    Observed,
    Weights,
    batch_of,
    decoded,
    observe,
    weights_of,
)
from campaign.settings import one_device, setup_of
from jrl.recipes.base.batch import Batch
from jrl.trainer.learner.update import Network
from jrl.trainer.scoring import PromptLayout
from jrl.trainer.setup.setup import Setup

EXACT = 2e-5
"""Float32 sums of a few hundred terms in another order, relative to the largest element beside:
some units in the sixth digit after a few layers."""
KEYS_ARE_SHORT = 2e-4
"""Gated DeltaNet divides keys of five elements by their lengths, of which some are near 0. How much
that amplifies rounding depends on the weights: one device with its weights moved by a unit in their
last place (`one_rounding_away`) says how far gradients may be. In float64, of a case in which three
data-parallel ranks are 1.3e-4 (norm) from one device, the two are 4e-14 apart, and in float32 both
are as far from float64: 8e-5 and 5e-5."""
MOST_REFERENCES = 4
"""What is kept of one device, the last ones."""
CANCELLED = 1e-3
"""A distance from which on a gradient is wrong whatever cancels in it."""
ORDERS = 4.0
"""A gradient may be as many times as far from that of one device as this is from its own with the
rows in another order and another number of micro-batches: what cancels has no more digits. A norm
is no further from another than the gradients are."""
SEEN_IN_PART = 0.1
"""Where tokens are sent with 4 bits, the error of a leaf is measured by at least this part of the
whole gradient: a small leaf (a router of one expert a token) may be rounding alone."""
AT_THE_PIVOT = ("actor/redistributed.sum",)
"""Counts of tokens above or below one of them, which itself counts or does not by its rounding."""
LAST_DIGITS = 4 * 2.0**-24
"""Rounding error of a log-entropy in float32: two units of the entropy, in one pass and another."""
FOLLOW_THE_SIGNAL = tuple(f"policy {kind}" for kind in ("loss", "norm", "gradient", "metrics"))
LEAST = 1e-3
"""A leaf whose gradient is less than this part of the largest of all is a difference of terms that
cancel (the bias of keys, which moves all scores of a query alike): its error is theirs."""


@dataclass(frozen=True)
class Comparison:
    """Distances by the part of the run, each beside the most that is right."""

    distances: dict[str, float]
    limits: dict[str, float]
    where: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The parts that are further than is right; NaN is."""
        return [name for name, far in self.distances.items() if not far <= self.limits[name]]

    @property
    def only_gradients_are_wrong(self) -> bool:
        return bool(self.wrong) and all(
            is_of_gradient(part) and self.distances[part] < CANCELLED for part in self.wrong
        )


def is_of_gradient(part: str) -> bool:
    return part.endswith((" gradient", " norm"))


def compared(
    crossing: Crossing, setup: Setup, references: dict[str, Any] | None = None
) -> Comparison:
    """The two runs of a crossing, one after the other.

    Args:
      setup: of the crossing.
      references: what one device said of others, by what it depends on.
    """
    batch = batch_of(setup, setup.recipe.mini_batch_size)
    plain, references = one_device(crossing), {} if references is None else references
    order, number = micro_batches(setup)
    found, expected = observe(setup, batch), _reference(plain, batch, references, order, number)
    if crossing.get("decode") and setup.run.steps:
        found |= decoded(setup, batch)
        key = f"decoding {_of(plain)}"
        expected = expected | _kept(references, key, lambda: decoded(plain, batch))
    comparison = _comparison(setup, found, expected)
    # Experts that drop tokens do so in the order of rows.
    if not comparison.only_gradients_are_wrong or setup.model.capacity_factor is not None:
        return comparison
    # Sums in another order; in two parts, where no loss compares with a micro-batch's load.
    compares = setup.model.batch_balance_coef or setup.model.global_balance_coef
    again = number if compares else 2 * number
    change = weights_of if setup.model.delta is None else one_rounding_away
    reordered = _reference(plain, batch, references, order[::-1], again, change)
    alone = _comparison(setup, reordered, {part: expected[part] for part in reordered})
    limits = {
        part: max(limit, ORDERS * alone.distances[f"{part.split()[0]} gradient"])
        if is_of_gradient(part)
        else limit
        for part, limit in comparison.limits.items()
    }
    return replace(comparison, limits=limits)


def one_rounding_away(network: Network[Any], seed: int) -> Any:
    """Random weights, each moved by a unit in its last place, up or down."""
    draw = np.random.default_rng(seed)

    def moved(leaf: jax.Array) -> jax.Array:
        values = np.asarray(leaf)
        towards = np.where(draw.random(values.shape) < 0.5, -np.inf, np.inf)
        return jax.device_put(np.nextafter(values, towards.astype(values.dtype)), leaf.sharding)

    return jax.tree.map(moved, weights_of(network, seed))


def _reference(
    plain: Setup,
    batch: Batch[np.ndarray],
    references: dict[str, Any],
    order: np.ndarray,
    number: int,
    weights: Weights = weights_of,
) -> Observed:
    """What one device says of an update and of scores, rows where they are in the batch.

    Args:
      order: of the rows, as they are run.
      number: of micro-batches, which may have a say in it.
      weights: of each network.
    """

    # A prompt is run for each of its completions, and the micro-batches are one unless a loss
    # compares with their load.
    def alone(network: Network[Any]) -> Network[Any]:
        layout = PromptLayout(plain.prompt_length, 1)
        objective = replace(network.objective, layout=layout)
        return replace(network, objective=objective, num_micro_batches=number)

    def observed() -> Observed:
        ordered = jax.tree.map(lambda column: column[order], batch)
        return _in_order(observe(plain, ordered, alone, weights), np.argsort(order), len(order))

    key = f"{_of(plain)} {number} {order.tolist()} {weights.__name__}"
    return _kept(references, key, observed)


def _of(setup: Setup) -> str:
    """What a run on one device depends on."""
    return repr((setup.model, setup.recipe, setup.run))


def _kept(references: dict[str, Any], key: str, make: Callable[[], Observed]) -> Observed:
    """What was made of a key, now or before."""
    if key not in references:
        if len(references) == MOST_REFERENCES:
            references.pop(next(iter(references)))
        references[key] = make()
    return references[key]


def _in_order(found: Observed, order: np.ndarray, rows: int) -> Observed:
    """With the rows of scores where they were."""
    for part in ("scores", "values"):
        for name, column in found.get(part, {}).items():
            assert column.shape[0] == rows, name
            found[part][name] = column[order]
    return found


def micro_batches(setup: Setup) -> tuple[np.ndarray, int]:
    """The order of rows and the number of micro-batches in which one device has, in each, the
    tokens whose load the losses of a mesh compare with, or of which experts drop some."""
    rows, dp, model = setup.recipe.mini_batch_size, setup.mesh.layout.dp, setup.model
    number = setup.imitator.num_micro_batches
    if setup.run.steps:
        number = setup.networks.policy.num_micro_batches
    natural = np.arange(rows)
    if model.batch_balance_coef or model.capacity_factor is not None:
        return natural, number * dp
    if model.global_balance_coef:
        return natural.reshape(dp, number, -1).swapaxes(0, 1).reshape(-1), number
    return natural, 1


def _comparison(setup: Setup, found: Observed, expected: Observed) -> Comparison:
    exact = EXACT if setup.model.delta is None else KEYS_ARE_SHORT
    rounds = _roundings(setup)
    signal = _signal_rounding(expected.get("statistics"))
    distances, limits, where = dict[str, float](), dict[str, float](), dict[str, str]()
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for part, own in found.items():
        if part == "statistics":
            continue
        other = expected[part]
        assert own.keys() == other.keys(), (part, own.keys() ^ other.keys())
        kind = part.split()[-1]
        if kind == "weights":
            gradient = expected[part.replace("weights", "gradient")]
            far = _moved(own, other, gradient, setup, rounds)
        elif kind == "decoding":
            far = _decoded(own, other, rounds)
        else:
            far = _apart(own, other, kind, rounds)
        name = max(far, key=lambda name: (np.isnan(far[name]), far[name]))
        distances[part], where[part] = float(far[name]), name
        limits[part] = max(exact, rounds.get(kind, 0.0))
        if part in FOLLOW_THE_SIGNAL:
            limits[part] = max(limits[part], signal)
    return Comparison(distances, limits, where)


def _signal_rounding(statistics: dict[str, np.ndarray] | None) -> float:
    """Rounding error of HAPO's signal, which divides log-entropies by their distance to the pivot:
    that of nearly equal entropies has few digits."""
    if statistics is None:
        return 0.0
    extremes = (abs(float(statistics[name])) for name in ("h_max", "h_min"))
    ranges = [extreme * float(statistics["scale"]) for extreme in extremes if extreme]
    return LAST_DIGITS / min(ranges, default=1.0)


def _roundings(setup: Setup) -> dict[str, float]:
    """What is right of parts that settings round to fewer digits than one device has."""
    config, optimizer, rounds = setup.model, setup.networks.policy.optimizer, dict[str, float]()
    if optimizer.gradient_wire == "bfloat16":
        # Each device's sum is rounded once, to 2^-9 of itself, and some nearly cancel. The size of
        # all together hardly moves.
        rounds |= {"gradient": 2.0**-5, "norm": 2.0**-7}
    wire = config.execution.activation_wire is not None
    if wire or config.dtype == "bfloat16":
        # Some fifty roundings one after the other, to 2^-9 or on the wire to 2^-4: whether this is
        # the same pass shows, and no digit more.
        far = 0.6 if wire else 0.3
        rounds |= {"gradient": far, "norm": far, "loss": far / 2, "scores": 0.5, "values": 0.5}
        rounds |= {"metrics": np.inf, "weights": np.inf, "decoding": 0.6}
    return rounds


def _apart(
    own: dict[str, np.ndarray], other: dict[str, np.ndarray], kind: str, rounds: dict[str, float]
) -> dict[str, float]:
    """How far each array is from its twin, in parts of what it is measured by."""
    largest = max(float(np.max(np.abs(x), initial=0)) for x in other.values())
    everything = float(np.sqrt(sum(np.sum(np.square(x, dtype=float)) for x in other.values())))
    far = dict[str, float]()
    for name, expected in other.items():
        if own[name].shape != expected.shape:
            far[name] = np.inf
            continue
        a, b = own[name].astype(np.float64), expected.astype(np.float64)
        size = float(np.max(np.abs(b), initial=0))
        if kind == "gradient" and rounds.get("gradient", 0) > 0.1:
            # Of roundings without a bound for each element, that of all together says more.
            least = SEEN_IN_PART * everything
            far[name] = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), least, 1e-30))
            continue
        scale = {"gradient": max(size, LEAST * largest, 1e-30), "loss": max(size, 0.1)}
        if name in ("load", "choices"):
            # Counts, and numbers of experts.
            scale = {}
        # Of a token that top-k or top-p cut away both have the log-probability -inf.
        with np.errstate(invalid="ignore"):
            difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        if name in AT_THE_PIVOT:
            difference = np.maximum(difference - 1, 0)
        if name == "choices" and rounds.get("scores"):
            far[name] = float(np.mean(difference != 0))
            continue
        far[name] = float(np.max(difference, initial=0) / scale.get(kind, max(size, 1.0)))
        if name in ("load", "choices") and far[name] and not rounds:
            far[name] = max(far[name], 1.0)
    return far


def _moved(
    own: dict[str, np.ndarray],
    other: dict[str, np.ndarray],
    gradient: dict[str, np.ndarray],
    setup: Setup,
    rounds: dict[str, float],
) -> dict[str, float]:
    """How far weights are apart after a step, in parts of a tenth of the learning rate.

    Adam's first step is as large whatever the gradient is: where that is rounding alone, so is the
    step, and elements whose gradient is not well above it are left out.
    """
    rate = float(setup.networks.policy.optimizer.rate_at(0))
    largest = max(float(np.max(np.abs(x), initial=0)) for x in gradient.values())
    exact = EXACT if setup.model.delta is None else KEYS_ARE_SHORT
    error = 10 * max(exact, rounds.get("gradient", 0.0))
    far = dict[str, float]()
    for name, expected in other.items():
        counts = np.ones(expected.shape, bool)
        if name in gradient:
            size = np.abs(gradient[name])
            least = max(float(np.max(size, initial=0)), LEAST * largest)
            # Above Adam's epsilon of 1e-8 too, beside which a small gradient counts for less.
            counts = (size > max(error * least, 1e-5)) | ~np.any(size)
        difference = np.where(counts, np.abs(own[name] - expected), 0.0)
        far[name] = float(np.max(difference, initial=0)) / rate * 0.1
    return far


def _decoded(
    own: dict[str, np.ndarray], other: dict[str, np.ndarray], rounds: dict[str, float]
) -> dict[str, float]:
    """How far log-probabilities are apart; 1 or more where another token was drawn."""
    if rounds.get("decoding"):
        # One token drawn differently, and all after it are.
        first = own["tokens"][:, 0] != other["tokens"][:, 0]
        return {"first tokens": float(np.mean(first))}
    far = dict[str, float]()
    for name, expected in other.items():
        if own[name].shape != expected.shape:
            far[name] = np.inf
            continue
        far[name] = float(np.max(np.abs(own[name].astype(np.float64) - expected), initial=0))
    return far


@dataclass(frozen=True)
class Outcome:
    """What became of a crossing.

    Attributes:
      kind: "right", "refused", "wrong", "raised", or of a process that ended "aborted" and "hung".
      reason: of a refusal its line; of a failure what is wrong.
    """

    kind: str
    reason: str = ""
    distances: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "refused")


def outcome_of(crossing: Crossing, references: dict[str, Any] | None = None) -> Outcome:
    """Runs a crossing in this process."""
    compiled = []
    with _compilations(compiled):
        try:
            setup = setup_of(crossing)
        except ValueError as error:
            if compiled or "\n" in str(error):
                return Outcome("raised", f"rejected too late or in more than one line: {error}")
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("raised", _place_of(error))
    try:
        found = compared(crossing, setup, references)
    except Exception as error:
        return Outcome("raised", _place_of(error))
    if not found.wrong:
        return Outcome("right", distances=found.distances)
    parts = [f"{p} by {found.distances[p]:.2g} in {found.where[p]}" for p in found.wrong]
    return Outcome("wrong", "; ".join(parts), found.distances)


@contextlib.contextmanager
def _compilations(into: list[str]) -> Iterator[None]:
    """Adds the events of each compilation."""

    def listen(event: str, *_: Any, **__: Any) -> None:
        if "backend_compile" in event:
            into.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def _place_of(error: Exception) -> str:
    """An exception in a line, with the last place of the library that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    rooms = [f for f in frames if re.search(r"/(jrl|moe|sharding|tests|campaign)/", f.filename)]
    last = (rooms or frames)[-1]
    where = "/".join(Path(last.filename).parts[-3:])
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__} at {where}:{last.lineno}: {lines[0][:300]}"
