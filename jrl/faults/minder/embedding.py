"""Embeddings of windows, denoised or not, between which distances of machines are measured.

A view takes a subset of the metrics and embeds their windows ``[channel, window, machine, sample]``
as points ``[window, dim, machine]``. Minder has one view per metric; its ablations have one view of
all, or leave the denoising out. An embedding's second argument is true on machines and false on
padding; no embedding here uses it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32

from jrl.faults.minder import vae

Channels = Float[np.ndarray, "channel machine time"]
Windows = Float[Array, "channel window machine time"]
Points = Float[Array, "window dim machine"]
MachineMask = Bool[Array, " machine"]
Embedding = Callable[[Windows, MachineMask], Points]


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


def denoised(weights: vae.Weights) -> Embedding:
    """Windows as a model reconstructs them; a model of all channels joins them (ablation INT)."""
    return partial(_denoised, weights)


@jax.jit
def _denoised(weights: vae.Weights, windows: Windows, machine_mask: MachineMask) -> Points:
    del machine_mask  # each machine is denoised by itself
    channels, count, machines, width = windows.shape
    flat = windows.reshape(channels, count * machines, width)
    rebuilt = vae.reconstruct(weights, jnp.transpose(flat, (2, 0, 1)))
    points = rebuilt.reshape(width * channels, count, machines)
    return jnp.swapaxes(points, 0, 1)


def side_by_side(weights_per_channel: Sequence[vae.Weights]) -> Embedding:
    """Every channel through a model of its own, then all as one point (ablation CON)."""
    stacked = {
        name: jnp.stack([weights[name] for weights in weights_per_channel])
        for name in weights_per_channel[0]
    }
    return partial(_side_by_side, stacked)


@jax.jit
def _side_by_side(weights: vae.Weights, windows: Windows, machine_mask: MachineMask) -> Points:
    points = jax.vmap(_denoised, in_axes=(0, 0, None))(weights, windows[:, None], machine_mask)
    return jnp.moveaxis(points, 0, 1).reshape(points.shape[1], -1, points.shape[3])


@jax.jit
def raw(windows: Windows, machine_mask: MachineMask) -> Points:
    """The windows of one metric as they are (ablation RAW)."""
    del machine_mask
    return jnp.swapaxes(windows[0], 1, 2)


@jax.jit
def as_points(windows: Windows, machine_mask: MachineMask) -> Points:
    """Windows of one sample as points whose dimensions are the channels."""
    del machine_mask
    return jnp.swapaxes(windows[..., 0], 0, 1)


def whitened_moments(values: Channels, width: int) -> Float32[np.ndarray, "dim machine window"]:
    """The baseline's points: four moments of each metric, whitened by the covariance of one record.

    Mean, standard deviation, skewness and kurtosis over the window; principal components that hold
    95 % of the variance, each scaled to variance 1. The Euclidean distance of two such points is
    the Mahalanobis distance of the machines. (The paper describes its baseline in these words
    only.)

    The covariance is that of machines around the median of their fleet, over the whole record: the
    machines of one window are fewer than their 28 features in a small fleet, and points whitened by
    themselves are then equally far from each other. As in robust covariances, it is that of the
    half of the points nearest to the median: a machine that fails for minutes is no part of what is
    usual.
    """
    features = np.concatenate([four_moments(channel, width) for channel in values])
    matrix = whitening(features[:, :, :: max(1, width // 4)], 0.95)
    points = matrix @ features.reshape(len(features), -1)
    return points.reshape(features.shape)


def four_moments(
    values: Float[np.ndarray, "machine time"], width: int
) -> Float32[np.ndarray, "4 machine window"]:
    """Mean, standard deviation, skewness and kurtosis of each window, from running sums of powers.

    Args:
      values: scaled to [0, 1], without gaps.
    """
    wide = values.astype(np.float64)
    power, means = np.ones_like(wide), []
    for _ in range(4):
        power *= wide
        total = np.cumsum(power, 1)
        total[:, width:] -= total[:, :-width].copy()
        means.append(total[:, width - 1 :] / width)
    m, m2, m3, m4 = means
    variance = np.maximum(m2 - m**2, 1e-6)  # a thousandth of the range, far above the rounding
    third = m3 - 3 * m * m2 + 2 * m**3
    fourth = m4 - 4 * m * m3 + 6 * m**2 * m2 - 3 * m**4
    each = (m, np.sqrt(variance), third / variance**1.5, fourth / variance**2)
    return np.stack(each).astype(np.float32)


def whitening(
    features: Float[np.ndarray, "feature machine window"], share: float
) -> Float32[np.ndarray, "feature feature"]:
    """The matrix that makes features uncorrelated with variance 1; rows left out are 0.

    The features are those of the half of the points nearest to their median. Components are kept,
    the largest first, until they hold `share` of the variance.
    """
    centred = features - np.median(features, 1, keepdims=True)
    rows = centred.reshape(len(features), -1).T.astype(np.float64)
    size = np.maximum(np.sqrt((rows**2).mean(0)), 1e-6)
    rows = rows / size
    far = (rows**2).sum(1)
    usual = rows[far <= np.median(far)]
    spread = np.maximum(np.sqrt((usual**2).mean(0)), 1e-6)
    usual, size = usual / spread, size * spread
    eigenvalues, eigenvectors = np.linalg.eigh(usual.T @ usual / len(usual))
    larger = np.cumsum(eigenvalues[::-1])[::-1] - eigenvalues
    retained = (larger < share * eigenvalues.sum()) & (eigenvalues > 1e-6 * eigenvalues.sum())
    inverse = np.where(retained, 1 / np.sqrt(np.where(retained, eigenvalues, 1)), 0)
    return ((eigenvectors * inverse).T / size).astype(np.float32)
