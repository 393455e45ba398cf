"""A small mixture decoded on two sides, and on one device, for tests to compare."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moe.cache import Cache, StepTokens, over_columns
from moe.config import Model, ModelConfig
from moe.decoding import decode_step
from moe.disaggregated.placement import Placement
from moe.disaggregated.runner import DecodeLoop, Runner
from moe.disaggregated.split import Split, SplitMesh, fold_split
from moe.disaggregated.weights import SplitWeights, split_weights
from moe.layers.depth import split_layer_groups
from moe.model import prefill
from moe.placement import specs
from moe.weights import Transformer, axis_sizes, shapes, table
from sharding.collectives import vary
from sharding.folding import Layout, fold

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=12,
    experts_per_token=3,
    d_expert=14,
)
MIXED = replace(
    CONFIG,
    num_layers=3,
    num_dense_layers=1,
    dense_d_ff=8,
    d_ff=4,
    shared_expert_gate=True,
    sliding_window=3,
    full_attention_layers=(1,),
)
"""A dense first layer, a shared expert with a gate, and windows in some layers."""
CROWDED = replace(CONFIG, d_ff=4, selection_bias=True)
"""Every token goes to the first experts."""
ROWS, PROMPT, STEPS = 48, 4, 3
ROOM = PROMPT + STEPS


@functools.cache
def host_weights(config: ModelConfig = CONFIG) -> Transformer[np.ndarray]:
    """Random weights of a size at which every part of the network has a say."""
    draw, sizes = np.random.default_rng(0), axis_sizes(config)

    def values(shape, weight):
        fan_in = math.prod(sizes[axis] for axis in weight.fan_in.split())
        return np.asarray(draw.normal(size=shape.shape) / fan_in**0.5, np.float32)

    weights = jax.tree.map(values, shapes(config), table(config))
    if config.selection_bias:
        favoured = np.arange(config.num_experts) < config.experts_per_token
        weights.layers.experts.bias[:] = np.where(favoured, 100.0, 0.0)
    return weights


@functools.cache
def noise(sampled: bool) -> np.ndarray:
    """``[step, row, vocab]`` what is added to logits, of which the largest is the next token: zero
    for the likeliest, Gumbel's for one drawn."""
    shape = STEPS, ROWS, CONFIG.vocab_size
    drawn = np.random.default_rng(5).gumbel(size=shape) if sampled else np.zeros(shape)
    return drawn.astype(np.float32)


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of rows, the lengths of their prompts, and the tokens at which rows end."""
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, CONFIG.vocab_size, (ROWS, ROOM)).astype(np.int32)
    prompts = draw.integers(1, PROMPT + 1, ROWS).astype(np.int32)
    return tokens, prompts, (prompts + draw.integers(1, STEPS + 1, ROWS)).astype(np.int32)


@functools.cache
def one_side(
    config: ModelConfig = CONFIG, sampled: bool | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """On one device: logits ``[step, row, vocab]``, choices ``[step, row, layer, k]`` and choices
    of the prompts ``[row, column, layer, k]``.

    Args:
      sampled: true draws tokens, false takes the argmax (`noise`); None takes the batch's.
    """
    inputs = np.full((), sampled is None), noise(bool(sampled))
    ran = _one_side(config)(host_weights(config), *batch(), *inputs)
    return jax.tree.map(lambda x: np.asarray(x)[0], ran)


@functools.cache
def _one_side(config: ModelConfig):
    mesh = fold(Layout(), jax.devices()[:1])

    model = Model(config, mesh)

    def local(weights, tokens, prompts, ends, known, noise):
        weights = vary(weights, mesh.axes)
        tokens, prompts, ends = vary((tokens, prompts, ends), mesh.except_sequence)
        known, noise = vary((known, noise), mesh.except_sequence)
        ran = prefill(weights, tokens[:, :PROMPT], prompts, model, True)
        cache, layers = vary(with_room(ran.cache), mesh.axes), split_layer_groups(weights, config)
        rows = jnp.arange(tokens.shape[0])

        def step(carried, number):
            cache, token = carried
            place = prompts + number
            token = jnp.where(known, tokens[rows, jnp.minimum(place, ROOM - 1)], token)
            inputs = StepTokens(token, place, place < ends)
            logits, cache, choices = decode_step(layers, weights, cache, inputs, model, True)
            chosen = jnp.argmax(logits + noise[number], axis=-1).astype(token.dtype)
            return vary((cache, chosen), mesh.axes), (logits, choices)

        first = vary(tokens[rows, prompts], mesh.axes)
        _, (logits, choices) = jax.lax.scan(step, (cache, first), jnp.arange(STEPS))
        return logits, choices, ran.choices

    over = P(mesh.axes)
    program = jax.shard_map(
        lambda *given: jax.tree.map(lambda x: vary(x, mesh.axes)[None], local(*given)),
        mesh=mesh.mesh,
        in_specs=(specs(model), *[P()] * 5),
        out_specs=over,
    )
    return jax.jit(program)


def with_room(cache: Cache) -> Cache:
    """The cache of the prompts, with columns for what follows."""

    def longer(buffer, axis):
        padding = [(0, 0)] * buffer.ndim
        padding[axis] = (0, STEPS)
        return jnp.pad(buffer, padding)

    return over_columns(longer, cache)


def split_mesh(text: str) -> SplitMesh:
    split = Split.parse(text)
    return fold_split(split, jax.devices()[: split.num_devices])


def sides(
    mesh: SplitMesh,
    config: ModelConfig = CONFIG,
    placement: Placement | Sequence[Placement] | None = None,
) -> SplitWeights:
    peers = mesh.experts.size(mesh.experts.ep)
    placement = placement or Placement.identity(config.num_experts, peers)
    return split_weights(host_weights(config), config, mesh, placement)


def two_sides(
    runner: Runner,
    weights: SplitWeights,
    micro_batches: int = 1,
    steps: int = STEPS,
    goes_on=lambda token: True,
    told=None,
    sampled: bool | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """As `one_side`; NaN, -1 and None for what this process has no part of.

    Args:
      told: hears, in a process without attention, how many tokens a micro-batch has, and its
        number.
    """
    tokens, prompts, ends = batch()
    following = tokens[np.arange(ROWS), prompts]
    mesh, config = runner.mesh.attention, runner.config
    rows = NamedSharding(mesh.mesh, P(mesh.except_sequence))
    attends = weights.rest is not None

    def put(x):
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    def everywhere(number):
        place = NamedSharding(mesh.mesh, P())
        return jax.make_array_from_callback((), place, lambda _: np.int32(number))

    inputs = (tokens[:, :PROMPT], prompts)
    ran = runner.prefill(weights, *(map(put, inputs) if attends else inputs))
    cache = jax.jit(with_room)(ran.cache) if ran is not None else None
    ranks, each = mesh.layout.dp, ROWS // mesh.layout.dp // micro_batches
    numbers = np.arange(ROWS).reshape(ranks, micro_batches, each).swapaxes(0, 1)
    numbers = numbers.reshape(micro_batches, -1)
    taken, came = [0] * micro_batches, []

    def begin(i):
        own = numbers[i]
        place = prompts[own] + taken[i]
        token = tokens[own, np.minimum(place, ROOM - 1)] if sampled is None else following[own]
        return StepTokens(put(token), put(place), put(place < ends[own]))

    def end(i, *made):
        came.append((taken[i], numbers[i], made))
        if sampled is not None:
            for shard in made[0].addressable_shards:
                mine = numbers[i][shard.index[0]]
                scores = np.asarray(shard.data) + noise(sampled)[taken[i], mine]
                following[mine] = np.argmax(scores, axis=-1)
        taken[i] += 1
        return None if told is None else (everywhere(taken[i]), everywhere(i))

    goes = lambda token: token < steps and goes_on(token)  # noqa: E731
    loop = DecodeLoop(begin, end, goes, told)
    runner.decode(weights, cache, ROWS, micro_batches, loop)
    logits = np.full((steps, ROWS, config.vocab_size), np.nan, np.float32)
    k = config.experts_per_token
    choices = np.full((steps, ROWS, config.num_expert_layers, k), -1)
    for step, own, made in came:
        for full, array in zip((logits, choices), made, strict=True):
            for shard in () if array is None else array.addressable_shards:
                full[step, own[shard.index[0]]] = np.asarray(shard.data)
    result = None
    if ran is not None and ran.choices is not None and ran.choices.is_fully_addressable:
        result = np.asarray(ran.choices)
    return logits, choices, result


def live() -> np.ndarray:
    """``[step, row]`` which rows go on."""
    _, prompts, ends = batch()
    return (prompts + np.arange(STEPS)[:, None]) < ends
