"""Activation functions of gated feed-forward layers (SwiGLU, GeGLU, clamped SwiGLU)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(u + 1) g sigmoid(alpha g)`` of a gate g of at most `limit` and an up u between ``-limit``
    and `limit`.

    Args:
      alpha: gain of the sigmoid.
      limit: see above.

    References:
      OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025. https://arxiv.org/abs/2508.10925
    """

    alpha: float
    limit: float

    def __post_init__(self):
        if not self.limit > 0:
            raise ValueError(f"limit={self.limit} must be above 0: larger gates are clipped to it.")


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU
