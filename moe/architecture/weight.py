"""Specification of a weight: named axes, initial values, dtype, frozen or not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A weight's named axes and its initial values.

    Args:
      axes: names separated by blanks, for example ``"layer d_model head head_dim"``.
      fan_in: the axes summed over where the weight is used; values start normal, truncated at two
        standard deviations, with variance ``scale^2 / fan-in``. Empty: all values start at `scale`.
      scale: see `fan_in`.
      sampled_along: an axis whose entries are sampled each with an RNG key of its own, as separate
        weights are.
      float32: it is computed with in float32, whatever `ModelConfig.dtype` is: the scale of a norm,
        of which a bfloat16 near 1 has no more than two digits, and weights on which the selection
        of experts or a value depends (`moe.precision`). They are few: a vector or a narrow matrix
        a layer, and adapters, which are their own float32 master weights.
      frozen: it is not trained and has no gradient: a base weight of adapters.
    """

    axes: str
    fan_in: str = ""
    scale: float = 1.0
    sampled_along: str | None = None
    float32: bool = False
    frozen: bool = False


def norm_weight(axes: str) -> Weight:
    """The scale of a norm."""
    return Weight(axes, float32=True)
