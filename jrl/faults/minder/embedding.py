"""Embeddings of windows, distances of the machines in them, and outlier scores.

A view takes a subset of the metrics and embeds their windows ``[channel, window, machine, sample]``
as points ``[window, dim, machine]``. Minder has one view per metric; its ablations have one view of
all, or leave the denoising out (`benchmarks.faults.baselines`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jrl.faults.minder import vae

BLOCK = 16
"""Machines that all others are compared with in one step of the loop."""
MANY_DIMS = 16
"""Beyond these, Euclidean distances come from products of matrices."""

Channels = Float[np.ndarray, "channel machine time"]
Windows = Float[Array, "channel window machine time"]
Points = Float[Array, "window dim machine"]
Embedding = Callable[[Windows], Points]


@dataclass(frozen=True)
class View:
    """Metrics that are compared together, and their embedding.

    Attributes:
      name: its name in an alarm: a metric, or a name for multiple.
      channels: indices of its metrics in the prepared fleet.
      embed: from their windows to points.
      width: samples of a window. It ends where the detector's window of 8 ends; more samples reach
        further back.
      summary: from the channels of a whole record and the width to a summary of each window,
        ``[dim, machine, window]``, which then goes through `embed` as windows of one sample; None
        embeds the windows themselves.
    """

    name: str
    channels: tuple[int, ...]
    embed: Embedding
    width: int = vae.WINDOW
    summary: Callable[[np.ndarray, int], np.ndarray] | None = None


Method = Callable[[tuple[str, ...]], list[View]]
"""From the metrics of a prepared fleet to its views, in the order in which they are searched."""


def gather(
    values: Float[np.ndarray, "metric machine time"], starts: np.ndarray, width: int = vae.WINDOW
) -> np.ndarray:
    """Windows of `width` samples that begin at `starts`: ``[metric, window, machine, time]``."""
    view = np.lib.stride_tricks.sliding_window_view(values, width, axis=2)
    return np.ascontiguousarray(np.moveaxis(view[:, :, starts], 2, 1))


@jax.jit
def denoise(weights: vae.Weights, windows: Windows) -> Points:
    """Windows as a model reconstructs them; a model of all channels joins them (ablation INT)."""
    channels, count, machines, width = windows.shape
    flat = windows.reshape(channels, count * machines, width)
    rebuilt = vae.reconstruct(weights, jnp.transpose(flat, (2, 0, 1)))
    points = rebuilt.reshape(width * channels, count, machines)
    return jnp.swapaxes(points, 0, 1)


@jax.jit
def distance_sums(
    points: Points, machine_mask: Bool[Array, " machine"]
) -> Float[Array, "window machine"]:
    """Sum of the distances from each machine to all in the mask: ``d_i = sum_j |e_i - e_j|``.

    The matrix of distances is never materialized: `BLOCK` of its columns are computed and added at
    a time, so memory is that of the points. Cost: ``window machine^2 dim`` operations. Points of
    more than `MANY_DIMS` go through `sums_by_products`.

    Args:
      machine_mask: true on machines; the rest is padding. The number of machines is a multiple of
        `BLOCK`.

    References:
      Deng et al., "Minder", NSDI 2025, section 4.4. https://arxiv.org/abs/2411.01791
    """
    num_windows, num_dims, num_machines = points.shape
    if num_dims > MANY_DIMS:
        return sums_by_products(points, machine_mask)
    others = points.reshape(num_windows, num_dims, num_machines // BLOCK, BLOCK)
    weights = machine_mask.reshape(-1, BLOCK).astype(points.dtype)

    def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        columns, weight = block
        for j in range(BLOCK):
            differences = [points[:, k] - columns[:, k, j][:, None] for k in range(num_dims)]
            squares = [difference * difference for difference in differences]
            total = total + weight[j] * jnp.sqrt(sum(squares[1:], squares[0]))
        return total, None

    blocks = (jnp.moveaxis(others, 2, 0), weights)
    return jax.lax.scan(add, jnp.zeros((num_windows, num_machines), points.dtype), blocks)[0]


def sums_by_products(
    points: Points, machine_mask: Bool[Array, " machine"]
) -> Float[Array, "window machine"]:
    """`distance_sums` by ``|a - b|^2 = |a|^2 + |b|^2 - 2 a b``, one window's matrix at a time.

    Points are taken from their mean. What cancels leaves an error of about 1e-3 of the farthest
    point's distance from it where two points are equal, and far less where they are not.
    """
    weight = machine_mask.astype(points.dtype)
    itself = jnp.eye(points.shape[2], dtype=bool)

    def sum_window(window: Float[Array, "dim machine"]) -> Float[Array, " machine"]:
        centred = window - (window * weight[None]).sum(1, keepdims=True) / weight.sum()
        square = jnp.square(centred).sum(0, keepdims=True)
        ones = jnp.ones_like(square)
        # The squares as two more rows of the product: a pass over the matrix less for each.
        left = jnp.concatenate([-2 * centred, square, ones]).T
        squared = left @ jnp.concatenate([centred, ones, square])
        return jnp.sqrt(jnp.where(itself, 0, jnp.maximum(squared, 0))) @ weight

    return jax.lax.map(sum_window, points)


def normal_score(
    sums: Float[Array, "window machine"],
    machine_mask: Bool[Array, " machine"],
    *,
    floor: float | Float[Array, ""] = 0.0,
) -> Float[Array, "window machine"]:
    """Mean distance of a machine to the others over the mean distance among the others.

    ``s_i = d_i (n - 2) / (T - 2 d_i)`` with ``T = sum_i d_i`` over n machines: 1 in expectation for
    a machine like the others for any n, and unbounded for an outlier. The paper's normaliser is not
    published; the standard score, a candidate, is at most ``sqrt(n - 1)``, which is little in a
    small fleet.

    Args:
      sums: what `distance_sums` returns.
      machine_mask: true on machines, at least 3: of two machines, either may be the outlier.
        Padding scores 0.
      floor: lower bound of the distances among the others, in units of the embedding.
    """
    counts = machine_mask.astype(sums.dtype)
    n = counts.sum()
    total = jnp.sum(jnp.where(machine_mask[None], sums, 0), axis=1, keepdims=True)
    among = jnp.maximum(total - 2 * sums, 0) / ((n - 1) * (n - 2))
    # Rounding leaves distances of about 1e-7 among equal points, which need a floor.
    among = jnp.maximum(among, jnp.maximum(floor, 1e-6))
    return jnp.where(machine_mask[None], sums / (n - 1) / among, 0)
