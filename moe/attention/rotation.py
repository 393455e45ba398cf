"""Rotary position embedding per layer, for networks whose layers differ in it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.attention.rotary import (
    RopeScaling,
    cosines_and_sines,
    pair_frequencies,
    rope,
    turn,
    turn_by,
)
from moe.config import ModelConfig

Heads = Float[Array, "token heads width"]


class Wavelengths(NamedTuple):
    """Rotary base and scaling of a layer; see `moe.attention.rotary.rope`."""

    base: float
    scaling: RopeScaling | None

    @property
    def amplitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.amplitude


class Turns(NamedTuple):
    """Rotary cos/sin tables by position, for each of `_kinds`: looked up, so that not every layer
    and head computes them again.

    Attributes:
      cos, sin: ``[kind, position, pair]``, times the amplitude.
    """

    cos: Float[Array, "kind place pair"]
    sin: Float[Array, "kind place pair"]

    def at(self, places: Int[Array, "token"]) -> "Turns":
        """Rows of the tables at the positions of tokens."""
        return Turns(*(jnp.take(x, places, axis=1, mode="clip") for x in self))


Positions = Int[Array, "token"] | Turns
"""Position of each token in its own sequence, from 0, or its rows of the cos/sin tables."""


def turns_of(places: int, config: ModelConfig) -> Turns:
    """Rotary cos/sin tables of positions 0 to ``places - 1``."""
    number, width = jnp.arange(places), _width(config)
    found = [cosines_and_sines(number, *_numbers(kind, width)) for kind in _kinds(config)]
    cos, sin = zip(*found, strict=True)
    return Turns(jnp.stack(cos), jnp.stack(sin))


def rotated(
    x: Heads, positions: Positions, config: ModelConfig, number: int | Int[Array, ""]
) -> Heads:
    """Queries or keys with the rotary positions of a layer.

    Args:
      number: index of the layer, which a pipeline stage knows only at run time.
    """
    width = x.shape[-1] if config.rotary_dim is None else config.rotary_dim
    if width == x.shape[-1]:
        return _turned(x, positions, config, number)
    first = _turned(x[..., :width], positions, config, number)
    return jnp.concatenate([first, x[..., width:]], axis=-1)


def wavelengths_of_layer(config: ModelConfig, number: int) -> Wavelengths | None:
    """Rotary settings of a layer; None for one without rotary positions (NoPE)."""
    if number in config.nope_layers:
        return None
    has_window = config.sliding_window is not None and number not in config.full_attention_layers
    if has_window and config.window_rope_base is not None:
        return Wavelengths(config.window_rope_base, None)
    return Wavelengths(config.rope_base, config.rope_scaling)


def _by_layer(config: ModelConfig) -> list[Wavelengths | None]:
    return [wavelengths_of_layer(config, layer) for layer in range(config.num_layers)]


def _kinds(config: ModelConfig) -> list[Wavelengths | None]:
    """Distinct rotary settings of the layers, in the order of their first occurrence."""
    return list(dict.fromkeys(_by_layer(config)))


def _width(config: ModelConfig) -> int:
    """Number of elements of a head that are rotated."""
    if config.mla is not None:
        return config.mla.qk_rope_head_dim
    return config.head_dim if config.rotary_dim is None else config.rotary_dim


def _numbers(kind: Wavelengths | None, width: int) -> tuple[Array, float]:
    """Frequencies and amplitude; frequencies of 0 for a layer without rotary positions."""
    if kind is None:
        return jnp.zeros(width // 2), 1.0
    return pair_frequencies(width, *kind), kind.amplitude


def _turned(
    x: Heads, positions: Positions, config: ModelConfig, number: int | Int[Array, ""]
) -> Heads:
    by_layer, kinds = _by_layer(config), _kinds(config)
    is_known = len(kinds) == 1 or isinstance(number, int)
    own = by_layer[number if isinstance(number, int) else 0]
    if is_known and own is None:
        return x
    places = [kinds.index(kind) for kind in by_layer]
    place = kinds.index(own) if is_known else jnp.asarray(places, jnp.int32)[number]
    if isinstance(positions, Turns):
        cos, sin = positions
        return turn_by(x, cos[place], sin[place], config.rope_interleaved)
    if is_known:
        assert own is not None
        return rope(x, positions, own.base, own.scaling, config.rope_interleaved)
    numbers = [_numbers(kind, x.shape[-1]) for kind in kinds]
    frequencies = jnp.stack([frequencies for frequencies, _ in numbers])
    amplitudes = jnp.asarray([amplitude for _, amplitude in numbers], jnp.float32)
    return turn(x, positions, frequencies[place], amplitudes[place], config.rope_interleaved)
