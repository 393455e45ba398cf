"""Optimizer settings of a recipe: AdamW with gradient clipping by global norm."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

Schedule = Literal["constant", "linear", "cosine"]
"""Learning-rate schedule after the warm-up."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW with gradient clipping by global norm.

    Args:
      learning_rate: the rate after the warm-up.
      warmup: steps of linear rise from 0.
      weight_decay: decoupled.
      max_grad_norm: larger gradients are scaled down to it.
      mu_dtype: of Adam's first moment, as optax names it. In bfloat16 it takes half the memory: its
        step, a tenth of the gradient, is far above the rounding error. The second moment moves by a
        thousandth of itself, which rounding to bfloat16 would lose: it is float32.
      gradient_wire: communication dtype of gradients, "float32" or "bfloat16", across
        sequence-parallel groups (`sharding.compression`); their sums are float32 either way.
      schedule: the rate after the warm-up: "constant", or decreasing linearly or along half a
        cosine until step `steps`.
      steps: total number of optimizer steps; None where the rate is constant.
      final: the last rate, as a fraction of `learning_rate`.
    """

    learning_rate: float
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_wire: str = "float32"
    schedule: Schedule = "constant"
    steps: int | None = None
    final: float = 0.0

    def __post_init__(self):
        if self.gradient_wire not in ("float32", "bfloat16"):
            raise ValueError(
                f"gradient_wire={self.gradient_wire!r} is not a communication dtype of gradients: "
                "use float32 or bfloat16."
            )

    def rate_at(self, count: Any) -> Any:
        """Learning rate of step `count`, from 0. Step n of the warm-up has the factor (n + 1) /
        warmup. With p from 0 to 1 over the steps after it, the factor of "linear" is
        ``1 - (1 - final) p``, that of "cosine" ``final + (1 - final) (1 + cos(pi p)) / 2``."""
        # The first step is above 0 already: a rate of 0 would train nothing.
        risen = self.learning_rate * jnp.minimum(1.0, (count + 1) / max(self.warmup, 1))
        if self.schedule == "constant":
            return risen
        assert self.steps is not None, "a rate that falls has a last step"
        left = max(self.steps - self.warmup, 1)
        # 0 during the warm-up, 1 from the last step on, if there are more.
        part = jnp.clip((count - self.warmup) / left, 0.0, 1.0)
        fallen = part if self.schedule == "linear" else (1.0 - jnp.cos(jnp.pi * part)) / 2.0
        return risen * (1.0 - (1.0 - self.final) * fallen)
