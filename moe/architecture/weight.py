"""Specification of a weight: named axes, initial values, dtype, frozen or not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A weight's named axes and its initial values.

    Args:
      axes: names separated by spaces, for example ``"layer d_model head head_dim"``.
      fan_in: names of the axes that a product with the weight sums over. Initial values are a
        normal distribution, truncated at two standard deviations, with variance ``scale^2`` divided
        by the size of these axes. Empty: all values start at `scale`.
      scale: see `fan_in`.
      sampled_along: an axis whose entries are sampled each with an RNG key of its own, as separate
        weights are.
      float32: it is used in float32, whatever `ModelConfig.dtype` is: the scale of a norm, as a
        bfloat16 near 1 has no more than two decimal places, and weights on which the selection of
        experts or a critic value depends (`moe.precision`). They are few: a vector or a narrow
        matrix per layer, and adapters, which are their own float32 master weights.
      frozen: it is not trained and has no gradient: a base weight of adapters.
    """

    axes: str
    fan_in: str = ""
    scale: float = 1.0
    sampled_along: str | None = None
    float32: bool = False
    frozen: bool = False


def norm_weight(axes: str) -> Weight:
    """Specification of the scale of a norm."""
    return Weight(axes, float32=True)
