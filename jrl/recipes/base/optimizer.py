"""How a recipe steps: AdamW behind a bound on the gradient's norm."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True)
class Optimizer:
    """AdamW behind a bound on the gradient's norm.

    Args:
      learning_rate: reached after the warm-up, constant from there.
      warmup: steps of linear rise from 0.
      weight_decay: decoupled.
      max_grad_norm: larger gradients are scaled down to it.
      mu_dtype: of Adam's first moment, as optax names it. In bfloat16 it takes half the memory: its
        step, a tenth of the gradient, is far above the last digit. The second moment moves by a
        thousandth of itself, which rounding to bfloat16 would lose: it is float32.
    """

    learning_rate: float
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    mu_dtype: Literal["float32", "bfloat16"] = "float32"

    def rate_at(self, count: Any) -> Any:
        """The learning rate of step `count`, from 0. Step n of the warm-up runs at (n + 1) /
        warmup."""
        return self.learning_rate * jnp.minimum(1.0, (count + 1) / max(self.warmup, 1))
