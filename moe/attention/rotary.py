"""Rotary position embedding (RoPE), and the scaling of its frequencies for longer contexts."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sharding.collectives import match_varying


class _FrequencyScaling:
    """Scaling of the frequencies only: queries, keys and scores have factor 1."""

    @property
    def attention_scaling(self) -> float:
        """Factor on the rotated queries and keys."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """Factor on the attention scores."""
        return 1.0


@dataclass(frozen=True)
class LlamaScaling(_FrequencyScaling):
    """Long wavelengths are stretched by `factor`, short ones kept, those between are blended.

    Args:
      factor: how many times longer the context became.
      low_frequency_factor: wavelengths above ``original_context / low_frequency_factor`` are
        stretched.
      high_frequency_factor: wavelengths below ``original_context / high_frequency_factor`` are
        kept.
      original_context: tokens of the context trained on first.

    References:
      Llama Team, "The Llama 3 Herd of Models", 2024. https://arxiv.org/abs/2407.21783
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def __post_init__(self):
        _check_factor(self.factor)
        if not self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor={self.low_frequency_factor} must be below "
                f"high_frequency_factor={self.high_frequency_factor}."
            )

    def scale_frequencies(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        rotations = self.original_context * frequencies / (2 * math.pi)
        width = self.high_frequency_factor - self.low_frequency_factor
        unscaled = np.clip((rotations - self.low_frequency_factor) / width, 0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)


@dataclass(frozen=True)
class LinearScaling(_FrequencyScaling):
    """All wavelengths are stretched by `factor` (position interpolation).

    References:
      Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
      2023. https://arxiv.org/abs/2306.15595
    """

    factor: float

    def __post_init__(self):
        _check_factor(self.factor)

    def scale_frequencies(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        return frequencies / self.factor


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: frequencies are blended by how often they turn in the original context.

    Args:
      factor: how many times longer the context became.
      original_context: tokens of the context trained on first.
      beta_fast: frequencies that turn more often than this are kept.
      beta_slow: frequencies that turn less often than this are divided by `factor`.
      attention_factor: factor on the rotated queries and keys; None follows from the next two.
      rotary_temperature: DeepSeek's ``mscale``; with it and `score_temperature` the factor is
        ``m(rotary_temperature) / m(score_temperature)``, ``m(t) = 0.1 t ln(factor) + 1``, without
        them ``m(1)``.
      score_temperature: DeepSeek's ``mscale_all_dim``: attention scores are multiplied by
        ``m(score_temperature)^2``.
      truncate: the border of the blend is moved to whole dimensions.

    References:
      Peng et al., "YaRN", 2023, eq. 17 to 22. https://arxiv.org/abs/2309.00071
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    rotary_temperature: float | None = None
    score_temperature: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _check_factor(self.factor)
        if not self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow={self.beta_slow} must not be above beta_fast={self.beta_fast}."
            )

    def scale_frequencies(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        low, high = (self._dimension(rotations, frequencies, base) for rotations in self._borders)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * frequencies.size - 1)
        width = high - low if high > low else 0.001
        divided = np.clip((np.arange(frequencies.size) - low) / width, 0, 1)
        return frequencies * (1 - divided + divided / self.factor)

    @property
    def _borders(self) -> tuple[float, float]:
        return self.beta_fast, self.beta_slow

    def _dimension(self, rotations: float, frequencies: np.ndarray, base: float) -> float:
        """The (fractional) index of the frequency that makes `rotations` rotations in the original
        context."""
        wavelength = self.original_context / (2 * math.pi * rotations)
        return frequencies.size * math.log(wavelength) / math.log(base)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def attention_scaling(self) -> float:
        """Factor on the rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rotary_temperature and self.score_temperature:
            return self._temperature(self.rotary_temperature) / self._temperature(
                self.score_temperature
            )
        return self._temperature(1.0)

    @property
    def score_factor(self) -> float:
        """Factor on the attention scores."""
        return self._temperature(self.score_temperature or 0.0) ** 2


RopeScaling = LlamaScaling | LinearScaling | YarnScaling


def frequencies_of(head_dim: int, base: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each pair, ``base^(-2i / head_dim)`` before `scaling`; float64."""
    half = head_dim // 2
    frequencies = float(base) ** (-np.arange(half) / half)
    return frequencies if scaling is None else scaling.scale_frequencies(frequencies, base)


def rope(
    x: Float[Array, "token heads head_dim"],
    positions: Int[Array, "token"],
    base: float,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
) -> Float[Array, "token heads head_dim"]:
    """Rotates the pair (i, i + head_dim/2) of each head by ``position * base^(-2i / head_dim)``.

    Args:
      scaling: how the frequencies are changed.
      interleaved: the pairs of `x` are (2i, 2i + 1); those of the result are (i, i + head_dim/2)
        all the same, in queries and in keys, so that products do not notice.

    References:
      Su et al., "RoFormer", 2021, eq. 34. https://arxiv.org/abs/2104.09864
    """
    attention_scaling = 1.0 if scaling is None else float(scaling.attention_scaling)
    frequencies = pair_frequencies(x.shape[-1], base, scaling)
    return rotate(x, positions, frequencies, attention_scaling, interleaved)


def pair_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None
) -> Float[Array, "pair"]:
    """`frequencies_of` as a float32 array for the device."""
    half = head_dim // 2
    if scaling is None:
        return base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.asarray(frequencies_of(head_dim, base, scaling), jnp.float32)


def rotate(
    x: Float[Array, "token heads head_dim"],
    positions: Int[Array, "token"],
    frequencies: Float[Array, "pair"],
    attention_scaling: float | Float[Array, ""] = 1.0,
    interleaved: bool = False,
) -> Float[Array, "token heads head_dim"]:
    """`rope` with given frequencies (radians per position of each pair) and a factor on the
    result."""
    return rotate_by_tables(
        x, *cosines_and_sines(positions, frequencies, attention_scaling), interleaved
    )


def cosines_and_sines(
    positions: Int[Array, "token"],
    frequencies: Float[Array, "pair"],
    attention_scaling: float | Float[Array, ""] = 1.0,
) -> tuple[Float[Array, "token pair"], Float[Array, "token pair"]]:
    """Cosine and sine of the rotation angle of each pair of a token, times `attention_scaling`."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(attention_scaling, jax.Array) or attention_scaling != 1:
        cos, sin = cos * attention_scaling, sin * attention_scaling
    return cos, sin


def rotate_by_tables(
    x: Float[Array, "token heads head_dim"],
    cos: Float[Array, "token pair"],
    sin: Float[Array, "token pair"],
    interleaved: bool = False,
) -> Float[Array, "token heads head_dim"]:
    """`rope` with given tables, as `cosines_and_sines` computes them."""
    if interleaved:
        x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return _rotate_pairs(*match_varying((x, cos, sin)))


@jax.custom_vjp
def _rotate_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotation of the first half of each head with the second. The gradient is the reverse
    rotation, in one pass; XLA's would pad the gradients of the halves and add them."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def _rotate_forward(x, cos, sin):
    return _rotate_pairs(x, cos, sin), (cos, sin)


def _rotate_backward(angles, gradient):
    cos, sin = angles
    return _rotate_pairs(gradient, cos, -sin), None, None


_rotate_pairs.defvjp(_rotate_forward, _rotate_backward)


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise ValueError(f"factor={factor} would shorten the context: it must be at least 1.")
