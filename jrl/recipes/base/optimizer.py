"""Optimizer of a recipe: its name, learning-rate schedule and settings, as one hashable record."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""Learning-rate schedule after the warm-up; "wsd" is warmup-stable-decay."""
OptimizerName = Literal["adamw", "muon", "lion", "adafactor", "sgd"]

USED: dict[str, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "muon": ("beta1", "beta2", "epsilon", "momentum"),
    "lion": ("beta1", "beta2"),
    "adafactor": ("epsilon", "momentum"),
    "sgd": ("momentum",),
}
"""Settings that each optimizer reads, of those that not all of them have."""


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with gradient clipping by global norm (`jrl.trainer.learner.optimizers`).

    Args:
      learning_rate: rate after the warm-up.
      warmup: steps of linear rise from 0.
      weight_decay: decoupled; a step subtracts this times the rate times the weight.
      max_grad_norm: larger gradients are scaled down to it.
      mu_dtype: dtype of the first moment, as optax names it. In bfloat16 it takes half the memory:
        its step, a tenth of the gradient, is far above the rounding error. The second moment moves
        by a thousandth of itself, which rounding to bfloat16 would lose: it is float32.
      gradient_wire: communication dtype of gradients, "float32" or "bfloat16", across
        sequence-parallel groups (`sharding.compression`); their sums are float32 either way.
      schedule: rate after the warm-up: "constant"; decreasing linearly or along half a cosine until
        step `steps`; or "wsd", constant and then decreasing linearly over the last steps.
      steps: total number of optimizer steps; None if the rate is constant.
      final: last rate, as a fraction of `learning_rate`.
      decay: fraction of `steps` in which "wsd" decreases the rate.
      name: name of the optimizer.
      beta1: decay rate of the first moment; None takes the default of optax, as of the next three.
      beta2: decay rate of the second moment, or of Lion's momentum.
      epsilon: term of the denominator.
      momentum: decay rate of the momentum of Muon (0.95), SGD and Adafactor (none).
      transformation: function that builds another optax transformation, which takes the place of
        the one named: ``transformation(optimizer, table)``, with this record and the table of
        trained weights (`moe.weights.table`). Clipping precedes it. It is part of a key of compiled
        functions: a function at the top of a module, not one that is made in each call.
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
    decay: float = 0.1
    name: OptimizerName = "adamw"
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    momentum: float | None = None
    transformation: Callable[..., Any] | None = None

    def __post_init__(self):
        if self.gradient_wire not in ("float32", "bfloat16"):
            raise ValueError(
                f"gradient_wire={self.gradient_wire!r} is not a communication dtype of gradients: "
                "use float32 or bfloat16."
            )
        if self.schedule not in get_args(Schedule):
            raise ValueError(
                f"learning_rate_schedule={self.schedule!r} is unknown: use "
                f"{', '.join(get_args(Schedule))}."
            )
        if self.name not in USED:
            raise ValueError(f"optimizer={self.name!r} is unknown: use {', '.join(USED)}.")
        for setting in ("beta1", "beta2", "momentum"):
            if (getattr(self, setting) or 0.0) >= 1:
                raise ValueError(
                    f"{setting}={getattr(self, setting)} must be below 1: a mean that decays by it "
                    "would never move."
                )
        if self.transformation is not None:
            _check_transformation(self.transformation)
            return
        for setting in ("beta1", "beta2", "epsilon", "momentum"):
            value = getattr(self, setting)
            if value is not None and setting not in USED[self.name]:
                users = [name for name, used in USED.items() if setting in used]
                raise ValueError(
                    f"{setting}={value} has no effect on optimizer={self.name}: leave it out, or "
                    f"choose {' or '.join(users)}."
                )

    def rate_at(self, count: Any) -> Any:
        """Learning rate of step `count`, from 0. Step n of the warm-up has the factor (n + 1) /
        warmup. With p from 0 to 1 over the steps that decrease the rate, the factor of "linear" and
        "wsd" is ``1 - (1 - final) p``, and of "cosine"
        ``final + (1 - final) (1 + cos(pi p)) / 2``."""
        # The first step is above 0 already: a rate of 0 would train nothing.
        risen = self.learning_rate * jnp.minimum(1.0, (count + 1) / max(self.warmup, 1))
        if self.schedule == "constant":
            return risen
        assert self.steps is not None, "a rate that falls has a last step"
        first = self.warmup
        if self.schedule == "wsd":
            first = max(first, self.steps - round(self.decay * self.steps))
        # 0 before the first of these steps, 1 from the last step on, if there are more.
        part = jnp.clip((count - first) / max(self.steps - first, 1), 0.0, 1.0)
        fallen = (1.0 - jnp.cos(jnp.pi * part)) / 2.0 if self.schedule == "cosine" else part
        return risen * (1.0 - (1.0 - self.final) * fallen)


def _check_transformation(transformation: Callable[..., Any]) -> None:
    """Raises ValueError for a function that is not hashable, or is created in each call."""
    name = getattr(transformation, "__qualname__", type(transformation).__name__)
    try:
        hash(transformation)
    except TypeError:
        raise ValueError(
            f"transformation={name} is not hashable: give a function of a module, or an object of "
            "a frozen dataclass with __call__."
        ) from None
    if "<locals>" in name or "<lambda>" in name:
        raise ValueError(
            f"transformation={name} is created in each call, so each step would compile again: "
            "give a function at the top of a module."
        )
