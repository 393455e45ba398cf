"""Weights of the network: the table of named axes and initial values, records and initialisation.

A record has one leaf per weight and is generic in the leaf: `Weight`s in the table, arrays,
PartitionSpecs. Each of those is a `jax.tree.map` over the table.

Axes: ``layer vocab d_model head kv_head head_dim d_ff route expert d_expert``; of latent attention
``kv_lora q_lora`` and widths derived from them; of the leading dense layers ``first_layer
dense_d_ff``; of adapters ``lora_rank``. ``route`` and ``expert`` have the same size and different
roles: the router's outputs are replicated on every device while the experts are sharded. ``half``
is 0 for gate and 1 for up: both are in one weight, so that one product computes both, and a split
of the hidden units splits both in the same way.

If some layers have Gated DeltaNet, those with attention are stacked along ``attention_layer`` and
these along ``delta_layer``. Its other axes: ``delta_key_head`` and ``delta_value_head``, sharded
over ``tp``, and the width of the latter, ``delta_value_dim``; ``delta_in``, the projections of a
key head: query, key, the values and the gates of its value heads; ``delta_pair``, their strengths
and then their decays; ``delta_channel``, all queries, then all keys, then all values;
``delta_width``, the tokens that a filter reads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from moe.adapters import select_trained, weights_in, with_adapters, with_base
from moe.architecture.lora import TARGETS
from moe.config import ModelConfig

Leaf = TypeVar("Leaf")
TRUNCATED_DEVIATION = 0.87962566103423978
"""Standard deviation of a standard normal cut at two."""
MAX_FLAT_SAMPLES = 2**22
"""Maximum size of a weight that is sampled as a flat array: a CPU's compiler takes a fifth of the
time for it. A larger weight is sampled in its own shape, so that each device makes its shard."""


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
        experts or a critic value depends (`moe.ops.precision`). They are few: a vector or a narrow
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


def _bias(axes: str, is_present: bool, float32: bool = False) -> Weight | None:
    return Weight(axes, scale=0.0, float32=float32) if is_present else None


@struct.dataclass
class Attention(Generic[Leaf]):
    """Weights of grouped-query attention.

    `norm` normalises the input of attention or, with `norm_placement` "after", its output;
    `out_norm` normalises the output if both have a norm. With an attention gate, `query` projects a
    head's query followed by its gate.
    """

    norm: Leaf
    query: Leaf
    key: Leaf
    value: Leaf
    out: Leaf
    query_bias: Leaf | None = None
    key_bias: Leaf | None = None
    value_bias: Leaf | None = None
    query_norm: Leaf | None = None
    key_norm: Leaf | None = None
    out_bias: Leaf | None = None
    sinks: Leaf | None = None
    """A score of each head that no key has."""
    out_norm: Leaf | None = None


@struct.dataclass
class LatentAttention(Generic[Leaf]):
    """Weights of MLA: `down` projects to the latent vector and the rotary part of the key, `up`
    expands the former to keys and values."""

    norm: Leaf
    query_down: Leaf | None
    query_norm: Leaf | None
    query: Leaf
    down: Leaf
    down_norm: Leaf
    up: Leaf
    out: Leaf
    out_norm: Leaf | None = None


@struct.dataclass
class DeltaNet(Generic[Leaf]):
    """Weights of a Gated DeltaNet layer, with Qwen3-Next's names in parentheses.

    The decay of a value head is ``exp(-exp(log_rate) softplus(x + rate_bias))``.

    Attributes:
      norm: norm before the layer, as in `Attention`.
      inward: projections of a token to queries, keys, values and gates (`in_proj_qkvz`).
      strength_and_decay: projections to the strength (beta) and the x of the decay of each value
        head (`in_proj_ba`).
      filters: filters of the short convolution of queries, keys and values (`conv1d`).
      rate_bias: bias of the decay (`dt_bias`).
      log_rate: log-rate of the decay (`A_log`).
      read_norm: norm of the output of each value head, which its gate then multiplies (`norm`).
      out: output projection (`out_proj`).
      out_norm: norm of the layer's output, as in `Attention`; None if it has none.
    """

    norm: Leaf
    inward: Leaf
    strength_and_decay: Leaf
    filters: Leaf
    rate_bias: Leaf
    log_rate: Leaf
    read_norm: Leaf
    out: Leaf
    out_norm: Leaf | None = None


@struct.dataclass
class Dense(Generic[Leaf]):
    gate_up: Leaf
    down: Leaf


@struct.dataclass
class Experts(Generic[Leaf]):
    router: Leaf
    gate_up: Leaf
    down: Leaf
    bias: Leaf | None = None
    """Added to scores to select experts; moved by the balancing rule alone."""
    router_bias: Leaf | None = None
    gate_up_bias: Leaf | None = None
    down_bias: Leaf | None = None


@struct.dataclass
class Layer(Generic[Leaf]):
    """Weights of a layer; `norm` and `out_norm` belong to the feed-forward layer, as in
    `Attention`. Every layer has `norm`: its leading axis counts the layers of a stack.

    A layer has attention or, in its place, Gated DeltaNet. In a stack with layers of both kinds
    `attention` stacks the layers that have it, and `delta` the others
    (`moe.layers.depth.layer_at`).
    """

    attention: Attention[Leaf] | LatentAttention[Leaf] | DeltaNet[Leaf]
    norm: Leaf
    experts: Experts[Leaf] | None
    dense: Dense[Leaf] | None
    shared_gate: Leaf | None = None
    out_norm: Leaf | None = None
    delta: DeltaNet[Leaf] | None = None


@struct.dataclass
class Transformer(Generic[Leaf]):
    """Weights of the network; `first_layers` are leading dense layers before the `layers` with
    experts, None if all layers have one type."""

    embedding: Leaf
    layers: Layer[Leaf]
    norm: Leaf
    head: Leaf | None
    first_layers: Layer[Leaf] | None = None


def table(config: ModelConfig) -> Transformer[Weight]:
    """Table of every weight of a network. A weight with an adapter is an
    `moe.adapters.Adapted` of three `Weight`s."""
    return with_adapters(_without_adapters(config), config)


def _without_adapters(config: ModelConfig) -> Transformer[Weight]:
    # Each block adds two terms to the residual stream; this keeps its variance level at the start.
    out_scale = 1 / math.sqrt(2 * config.num_layers)
    norms, fan_in = _norms(config, "layer"), "d_model"
    experts = Experts(
        router=Weight("layer d_model route", fan_in, float32=True),
        gate_up=Weight("layer expert d_model half d_expert", fan_in, sampled_along="half"),
        down=Weight("layer expert d_expert d_model", "d_expert", out_scale),
        bias=_bias("layer route", config.selection_bias, float32=True),
        router_bias=_bias("layer route", config.router_bias, float32=True),
        gate_up_bias=_bias("layer expert half d_expert", config.expert_bias),
        down_bias=_bias("layer expert d_model", config.expert_bias),
    )
    dense = Dense(
        gate_up=Weight("layer d_model half d_ff", fan_in, sampled_along="half"),
        down=Weight("layer d_ff d_model", "d_ff", out_scale),
    )
    heads = {
        "tied": None,
        "untied": Weight("d_model vocab", fan_in),
        "value": Weight("d_model", scale=0.0, float32=True),
    }
    attention = _attention(config, out_scale)
    return Transformer(
        # Embeddings start small because a tied head also multiplies by them.
        embedding=Weight("vocab d_model", fan_in),
        layers=Layer(
            attention=attention,
            experts=experts if config.num_experts else None,
            dense=dense if config.d_ff else None,
            shared_gate=Weight("layer d_model", fan_in) if config.shared_expert_gate else None,
            delta=None if config.delta is None else _delta_net(config, out_scale),
            **norms,
        ),
        norm=norm_weight("d_model"),
        head=heads[config.head],
        first_layers=(
            _in_first_layers(Layer(attention, experts=None, dense=dense, **norms))
            if config.num_dense_layers
            else None
        ),
    )


def _norms(config: ModelConfig, layer: str) -> dict[str, Any]:
    """Norms of a term of the residual stream, `norm` and `out_norm`, by `norm_placement`."""
    norm = norm_weight(f"{layer} d_model")
    return {"norm": norm, "out_norm": norm if config.norm_placement == "both" else None}


def _attention(
    config: ModelConfig, out_scale: float
) -> Attention[Weight] | LatentAttention[Weight]:
    layer, fan_in = "layer" if config.delta is None else "attention_layer", "d_model"
    norms = _norms(config, layer)
    if config.mla is not None:
        narrow = "d_model" if config.mla.q_lora_rank is None else "q_lora"
        has_q_lora = config.mla.q_lora_rank is not None
        return LatentAttention(
            query_down=Weight("layer d_model q_lora", fan_in) if has_q_lora else None,
            query_norm=norm_weight("layer q_lora") if has_q_lora else None,
            query=Weight(f"layer {narrow} head head_dim", narrow),
            down=Weight("layer d_model kv_lora_and_rope", fan_in),
            down_norm=norm_weight("layer kv_lora"),
            up=Weight("layer kv_lora head key_and_value", "kv_lora"),
            out=Weight("layer head v_head_dim d_model", "head v_head_dim", out_scale),
            **norms,
        )
    queries, keys = f"{layer} head head_dim", f"{layer} kv_head head_dim"
    axes = {"projection": (queries, keys), "head": (f"{layer} head_dim",) * 2}
    query_norm, key_norm = map(norm_weight, axes[config.query_key_norm or "head"])
    width = "query_and_gate" if config.attention_gate else "head_dim"
    return Attention(
        query=Weight(f"{layer} d_model head {width}", fan_in),
        key=Weight(f"{layer} d_model kv_head head_dim", fan_in),
        value=Weight(f"{layer} d_model kv_head head_dim", fan_in),
        out=Weight(f"{layer} head head_dim d_model", "head head_dim", out_scale),
        query_bias=_bias(queries, config.qkv_bias),
        key_bias=_bias(keys, config.qkv_bias),
        value_bias=_bias(keys, config.qkv_bias),
        query_norm=query_norm if config.query_key_norm else None,
        key_norm=key_norm if config.query_key_norm else None,
        out_bias=_bias(f"{layer} d_model", config.attention_out_bias),
        sinks=_bias(f"{layer} head", config.attention_sinks, float32=True),
        **norms,
    )


def _delta_net(config: ModelConfig, out_scale: float) -> DeltaNet[Weight]:
    """Table of the weights of Gated DeltaNet."""
    fan_in = "d_model"
    return DeltaNet(
        inward=Weight("delta_layer d_model delta_key_head delta_in", fan_in),
        strength_and_decay=Weight("delta_layer d_model delta_key_head delta_pair", fan_in),
        filters=Weight("delta_layer delta_channel delta_width", "delta_width"),
        # A state loses a twentieth per token at the start, more or less as the token says.
        rate_bias=Weight("delta_layer delta_value_head", scale=-3.0, float32=True),
        log_rate=Weight("delta_layer delta_value_head", scale=0.0, float32=True),
        read_norm=norm_weight("delta_layer delta_value_dim"),
        out=Weight(
            "delta_layer delta_value_head delta_value_dim d_model",
            "delta_value_head delta_value_dim",
            out_scale,
        ),
        **_norms(config, "delta_layer"),
    )


def targets_of(config: ModelConfig) -> tuple[str, ...]:
    """Targets of `moe.architecture.lora.TARGETS` that the network has."""
    present = {weight.partition(".")[0] for weight in adaptable_weights(config)}
    return tuple(target for target in TARGETS if target in present)


def adaptable_weights(config: ModelConfig) -> dict[str, list[int]]:
    """The weights that may have adapters, as targets of their own (``attention.query``): which
    leaves of the table without adapters they are."""
    return weights_in(_without_adapters(config), config)


def _in_first_layers(layer: Layer[Weight]) -> Layer[Weight]:
    """The same weights, stacked over the first layers and as wide as their dense layers are."""
    names = {"layer": "first_layer", "d_ff": "dense_d_ff"}

    def rename_axes(axes: str) -> str:
        return " ".join(names.get(axis, axis) for axis in axes.split())

    return jax.tree.map(
        lambda weight: replace(
            weight, axes=rename_axes(weight.axes), fan_in=rename_axes(weight.fan_in)
        ),
        layer,
    )


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of each named axis."""
    mla, latents = config.mla, dict[str, int]()
    if mla is not None:
        latents = {
            "kv_lora": mla.kv_lora_rank,
            "q_lora": mla.q_lora_rank or 0,
            "kv_lora_and_rope": mla.kv_lora_rank + mla.qk_rope_head_dim,
            "key_and_value": config.head_dim - mla.qk_rope_head_dim + mla.v_head_dim,
            "v_head_dim": mla.v_head_dim,
        }
    return {
        "first_layer": config.num_dense_layers,
        "layer": config.num_layers - config.num_dense_layers,
        "vocab": config.vocab_size,
        "d_model": config.d_model,
        "head": config.num_heads,
        "kv_head": config.num_kv_heads,
        "head_dim": config.head_dim,
        "query_and_gate": 2 * config.head_dim,
        "d_ff": config.d_ff,
        "route": config.num_experts,
        "expert": config.num_experts,
        "half": 2,
        "d_expert": config.d_expert,
        "dense_d_ff": config.dense_d_ff,
        "lora_rank": 0 if config.lora is None else config.lora.rank,
        **latents,
        **_delta_sizes(config),
    }


def _delta_sizes(config: ModelConfig) -> dict[str, int]:
    """Sizes of the axes of Gated DeltaNet, and of ``attention_layer``, the layers that keep
    attention; empty without it."""
    delta = config.delta
    if delta is None:
        return {}
    keys, values = delta.num_key_heads, delta.num_value_heads
    return {
        "attention_layer": config.num_layers - len(delta.layers),
        "delta_layer": len(delta.layers),
        "delta_key_head": keys,
        "delta_value_head": values,
        "delta_value_dim": delta.value_head_dim,
        "delta_in": delta.content_dim + delta.values_per_key * delta.value_head_dim,
        "delta_pair": 2 * delta.values_per_key,
        "delta_channel": keys * delta.content_dim,
        "delta_width": delta.conv_width,
    }


def initialise(config: ModelConfig, key: jax.Array) -> Transformer[jax.Array]:
    """Initial weights, float32. They depend on the key alone and not on the mesh; the base weights
    of adapters are equal to the weights of the network without adapters."""
    if config.lora is None:
        return _sample_weights(table(config), axis_sizes(config), key)
    base = initialise(config.without_adapters(), key)
    learned = initialise_trained(config, jax.random.fold_in(key, 0))
    return with_base(base, learned, table(config))


def initialise_trained(config: ModelConfig, key: jax.Array) -> Transformer[jax.Array]:
    """Initial values of the trained weights, float32, with None in place of frozen ones."""
    statement = table(config)
    return _sample_weights(select_trained(statement, statement), axis_sizes(config), key)


def _sample_weights(
    statement: Transformer[Weight], sizes: dict[str, int], key: jax.Array
) -> Transformer[jax.Array]:
    weights, treedef = jax.tree.flatten(statement)
    num_keys = [sizes[w.sampled_along] if w.sampled_along else 1 for w in weights]
    keys = iter(jax.random.split(key, sum(num_keys)))
    return treedef.unflatten(
        _initial(weight, sizes, [*islice(keys, count)])
        for weight, count in zip(weights, num_keys, strict=True)
    )


def _initial(weight: Weight, sizes: dict[str, int], keys: Sequence[jax.Array]) -> jax.Array:
    axes = weight.axes.split()
    if weight.sampled_along is not None:
        rest = " ".join(axis for axis in axes if axis != weight.sampled_along)
        separate = replace(weight, axes=rest, sampled_along=None)
        samples = [_initial(separate, sizes, [key]) for key in keys]
        return jnp.stack(samples, axis=axes.index(weight.sampled_along))
    shape = tuple(sizes[axis] for axis in axes)
    if not weight.fan_in:
        return jnp.full(shape, weight.scale, jnp.float32)
    fan_in = math.prod(sizes[axis] for axis in weight.fan_in.split())
    # The cut takes away part of the variance of the normal that is cut.
    deviation = weight.scale / math.sqrt(fan_in) / TRUNCATED_DEVIATION
    sampled_shape = (math.prod(shape),) if math.prod(shape) <= MAX_FLAT_SAMPLES else shape
    # The bits of an element depend on its flat index only, so both shapes give the same values.
    normal = jax.random.truncated_normal(keys[0], -2, 2, sampled_shape, jnp.float32)
    return deviation * normal.reshape(shape)


def shapes(config: ModelConfig) -> Transformer[jax.ShapeDtypeStruct]:
    """The shape and dtype of each weight as it starts, float32, without making any."""
    return jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))


def cast(weights: Transformer[jax.Array], config: ModelConfig) -> Transformer[jax.Array]:
    """Casts each weight to the dtype that the network computes with: the dtype of `config`, or
    float32 if `Weight.float32` is set. A weight that has its dtype already is returned
    unchanged."""

    def cast_leaf(leaf: jax.Array, weight: Weight) -> jax.Array:
        dtype = jnp.dtype(jnp.float32 if weight.float32 else config.dtype)
        return leaf if leaf.dtype == dtype else leaf.astype(dtype)

    return jax.tree.map(cast_leaf, weights, table(config))


def cast_shapes(config: ModelConfig) -> Transformer[jax.ShapeDtypeStruct]:
    """The shape and dtype of each weight as `cast` gives it, without making any."""
    return jax.eval_shape(lambda weights: cast(weights, config), shapes(config))


def without_layers(weights: Transformer[Any]) -> Transformer[Any]:
    """The weights with None for every one of the layers."""
    absent: Any = jax.tree.map(lambda _: None, weights.layers)
    return replace(weights, layers=absent, first_layers=None)


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters, adapters included."""
    return _count(shapes(config))


def num_trained_parameters(config: ModelConfig) -> int:
    """Number of trained parameters."""
    return _count(select_trained(shapes(config), table(config)))


def _count(weight_shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weight_shapes))


def num_active_parameters(config: ModelConfig) -> int:
    """Number of active parameters per token: all but adapters and the experts that it does not
    use."""
    config = config.without_adapters()
    idle = config.num_experts - config.experts_per_token if config.num_experts else 0
    expert = 3 * config.d_model * config.d_expert
    expert += (2 * config.d_expert + config.d_model) * config.expert_bias
    return num_parameters(config) - config.num_expert_layers * idle * expert
