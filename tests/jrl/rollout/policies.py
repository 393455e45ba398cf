"""A small policy with prompts, and its decoding and scoring as plain calls."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jrl.recipes.base.batch import Batch
from jrl.rollout.generate import Decoder, generate, mark_replicated
from jrl.rollout.sampling import Sampling
from jrl.rollout.scoring import PromptLayout, Scores, score
from moe.config import ModelConfig
from moe.placement import specs
from moe.weights import Transformer, axis_sizes, shapes, table
from sharding.folding import Layout, fold

# Without the code generator's optimisations a compilation takes half the time.
FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
PAD, EOS = 0, 2
CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=1,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=4,
    experts_per_token=3,
    d_expert=7,
)
NUM_PROMPTS, PROMPT, COPIES = 4, 6, 3


@functools.cache
def weights(config: ModelConfig = CONFIG) -> Transformer[jax.Array]:
    draw = np.random.default_rng(0)
    sizes = axis_sizes(config)

    def values(shape, weight):
        fan_in = math.prod(sizes[axis] for axis in weight.fan_in.split())
        return jnp.asarray(draw.normal(size=shape.shape) / fan_in**0.5, jnp.float32)

    return jax.tree.map(values, shapes(config), table(config))


def prompts() -> tuple[jax.Array, jax.Array]:
    """Left-padded prompts of 1, 3, 5 and 6 tokens, with rubbish under the padding."""
    tokens = np.random.default_rng(1).integers(3, CONFIG.vocab_size, (NUM_PROMPTS, PROMPT))
    length = np.array([1, 3, 5, 6])
    return jnp.asarray(tokens), jnp.asarray(np.arange(PROMPT)[None] >= PROMPT - length[:, None])


def decoder_of(
    sampling: Sampling,
    layout: str = "dp1",
    *,
    response: int = 7,
    eos: int | tuple[int, ...] = EOS,
    config: ModelConfig = CONFIG,
) -> Decoder:
    parsed = Layout.parse(layout)
    mesh = fold(parsed, jax.devices()[: parsed.num_devices])
    stops = (eos,) if isinstance(eos, int) else eos
    return Decoder(config, mesh, PROMPT, response, COPIES, PAD, stops, sampling)


def compiled(decoder: Decoder):
    given = (weights(decoder.config), *prompts(), jax.random.key(0))
    return generate.lower(decoder, *given).compile(FAST_COMPILE)


@functools.cache
def decode(decoder: Decoder, seed: int = 0) -> Batch[np.ndarray]:
    step = compiled(decoder)
    given = (weights(decoder.config), *prompts(), jax.random.key(seed))
    return jax.tree.map(np.asarray, step(*given))


def scores(decoder: Decoder, weights, tokens, valid) -> Scores:
    """What scoring says, inside the `jax.shard_map`."""
    rows = PromptLayout(PROMPT, COPIES)
    return score(weights, tokens, valid, rows, decoder.config, decoder.sampling, decoder.mesh)


def scored(decoder: Decoder, rollout: Batch[np.ndarray]) -> list[np.ndarray]:
    """Log-probabilities, those in the distribution drawn from, and entropies of the tokens."""
    mesh, config = decoder.mesh, decoder.config

    def local(*given):
        out = scores(decoder, *given)
        return mark_replicated([out.logprobs, out.behaviour_logprobs, out.entropy], mesh)

    rows = P(mesh.dp)
    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh.mesh, in_specs=(specs(config, mesh), rows, rows), out_specs=rows
        ),
        compiler_options=FAST_COMPILE,
    )
    given = jnp.asarray(rollout.tokens), jnp.asarray(rollout.valid)
    return [np.asarray(x) for x in step(weights(config), *given)]
