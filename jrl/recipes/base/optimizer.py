"""How a recipe steps: AdamW behind a bound on the gradient's norm."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Optimizer:
    """AdamW behind a bound on the gradient's norm.

    Args:
      learning_rate: reached after the warm-up, constant from there.
      warmup: steps of linear rise from 0.
      weight_decay: decoupled.
      max_grad_norm: larger gradients are scaled down to it.
    """

    learning_rate: float
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def rate_at(self, count: Any) -> Any:
        """The learning rate of step `count`, from 0. Step n of the warm-up runs at (n + 1) /
        warmup."""
        return self.learning_rate * jnp.minimum(1.0, (count + 1) / max(self.warmup, 1))
