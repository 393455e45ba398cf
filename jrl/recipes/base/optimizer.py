"""Optimizer of a recipe: a hashable record of its name, schedule and settings, and its optax
transformation.

References:
  Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
  https://kellerjordan.github.io/posts/muon/
  Liu et al., "Muon is scalable for LLM training", 2025 (consistent RMS). arXiv:2502.16982
  Chen et al., "Symbolic discovery of optimization algorithms", 2023 (Lion). arXiv:2302.06675
  Shazeer and Stern, "Adafactor", 2018. arXiv:1804.04235
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from moe.weights import Transformer, Weight

Schedule = Literal["constant", "linear", "cosine", "wsd"]
"""Learning-rate schedule after the warm-up; "wsd" is warmup-stable-decay."""
OptimizerName = Literal["adamw", "muon", "lion", "adafactor", "sgd"]

STACKS = ("layer", "first_layer", "attention_layer", "delta_layer", "expert")
"""Axes whose entries are weights of their own, the leading ones."""
CONSISTENT_RMS = 0.2
"""Root mean square of Muon's updates per unit of the learning rate, near AdamW's: both take the
same rates (Liu et al., section 2.2)."""

Table = Transformer[Weight]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer with gradient clipping by global norm.

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
        if self.name not in BUILDERS:
            raise ValueError(f"optimizer={self.name!r} is unknown: use {', '.join(BUILDERS)}.")
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
            if value is not None and setting not in BUILDERS[self.name].reads:
                users = [name for name, each in BUILDERS.items() if setting in each.reads]
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


def transformation(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    """Optax transformation of an optimizer: clipping, and then the one named or the recipe's own.

    Args:
      table: trained weights, with None in the place of frozen ones.
    """
    build = optimizer.transformation or BUILDERS[optimizer.name].build
    # Clipped first: one large gradient must not stay in the moments for hundreds of steps.
    return optax.chain(optax.clip_by_global_norm(optimizer.max_grad_norm), build(optimizer, table))


def _chosen(**settings: Any) -> dict[str, Any]:
    """Settings that are not None; the others take the defaults of optax."""
    return {name: value for name, value in settings.items() if value is not None}


def _adamw(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    # Weight decay is decoupled from the moments (Loshchilov and Hutter, arXiv:1711.05101).
    return optax.adamw(
        optimizer.rate_at,
        weight_decay=optimizer.weight_decay,
        mu_dtype=optimizer.mu_dtype,
        **_chosen(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
    )


def _muon(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    return optax.contrib.muon(
        optimizer.rate_at,
        weight_decay=optimizer.weight_decay,
        adam_weight_decay=optimizer.weight_decay,
        mu_dtype=optimizer.mu_dtype,
        consistent_rms=CONSISTENT_RMS,
        muon_weight_dimension_numbers=jax.tree.map(matrix_axes, table),
        **_chosen(
            beta=optimizer.momentum,
            adam_b1=optimizer.beta1,
            adam_b2=optimizer.beta2,
            eps=optimizer.epsilon,
        ),
    )


def _lion(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    return optax.lion(
        optimizer.rate_at,
        weight_decay=optimizer.weight_decay,
        mu_dtype=optimizer.mu_dtype,
        **_chosen(b1=optimizer.beta1, b2=optimizer.beta2),
    )


def _adafactor(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    inner = optax.adafactor(
        optimizer.rate_at,
        momentum=optimizer.momentum,
        dtype_momentum=optimizer.mu_dtype,
        **_chosen(eps=optimizer.epsilon),
    )
    # In place of optax's decay, which the learning rate does not multiply.
    return optax.chain(per_weight(inner, table), _decay(optimizer))


def _sgd(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    momentum = optimizer.momentum
    steps = optax.sgd(optimizer.rate_at, momentum, accumulator_dtype=optimizer.mu_dtype)
    return optax.chain(steps, _decay(optimizer))


def _decay(optimizer: Optimizer) -> optax.GradientTransformation:
    """Decoupled weight decay, after updates that have their sign and rate."""
    decay = optimizer.weight_decay
    if not decay:
        return optax.identity()
    return optax.add_decayed_weights(lambda count: -decay * optimizer.rate_at(count))


class Builder(NamedTuple):
    """Function that builds an optax transformation, and the settings that it reads of those that
    not all optimizers have."""

    build: Callable[[Optimizer, Table], optax.GradientTransformation]
    reads: tuple[str, ...]


BUILDERS: dict[str, Builder] = {
    "adamw": Builder(_adamw, ("beta1", "beta2", "epsilon")),
    "muon": Builder(_muon, ("beta1", "beta2", "epsilon", "momentum")),
    "lion": Builder(_lion, ("beta1", "beta2")),
    "adafactor": Builder(_adafactor, ("epsilon", "momentum")),
    "sgd": Builder(_sgd, ("momentum",)),
}


def matrix_axes(weight: Weight) -> optax.contrib.MuonDimensionNumbers | None:
    """Input axes, that a matrix of Muon is summed over, and output axes, from the end; None for a
    weight of Adam: norms, biases, embedding, head, router, adapters, and filters of convolutions.

    All heads of a projection are one matrix. Layers, experts, and gate and up are matrices of their
    own, as the table samples them apart.

    Examples:
      >>> matrix_axes(Weight("layer d_model head head_dim", "d_model"))
      MuonDimensionNumbers(reduction_axis=(-3,), output_axis=(-2, -1))
      >>> matrix_axes(Weight("vocab d_model", "d_model"))
    """
    axes, summed = weight.axes.split(), weight.fan_in.split()
    # Float32 weights are norms, routers and adapters; a filter sums over neighbouring tokens.
    if not summed or weight.float32 or {"vocab", "delta_width"} & {*axes}:
        return None
    stacked = (*STACKS, weight.sampled_along)
    reduction, output = list[int](), list[int]()
    for index, axis in enumerate(axes, -len(axes)):
        if axis not in stacked:
            (reduction if axis in summed else output).append(index)
    return optax.contrib.MuonDimensionNumbers(tuple(reduction), tuple(output)) if output else None


def per_weight(inner: optax.GradientTransformation, table: Table) -> optax.GradientTransformation:
    """Applies a transformation to each layer's and expert's weight separately.

    Statistics over a weight, such as Adafactor's sums over rows, then do not mix layers, and the
    layers that pad a pipeline stage count nowhere. All leaves of the state begin with the axes of
    the stack.
    """
    ranks = jax.tree.map(lambda weight: sum(a not in STACKS for a in weight.axes.split()), table)

    def stacked(function: Any, rank: int, leaf: Any) -> Any:
        for _ in range(leaf.ndim - rank):
            function = jax.vmap(function)
        return function

    def init(params: Any) -> Any:
        return jax.tree.map(lambda rank, leaf: stacked(inner.init, rank, leaf)(leaf), ranks, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        results = jax.tree.map(
            lambda rank, grad, state, leaf: stacked(inner.update, rank, grad)(grad, state, leaf),
            ranks,
            updates,
            state,
            params,
        )
        return tuple(jax.tree.map(lambda _, r, i=i: r[i], ranks, results) for i in (0, 1))

    return optax.GradientTransformation(init, update)
