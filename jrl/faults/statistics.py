"""NaN-aware medians and runs of equal labels, for the robust detectors."""

import numpy as np

MAD_TO_STD = 1.4826
"""Standard deviations in a median absolute deviation, for a normal distribution."""


def nan_median(values: np.ndarray, axis: int) -> np.ndarray:
    """The median of the numbers along an axis, NaN where there is none; no warning for that."""
    ordered = np.sort(values, axis=axis)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=axis, keepdims=True)
    last = ordered.shape[axis] - 1
    below, above = (np.clip(index, 0, last) for index in ((count - 1) // 2, count // 2))
    low, high = (np.take_along_axis(ordered, index, axis) for index in (below, above))
    return np.where(count > 0, (low + high) / 2, np.nan).squeeze(axis)


def stretches(labels: np.ndarray) -> list[tuple[int, int]]:
    """Start and end index (exclusive) of each run of equal entries."""
    edges = np.flatnonzero(np.diff(labels)) + 1
    return list(zip([0, *edges.tolist()], [*edges.tolist(), len(labels)], strict=True))
