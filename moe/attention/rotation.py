"""How the queries and keys of a layer are rotated, where layers differ in it."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe.attention.rotary import RopeScaling, pair_frequencies, rope, turn
from moe.config import ModelConfig

Heads = Float[Array, "token heads width"]


class Wavelengths(NamedTuple):
    """Those of a layer that rotates; see `moe.attention.rotary.rope`."""

    base: float
    scaling: RopeScaling | None

    @property
    def amplitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.amplitude


def rotated(
    x: Heads, positions: Int[Array, "token"], config: ModelConfig, number: int | Int[Array, ""]
) -> Heads:
    """Queries or keys of a layer as the network rotates them.

    Args:
      positions: place of each token in its own sequence, from 0.
      number: of the layer, which a stage of a pipeline knows at run time only.
    """
    width = x.shape[-1] if config.rotary_dim is None else config.rotary_dim
    if width == x.shape[-1]:
        return _turned(x, positions, config, number)
    first = _turned(x[..., :width], positions, config, number)
    return jnp.concatenate([first, x[..., width:]], axis=-1)


def wavelengths_of_layer(config: ModelConfig, number: int) -> Wavelengths | None:
    """None for a layer that does not rotate."""
    if number in config.nope_layers:
        return None
    has_window = config.sliding_window is not None and number not in config.full_attention_layers
    if has_window and config.window_rope_base is not None:
        return Wavelengths(config.window_rope_base, None)
    return Wavelengths(config.rope_base, config.rope_scaling)


def _turned(
    x: Heads, positions: Int[Array, "token"], config: ModelConfig, number: int | Int[Array, ""]
) -> Heads:
    by_layer = [wavelengths_of_layer(config, layer) for layer in range(config.num_layers)]
    kinds = list(dict.fromkeys(by_layer))
    if len(kinds) == 1 or isinstance(number, int):
        own = kinds[0] if len(kinds) == 1 else by_layer[int(number)]
        if own is None:
            return x
        return rope(x, positions, own.base, own.scaling, config.rope_interleaved)
    # A layer that does not rotate turns by no angle.
    width, still = x.shape[-1], Wavelengths(1.0, None)
    frequencies = jnp.stack(
        [
            jnp.zeros(width // 2) if kind is None else pair_frequencies(width, *kind)
            for kind in kinds
        ]
    )
    amplitudes = jnp.asarray([(kind or still).amplitude for kind in kinds], jnp.float32)
    own = jnp.asarray([kinds.index(kind) for kind in by_layer], jnp.int32)[number]
    return turn(x, positions, frequencies[own], amplitudes[own], config.rope_interleaved)
