"""Scaling of the rotary frequencies (RoPE) for longer contexts."""

import math
from dataclasses import dataclass

import numpy as np


class _FrequencyScaling:
    """Scaling of the frequencies only: queries, keys and scores have factor 1."""

    attention_scaling = 1.0
    """Factor on the rotated queries and keys."""
    score_factor = 1.0
    """Factor on the attention scores."""


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
        borders = self.beta_fast, self.beta_slow
        low, high = (self._dimension(rotations, frequencies, base) for rotations in borders)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * frequencies.size - 1)
        width = high - low if high > low else 0.001
        divided = np.clip((np.arange(frequencies.size) - low) / width, 0, 1)
        return frequencies * (1 - divided + divided / self.factor)

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


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise ValueError(f"factor={factor} would shorten the context: it must be at least 1.")
