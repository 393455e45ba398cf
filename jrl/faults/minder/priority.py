"""In which order the metrics are searched: a decision tree on how far the farthest machine is.

Each window of a record with a fault or without one is a row: for each metric the greatest Z-score
of any machine, and whether the fault was there. A metric that the tree asks for nearer to its root
tells more, and is searched earlier.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from jrl.faults.minder import vae
from jrl.faults.minder.embedding import gather
from jrl.faults.minder.prepare import prepare
from jrl.faults.simulate import Incident


@dataclass(frozen=True)
class Node:
    """A question of the tree, ``row[feature] <= threshold``, or a leaf (`feature` -1).

    Attributes:
      feature: column that is asked for, or -1.
      threshold: between two values of that column.
      fault: share of the rows here that are faults.
      rows: how many rows there are here.
      left: where the answer is yes; None in a leaf.
      right: where it is no.
    """

    feature: int
    threshold: float
    fault: float
    rows: int
    left: "Node | None" = None
    right: "Node | None" = None


def grow(
    features: Float[np.ndarray, "row feature"],
    fault: Bool[np.ndarray, " row"],
    *,
    depth: int = 6,
    least_rows: int = 20,
) -> Node:
    """A tree of Gini splits (CART): each question lowers the impurity ``2 p (1 - p)`` most.

    Args:
      features: one row per window.
      fault: whether the fault was there.
      depth: most questions on a path.
      least_rows: a leaf has at least this many.
    """
    share = float(fault.mean())
    best = None
    if depth > 0 and 0 < share < 1:
        best = _best_split(features, fault, least_rows)
    if best is None:
        return Node(-1, 0.0, share, len(fault))
    feature, threshold = best
    yes = features[:, feature] <= threshold
    left, right = (
        grow(features[side], fault[side], depth=depth - 1, least_rows=least_rows)
        for side in (yes, ~yes)
    )
    return Node(feature, threshold, share, len(fault), left, right)


def _best_split(features: np.ndarray, fault: np.ndarray, least: int) -> tuple[int, float] | None:
    rows = len(fault)
    best, found = 2 * fault.mean() * (1 - fault.mean()) - 1e-9, None
    for column in range(features.shape[1]):
        order = np.argsort(features[:, column], kind="stable")
        value, faults = features[order, column], np.cumsum(fault[order])
        left = np.arange(1, rows)
        p, q = faults[:-1] / left, (faults[-1] - faults[:-1]) / (rows - left)
        impurity = (left * 2 * p * (1 - p) + (rows - left) * 2 * q * (1 - q)) / rows
        allowed = (value[1:] > value[:-1]) & (left >= least) & (rows - left >= least)
        impurity = np.where(allowed, impurity, np.inf)
        at = int(impurity.argmin()) if rows > 1 else 0
        if rows > 1 and impurity[at] < best:
            best, found = float(impurity[at]), (column, float((value[at] + value[at + 1]) / 2))
    return found


def order_of(tree: Node, metrics: Sequence[str]) -> tuple[str, ...]:
    """Metrics by how far from the root they are first asked for; those never asked for come last.

    At the same depth the question that more rows reach comes first.
    """
    reached: dict[int, tuple[int, int]] = {}
    queue = deque([(tree, 0)])
    while queue:
        node, depth = queue.popleft()
        if node.left is not None and node.right is not None:
            here = (depth, -node.rows)
            reached[node.feature] = min(reached.get(node.feature, here), here)
            queue += [(node.left, depth + 1), (node.right, depth + 1)]
    never = [column for column in range(len(metrics)) if column not in reached]
    return tuple(metrics[column] for column in [*sorted(reached, key=reached.__getitem__), *never])


def greatest_z_scores(
    incident: Incident, stride: int = vae.WINDOW
) -> tuple[Float[np.ndarray, "window metric"], Bool[np.ndarray, " window"]]:
    """For each window and metric the greatest Z-score of any machine's mean, and the truth."""
    prepared = prepare(incident.fleet)
    starts = np.arange(0, prepared.values.shape[2] - vae.WINDOW + 1, stride)
    means = gather(prepared.values, starts).mean(-1)
    spread = np.maximum(means.std(-1, keepdims=True), 1e-6)
    score = (np.abs(means - means.mean(-1, keepdims=True)) / spread).max(-1)
    time = prepared.start + (starts + vae.WINDOW / 2) * prepared.period
    return score.T, (time >= incident.start) & (time < incident.end)


def learn_order(incidents: Sequence[Incident], **options: int) -> tuple[str, ...]:
    """The order that a tree on the windows of these incidents gives."""
    rows = [greatest_z_scores(incident) for incident in incidents]
    features, fault = (np.concatenate(part) for part in zip(*rows, strict=True))
    return order_of(grow(features, fault, **options), incidents[0].fleet.metrics)
