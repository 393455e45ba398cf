"""Rotary position embedding (RoPE) of queries and keys, with the settings of their layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe.architecture.rope import RopeScaling
from moe.config import ModelConfig
from sharding.collectives import match_varying


def frequencies_of(head_dim: int, base: float, scaling: RopeScaling | None) -> np.ndarray:
    """Radians per position of each pair, ``base^(-2i / head_dim)`` before `scaling`; float64."""
    half = head_dim // 2
    frequencies = float(base) ** (-np.arange(half) / half)
    return frequencies if scaling is None else scaling.scale_frequencies(frequencies, base)


def rope(
    x: Float[Array, "token heads head_dim"],
    positions: Int[Array, "token"],
    base: float,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
) -> Float[Array, "token heads head_dim"]:
    """Rotates the pair (i, i + head_dim/2) of each head by ``position * base^(-2i / head_dim)``.

    Args:
      interleaved: the pairs of `x` are (2i, 2i + 1); the pairs of the result are (i, i +
        head_dim/2) all the same, in queries and in keys, so that products do not notice.

    References:
      Su et al., "RoFormer", 2021, eq. 34. https://arxiv.org/abs/2104.09864
    """
    frequencies = _frequencies_and_scaling(RotarySettings(base, scaling), x.shape[-1])
    return rotate_by_tables(x, *cosines_and_sines(positions, *frequencies), interleaved)


def pair_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None
) -> Float[Array, "pair"]:
    """`frequencies_of` as a float32 array for the device."""
    half = head_dim // 2
    if scaling is None:
        return base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.asarray(frequencies_of(head_dim, base, scaling), jnp.float32)


def cosines_and_sines(
    positions: Int[Array, "token"],
    frequencies: Float[Array, "pair"],
    attention_scaling: float | Float[Array, ""],
) -> tuple[Float[Array, "token pair"], Float[Array, "token pair"]]:
    """Cosine and sine of the rotation angle of each pair of a token, times `attention_scaling`."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if isinstance(attention_scaling, jax.Array) or attention_scaling != 1:
        cos, sin = cos * attention_scaling, sin * attention_scaling
    return cos, sin


def rotate_by_tables(
    x: Float[Array, "token heads head_dim"],
    cos: Float[Array, "token pair"],
    sin: Float[Array, "token pair"],
    interleaved: bool = False,
) -> Float[Array, "token heads head_dim"]:
    """`rope` by the tables of `cosines_and_sines`."""
    if interleaved:
        x = jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return _rotate_pairs(*match_varying((x, cos, sin)))


@jax.custom_vjp
def _rotate_pairs(x: Array, cos: Array, sin: Array) -> Array:
    """Rotation of the first half of each head with the second. The gradient is the reverse
    rotation, in one pass; XLA's would pad the gradients of the halves and add them."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def _rotate_forward(x, cos, sin):
    return _rotate_pairs(x, cos, sin), (cos, sin)


def _rotate_backward(angles, gradient):
    cos, sin = angles
    return _rotate_pairs(gradient, cos, -sin), None, None


_rotate_pairs.defvjp(_rotate_forward, _rotate_backward)


Heads = Float[Array, "token heads width"]


class RotarySettings(NamedTuple):
    """Rotary base and scaling of a layer; see `moe.attention.rotary.rope`."""

    base: float
    scaling: RopeScaling | None


class RotaryCache(NamedTuple):
    """Rotary cos/sin tables by position, for each of `_distinct_settings`: looked up, so that
    not every layer and head computes them again.

    Attributes:
      cos, sin: ``[kind, position, pair]``, times the attention scaling.
    """

    cos: Float[Array, "kind place pair"]
    sin: Float[Array, "kind place pair"]

    def gather(self, positions: Int[Array, "token"]) -> "RotaryCache":
        """Rows of the tables at the positions of tokens."""
        return RotaryCache(*(jnp.take(x, positions, axis=1, mode="clip") for x in self))


Positions = Int[Array, "token"] | RotaryCache
"""Position of each token in its own sequence, from 0, or its rows of the cos/sin tables."""


def rotary_tables(num_positions: int, config: ModelConfig) -> RotaryCache:
    """Rotary cos/sin tables of positions 0 to ``places - 1``."""
    positions, width = jnp.arange(num_positions), _rotary_dim(config)
    tables = [
        cosines_and_sines(positions, *_frequencies_and_scaling(kind, width))
        for kind in _distinct_settings(config)
    ]
    cos, sin = zip(*tables, strict=True)
    return RotaryCache(jnp.stack(cos), jnp.stack(sin))


def apply_rotary(
    x: Heads, positions: Positions, config: ModelConfig, layer_index: int | Int[Array, ""]
) -> Heads:
    """Queries or keys with the rotary positions of a layer.

    Args:
      layer_index: index of the layer; an array in a pipeline stage.
    """
    width = x.shape[-1] if config.rotary_dim is None else config.rotary_dim
    if width == x.shape[-1]:
        return _rotate(x, positions, config, layer_index)
    first = _rotate(x[..., :width], positions, config, layer_index)
    return jnp.concatenate([first, x[..., width:]], axis=-1)


def rotary_settings_of_layer(config: ModelConfig, layer_index: int) -> RotarySettings | None:
    """Rotary settings of a layer; None for one without rotary positions (NoPE)."""
    if layer_index in config.nope_layers:
        return None
    has_window = (
        config.sliding_window is not None and layer_index not in config.full_attention_layers
    )
    if has_window and config.window_rope_base is not None:
        return RotarySettings(config.window_rope_base, None)
    return RotarySettings(config.rope_base, config.rope_scaling)


def _settings_by_layer(config: ModelConfig) -> list[RotarySettings | None]:
    return [rotary_settings_of_layer(config, layer) for layer in range(config.num_layers)]


def _distinct_settings(config: ModelConfig) -> list[RotarySettings | None]:
    """Distinct rotary settings of the layers, in the order of their first occurrence."""
    return list(dict.fromkeys(_settings_by_layer(config)))


def _rotary_dim(config: ModelConfig) -> int:
    """Number of elements of a head that are rotated."""
    if config.mla is not None:
        return config.mla.qk_rope_head_dim
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


def _frequencies_and_scaling(kind: RotarySettings | None, width: int) -> tuple[Array, float]:
    """Frequencies and attention scaling; frequencies of 0 for a layer without rotary positions."""
    if kind is None:
        return jnp.zeros(width // 2), 1.0
    scaling = 1.0 if kind.scaling is None else float(kind.scaling.attention_scaling)
    return pair_frequencies(width, *kind), scaling


def _rotate(
    x: Heads, positions: Positions, config: ModelConfig, layer_index: int | Int[Array, ""]
) -> Heads:
    by_layer, kinds = _settings_by_layer(config), _distinct_settings(config)
    is_static = len(kinds) == 1 or isinstance(layer_index, int)
    settings = by_layer[layer_index if isinstance(layer_index, int) else 0]
    if is_static and settings is None:
        return x
    kind_of_layer = [kinds.index(each) for each in by_layer]
    kind = (
        kinds.index(settings) if is_static else jnp.asarray(kind_of_layer, jnp.int32)[layer_index]
    )
    if isinstance(positions, RotaryCache):
        cos, sin = (table[kind] for table in positions)
    elif is_static:
        frequencies = _frequencies_and_scaling(settings, x.shape[-1])
        cos, sin = cosines_and_sines(positions, *frequencies)
    else:
        frequencies, scalings = zip(
            *(_frequencies_and_scaling(each, x.shape[-1]) for each in kinds), strict=True
        )
        scalings = jnp.asarray(scalings, jnp.float32)
        cos, sin = cosines_and_sines(positions, jnp.stack(frequencies)[kind], scalings[kind])
    return rotate_by_tables(x, cos, sin, config.rope_interleaved)
