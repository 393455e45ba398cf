"""Gated DeltaNet layers among attention layers, and checks of what they may be combined with.

Functions take a `moe.config.ModelConfig`, whose constructor calls them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


def period_of(kinds: Sequence[Hashable]) -> int:
    """The smallest number of layers whose repetition gives the stack; the depth where nothing
    repeats.

    Args:
      kinds: types of the layers of a stack, in order.
    """
    depth = len(kinds)
    return next(
        period
        for period in range(1, depth + 1)
        if depth % period == 0 and list(kinds) == list(kinds[:period]) * (depth // period)
    )


UNSUPPORTED_WITH_DELTA = ("mla", "num_dense_layers")
"""Fields of `ModelConfig` that a network with Gated DeltaNet does not support."""


@dataclass(frozen=True)
class GatedDeltaNet:
    """Linear attention by the gated delta rule (`moe.attention.delta`) in the place of attention.

    Args:
      layers: indices of the layers that have it; the others have attention.
      num_key_heads: heads of queries and keys.
      num_value_heads: a multiple of it: neighbouring value heads share a key head.
      key_head_dim: width of a query and of a key.
      value_head_dim: width of a value.
      conv_width: tokens that the convolution before it reads, the own one included.

    References:
      Yang et al., "Gated Delta Networks", 2024. https://arxiv.org/abs/2412.06464
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def content_dim(self) -> int:
        """Width of a key head's query, key and values, side by side."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim


def delta_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers with Gated DeltaNet; none in most networks."""
    return () if config.delta is None else config.delta.layers


def check_delta(config: Any) -> None:
    delta = config.delta
    if delta is None:
        return
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        if getattr(delta, name) < 1:
            raise ValueError(f"delta.{name}={getattr(delta, name)} must be at least 1.")
    if delta.conv_width < 2:
        raise ValueError(f"delta.conv_width={delta.conv_width} must be at least 2.")
    if delta.num_value_heads % delta.num_key_heads:
        raise ValueError(
            f"delta.num_value_heads={delta.num_value_heads} is not a multiple of num_key_heads="
            f"{delta.num_key_heads}: each key head serves the same number of value heads."
        )
    valid = sorted(set(delta.layers) & set(range(config.num_layers)))
    if list(delta.layers) != valid or not 0 < len(valid) < config.num_layers:
        raise ValueError(
            f"delta.layers={delta.layers} must be some but not all of the layers 0 to "
            f"{config.num_layers - 1}, in ascending order; the others have attention."
        )
    for name in UNSUPPORTED_WITH_DELTA:
        if getattr(config, name):
            raise ValueError(
                f"layers with Gated DeltaNet do not support {name}={getattr(config, name)!r}: "
                "leave it out."
            )
    kinds = [layer in delta.layers for layer in range(config.num_layers)]
    if config.execution.scan_layers and 2 * period_of(kinds) > config.num_layers:
        raise ValueError(
            f"scan_layers=True needs layer types that repeat with a period, and delta.layers="
            f"{delta.layers} of {config.num_layers} layers do not: leave scan_layers out."
        )
