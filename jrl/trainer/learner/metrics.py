"""Metrics of an update: values that merge over micro-batches, devices and updates.

The kind of a metric is in its value, never in its name. `jrl.losses.Mean` and
`jrl.losses.ExplainedVariance` are metrics too, and so is any record with these methods::

    merge(other)   the metric of both, for example of two mini-batches; on the host
    reduce(axes)   of a stack over micro-batches, over them and the devices of `axes`; compiled
    value()        a number, or a mapping of names to numbers
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array

from sharding.collectives import Axes, all_sum, vary

Leaf = TypeVar("Leaf")


class Metric(Protocol):
    """Metric that merges. If it has no method ``reduce(axes)``, its leaves are sums."""

    def merge(self, other: Any) -> "Metric": ...

    def value(self) -> Any: ...


@struct.dataclass
class Max(Generic[Leaf]):
    """Maximum over micro-batches and updates."""

    maximum: Leaf

    def merge(self, other: "Max[Any]") -> "Max[Any]":
        return Max(np.maximum(np.asarray(self.maximum), other.maximum))

    def reduce(self, axes: Axes) -> "Max[Array]":
        return Max(jax.lax.pmax(jnp.max(vary(jnp.asarray(self.maximum), axes)), axes))

    def value(self) -> Any:
        return self.maximum


@struct.dataclass
class PerUpdate(Generic[Leaf]):
    """Mean over updates of a number of each, for example of its loss. Over micro-batches and
    devices, whose shares these are, it is a sum."""

    shares: Leaf

    def merge(self, other: "PerUpdate[Any]") -> "PerUpdate[Any]":
        both = [np.atleast_1d(np.asarray(each.shares)) for each in (self, other)]
        return PerUpdate(np.concatenate(both))

    def value(self) -> float:
        return float(np.mean(np.asarray(self.shares)))


@struct.dataclass
class FirstUpdate(Generic[Leaf]):
    """Metric of the first update of a step alone, whose policy is still the one that sampled."""

    metric: Leaf

    def merge(self, other: "FirstUpdate[Any]") -> "FirstUpdate[Leaf]":
        return self

    def reduce(self, axes: Axes) -> "FirstUpdate[Any]":
        return FirstUpdate(reduce_metric(self.metric, axes))

    def value(self) -> Any:
        return self.metric.value()  # pyright: ignore[reportAttributeAccessIssue]


@struct.dataclass
class ExpertLoad(Generic[Leaf]):
    """Tokens per expert, ``[layer, route]``, and their imbalance: 1 is even."""

    counts: Leaf

    def merge(self, other: "ExpertLoad[Any]") -> "ExpertLoad[Any]":
        return ExpertLoad(self.counts + other.counts)

    def value(self) -> dict[str, float]:
        counts = np.asarray(self.counts)
        share = counts / np.maximum(counts.mean(axis=1, keepdims=True), 1.0)
        return {
            "moe/max_load": float(share.max(axis=1).mean()),
            "moe/min_load": float(share.min(axis=1).mean()),
        }


@struct.dataclass
class Outcome(Generic[Leaf]):
    """Outcome of an update: loss, gradient norm, whether it was applied, and its metrics.

    Attributes:
      loss, grad_norm: of the mini-batch.
      finite: ``[]`` false if the loss or the norm was not.
      empty: ``[]`` true if no token was in the loss mask.
      overflow: ``[]`` routed rows beyond the expert buffers; None if there is no `buffer_factor`.
      load: tokens per expert; None without experts.
      metrics: of the objective, by full name.
    """

    loss: Leaf
    grad_norm: Leaf
    finite: Leaf
    empty: Leaf
    overflow: Leaf | None = None
    load: ExpertLoad[Leaf] | None = None
    metrics: dict[str, Any] = struct.field(default_factory=dict)


def as_metric(value: Any) -> Any:
    """The metric itself; of a bare number, its mean over updates."""
    return value if hasattr(value, "value") else PerUpdate(value)


def reduce_metric(metric: Any, axes: Axes) -> Any:
    """Metric over all micro-batches and the devices of `axes`, of a stack over micro-batches."""
    if hasattr(metric, "reduce"):
        return metric.reduce(axes)
    return jax.tree.map(lambda x: all_sum(jnp.sum(x, axis=0), axes), metric)


def merge_metrics(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Values of metrics of several updates, by name."""
    values: dict[str, float] = {}
    for name in updates[0] if updates else ():
        value = reduce(lambda a, b: a.merge(b), [metrics[name] for metrics in updates]).value()
        values |= value if isinstance(value, Mapping) else {name: float(value)}
    return values
