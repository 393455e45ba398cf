"""What the distance between two machines is measured in: windows, denoised or not.

A view takes some of the metrics and embeds their windows ``[channel, window, machine, sample]`` as
points ``[window, dim, machine]``. Minder has one view per metric; its ablations have one of all, or
leave the denoising out. An embedding's second argument tells machines from padding, for those that
look at all machines together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jrl.faults import vae

Windows = Float[Array, "channel window machine time"]
Points = Float[Array, "window dim machine"]
Counted = Bool[Array, " machine"]
Embedding = Callable[[Windows, Counted], Points]


@dataclass(frozen=True)
class View:
    """One way to look at a fleet.

    Attributes:
      name: how an alarm calls it: a metric, or what stands for several.
      channels: which metrics of the prepared fleet it takes.
      embed: from their windows to points.
      width: samples of a window; those before the detector's own 8 come on top.
    """

    name: str
    channels: tuple[int, ...]
    embed: Embedding
    width: int = vae.WINDOW


Method = Callable[[tuple[str, ...]], list[View]]
"""From the metrics of a prepared fleet to its views, in the order in which they are searched."""


def gather(
    values: Float[np.ndarray, "metric machine time"], starts: np.ndarray, width: int = vae.WINDOW
) -> np.ndarray:
    """Windows of `width` samples that begin at `starts`: ``[metric, window, machine, time]``."""
    view = np.lib.stride_tricks.sliding_window_view(values, width, axis=2)
    return np.ascontiguousarray(np.moveaxis(view[:, :, starts], 2, 1))


def denoised(weights: vae.Weights) -> Embedding:
    """The windows as a model gives them back; one of all channels joins them (ablation INT)."""
    return partial(_denoised, weights)


@jax.jit
def _denoised(weights: vae.Weights, windows: Windows, counted: Counted) -> Points:
    del counted  # each machine is denoised by itself
    channels, count, machines, width = windows.shape
    flat = windows.reshape(channels, count * machines, width)
    rebuilt = vae.reconstruct(weights, jnp.transpose(flat, (2, 0, 1)))
    points = rebuilt.reshape(width * channels, count, machines)
    return jnp.swapaxes(points, 0, 1)


def side_by_side(each: Sequence[vae.Weights]) -> Embedding:
    """Every channel through a model of its own, then all as one point (ablation CON)."""
    stacked = {name: jnp.stack([weights[name] for weights in each]) for name in each[0]}
    return partial(_side_by_side, stacked)


@jax.jit
def _side_by_side(weights: vae.Weights, windows: Windows, counted: Counted) -> Points:
    points = jax.vmap(_denoised, in_axes=(0, 0, None))(weights, windows[:, None], counted)
    return jnp.moveaxis(points, 0, 1).reshape(points.shape[1], -1, points.shape[3])


@jax.jit
def raw(windows: Windows, counted: Counted) -> Points:
    """The windows of one metric as they are (ablation RAW)."""
    del counted
    return jnp.swapaxes(windows[0], 1, 2)


def moments(windows: Windows, counted: Counted) -> Points:
    """The baseline's: four moments of each metric, in their principal components, whitened.

    Mean, deviation, skewness and kurtosis over the window; then, over the machines of the window,
    the principal components that hold 95 % of the variance, each scaled to variance 1. The
    Euclidean distance of two such points is the Mahalanobis distance of the machines. (The paper
    describes its baseline in these words only; 95 % is a choice.)
    """
    return _moments(windows, counted, share=0.95)


@partial(jax.jit, static_argnames="share")
def _moments(windows: Windows, counted: Counted, *, share: float) -> Points:
    mean = windows.mean(-1, keepdims=True)
    centred = windows - mean
    variance = jnp.mean(centred**2, -1)
    scale = jnp.maximum(variance, 1e-8)
    skew = jnp.mean(centred**3, -1) / scale**1.5
    kurtosis = jnp.mean(centred**4, -1) / scale**2
    features = jnp.stack([mean[..., 0], jnp.sqrt(variance), skew, kurtosis])
    features = jnp.moveaxis(features.reshape(-1, *features.shape[2:]), 0, 1)
    return whiten(features, counted, share)


def whiten(
    features: Float[Array, "window feature machine"], counted: Counted, share: float
) -> Float[Array, "window feature machine"]:
    """Standardised features in their principal components, each with variance 1 or left out (0).

    Components are kept, the largest first, until they hold `share` of the variance.
    """
    ones = counted.astype(features.dtype)[None, None]
    weight = ones / ones.sum()
    centred = features - jnp.sum(features * weight, -1, keepdims=True)
    variance = jnp.sum(centred**2 * weight, -1, keepdims=True)
    centred = centred / jnp.maximum(jnp.sqrt(variance), 1e-6)
    covariance = jnp.einsum("wfm,wgm->wfg", centred * weight, centred)
    power, axes = jnp.linalg.eigh(covariance)
    power = jnp.maximum(power, 0)
    larger = jnp.cumsum(power[:, ::-1], 1)[:, ::-1] - power
    total = jnp.maximum(power.sum(1, keepdims=True), 1e-12)
    kept = (larger < share * total) & (power > 1e-6 * total)
    inverse = jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, power, 1)), 0)
    return jnp.einsum("wfg,wfm->wgm", axes, centred) * inverse[:, :, None]
