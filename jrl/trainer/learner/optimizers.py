"""Optax transformations of the optimizers by name, and the matrices of a network for Muon.

References:
  Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
  https://kellerjordan.github.io/posts/muon/
  Liu et al., "Muon is scalable for LLM training", 2025 (consistent RMS). arXiv:2502.16982
  Chen et al., "Symbolic discovery of optimization algorithms", 2023 (Lion). arXiv:2302.06675
  Shazeer and Stern, "Adafactor", 2018. arXiv:1804.04235
"""

from typing import Any

import jax
import optax
import optax.contrib

from jrl.recipes.base.optimizer import Optimizer
from moe.weights import Transformer, Weight

STACKS = ("layer", "first_layer", "attention_layer", "delta_layer", "expert")
"""Axes whose entries are weights of their own, the leading ones."""
CONSISTENT_RMS = 0.2
"""Root mean square of Muon's updates per unit of the learning rate, near AdamW's: both take the
same rates (Liu et al., section 2.2)."""

Table = Transformer[Weight]


def transformation(optimizer: Optimizer, table: Table) -> optax.GradientTransformation:
    """Optax transformation of an optimizer: clipping, and then the one named or the recipe's own.

    Args:
      table: trained weights, with None in the place of frozen ones.
    """
    build = optimizer.transformation or BUILDERS[optimizer.name]
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


BUILDERS = {"adamw": _adamw, "muon": _muon, "lion": _lion, "adafactor": _adafactor, "sgd": _sgd}


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
