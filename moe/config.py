"""Model configuration: sizes, options of an architecture, FLOPs of training; a model on a mesh."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from moe.architecture.attention import (
    GatedDeltaNet,
    MultiHeadLatentAttention,
    check_attention,
    check_delta,
    delta_layers,
)
from moe.architecture.feed_forward import Activation, check_first_layers, check_routing
from moe.architecture.lora import Lora
from moe.architecture.rope import RopeScaling
from moe.execution import Execution
from sharding.folding import FoldedMesh

Head = Literal["tied", "untied", "value"]


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a decoder-only MoE transformer.

    Args:
      vocab_size: number of token ids.
      unused_ids: ids that no token has (a padded vocabulary), as ranges from the first to one past
        the last: ``((151669, 151936),)``. Their logits are masked: they are never sampled, and no
        softmax counts them.
      num_layers: number of blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; a divisor of `num_heads` (grouped-query attention).
      head_dim: width of a head, even, for example 128; under `mla` the width of queries and keys
        (``qk_head_dim``).
      mla: makes attention multi-head latent attention; None is grouped-query attention.
      delta: replaces attention by Gated DeltaNet, linear attention, in some layers; None is
        attention in all.
      attention_gate: the output of each attention head is multiplied by the sigmoid of a gate that
        is projected with its query.
      qkv_bias: queries, keys and values have biases.
      attention_out_bias: the output projection of attention has a bias.
      attention_sinks: each head has a trained score in the denominator of every softmax, and no
        value.
      attention_scale: factor on the scores of attention; None is ``head_dim**-0.5``.
      norm_placement: position of the RMSNorms of attention and of the feed-forward layer: "before"
        them (pre-norm), "after" them, on the term added to the residual stream (OLMo 2), or "both"
        (Gemma 3).
      query_key_norm: RMSNorm of queries and keys before rotation: of each "head", of the whole
        "projection" (over all heads), or None.
      num_experts: experts of a layer; 0 makes every feed-forward layer dense.
      experts_per_token: experts that each token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer (`num_experts=0`), or of the shared expert that every
        token uses in addition to its routed ones; 0 is no shared expert.
      activation: activation of experts and dense layers: "silu" (SwiGLU), "gelu_tanh" (GEGLU, the
        tanh form of GELU) or a `moe.architecture.feed_forward.ClampedSwiGLU`.
      expert_bias: both products of a routed expert have biases.
      router_bias: the logits of the router have a trained bias.
      shared_expert_gate: the shared expert's output is multiplied by the sigmoid of a trained
        projection of the token.
      num_dense_layers: number of leading blocks, of the `num_layers`, with a dense layer instead of
        experts.
      dense_d_ff: hidden width of those dense layers.
      embedding_scale: factor on embeddings where the residual stream starts; None is
        ``sqrt(d_model)``.
      head: "tied" (logits from the embedding), "untied" (their own matrix) or "value" (one number
        per position: the critic).
      rope_base: base of the rotary position embedding (RoPE theta).
      rope_scaling: scaling of the rotary frequencies for a longer context; None is none.
      rope_interleaved: rotary pairs are neighbours, not halves apart.
      rotary_dim: elements of a head that are rotated, the first ones, an even number; None is all.
      window_rope_base: rotary base in layers with a sliding window, without scaling; None is
        `rope_base` and `rope_scaling` in all layers.
      nope_layers: indices of the layers whose queries and keys are not rotated (NoPE).
      sliding_window: positions that a token may look back, itself included; None is no limit.
      full_attention_layers: indices of the layers that have no sliding window.
      max_positions: the longest sequence that the network was trained for, if known. It limits
        generation by default and changes no value.
      norm_epsilon: added to the mean square in RMSNorm.
      load_balance_coef: coefficient, in the training loss, of the load-balancing loss of each
        sequence.
      router_z_coef: coefficient of the router z-loss in the training loss.
      batch_balance_coef: coefficient of the load-balancing loss of each micro-batch on each
        sequence-parallel group.
      global_balance_coef: coefficient of the load-balancing loss of each micro-batch over all
        devices.
      router_scores: score function of the router: "softmax" over the experts, or "sigmoid" of each
        logit (DeepSeek-V3).
      softmax_after_topk: the gate weights are a softmax over the selected logits alone.
      renormalise: the gate weights of a token's experts are divided by their sum.
      routed_scaling: factor on the gate weights, after `renormalise`.
      num_expert_groups: equal groups of neighbouring experts; 1 is no grouping.
      expert_groups_per_token: number of groups from which a token's experts are selected: those
        with the largest sums of their best `experts_per_token / expert_groups_per_token` scores.
      selection_bias: each expert has a bias that is added to its score for the selection and not
        for the gate weight. It is updated by the expert's load alone
        (`moe.router.balance.updated_bias`): auxiliary-loss-free load balancing.
      bias_update_rate: step size of a selection bias in one optimizer step.
      capacity_factor: experts take at most ``ceil(capacity_factor tokens k / num_experts)`` tokens
        of `drop_scope` in training and scoring; None drops nothing. Generation never drops, so
        reinforcement learning rejects a capacity that drops
        (`moe.architecture.feed_forward.can_drop`).
      drop_policy: expert ids that are kept when an expert is full: those with the largest gate
        weights ("probs") or of the earliest tokens ("position"), row after row.
      drop_scope: tokens over which the capacity holds: the tokens of one device ("sub_sequence") or
        of all devices with parts of the same sequences ("full_sequence"), for which the result does
        not depend on ``cp`` and ``tp``.
      dtype: dtype of activations and of weights at each use; "float32" or "bfloat16". Router,
        value head, norms, softmax and logits are float32. Weights may have this dtype already
        (`moe.weights.cast`) or be float32, and are then cast at each use. Products of "float32"
        activations have the default precision of the device (TF32 on recent NVIDIA GPUs;
        `jax_default_matmul_precision` sets it), except products of the router and of the value
        head, float32 everywhere.
      execution: implementations and memory settings, with the same values up to rounding; the
        exceptions are in `moe.execution`.
      lora: LoRA adapters, which are trained while all other weights are frozen (of a critic its
        value head is trained too); None trains all weights.
    """

    vocab_size: int
    num_layers: int = 3
    d_model: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    mla: MultiHeadLatentAttention | None = None
    delta: GatedDeltaNet | None = None
    attention_gate: bool = False
    qkv_bias: bool = False
    attention_out_bias: bool = False
    attention_sinks: bool = False
    attention_scale: float | None = None
    norm_placement: Literal["before", "after", "both"] = "before"
    query_key_norm: Literal["head", "projection"] | None = None
    num_experts: int = 8
    experts_per_token: int = 2
    d_expert: int = 56
    d_ff: int = 0
    activation: Activation = "silu"
    expert_bias: bool = False
    router_bias: bool = False
    shared_expert_gate: bool = False
    num_dense_layers: int = 0
    dense_d_ff: int = 0
    embedding_scale: float | None = None
    head: Head = "untied"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    rotary_dim: int | None = None
    window_rope_base: float | None = None
    nope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    max_positions: int | None = None
    norm_epsilon: float = 1e-6
    load_balance_coef: float = 0.01
    router_z_coef: float = 0.001
    batch_balance_coef: float = 0.0
    global_balance_coef: float = 0.0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_topk: bool = False
    renormalise: bool = True
    routed_scaling: float = 1.0
    num_expert_groups: int = 1
    expert_groups_per_token: int = 1
    selection_bias: bool = False
    bias_update_rate: float = 1e-3
    capacity_factor: float | None = None
    drop_policy: Literal["probs", "position"] = "probs"
    drop_scope: Literal["sub_sequence", "full_sequence"] = "sub_sequence"
    dtype: Literal["float32", "bfloat16"] = "float32"
    execution: Execution = field(default_factory=Execution)
    lora: Lora | None = None
    unused_ids: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        positive = ["vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim"]
        if self.num_experts:
            positive.append("d_expert")
        for name in ("num_experts", "d_ff"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative: use 0 for none.")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads="
                f"{self.num_kv_heads}: each key/value head serves the same number of query heads."
            )
        if self.head_dim % 2 and self.mla is None:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: RoPE rotates elements in pairs."
            )
        if self.num_experts == 0 and self.d_ff == 0:
            raise ValueError(
                "num_experts=0 and d_ff=0 leave no feed-forward layer: set one of them."
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be in "
                f"1..num_experts={self.num_experts}."
            )
        ends = [end for span in self.unused_ids for end in span]
        if ends != sorted(set(ends)) or any(not 0 <= end <= self.vocab_size for end in ends):
            raise ValueError(
                f"unused_ids={self.unused_ids} must be ranges in ascending order, apart from each "
                f"other and within vocab_size={self.vocab_size}: use with_unused_ids."
            )
        if self.num_used_ids < 1:
            raise ValueError(f"unused_ids={self.unused_ids} leaves no token: use the tokenizer's.")
        check_choices(self)
        check_routing(self)
        check_attention(self)
        check_delta(self)
        check_first_layers(self)

    @property
    def num_used_ids(self) -> int:
        """Number of ids that a token has."""
        return self.vocab_size - sum(end - first for first, end in self.unused_ids)

    @property
    def num_expert_layers(self) -> int:
        """Number of blocks with experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def v_head_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    def as_critic(self) -> "ModelConfig":
        """The same network with a value head."""
        return replace(self, head="value")

    def with_unused_ids(self, ids: Iterable[int]) -> "ModelConfig":
        """The same network with ids that no token has."""
        ranges = list[tuple[int, int]]()
        for token in sorted(set(ids)):
            begins = ranges.pop()[0] if ranges and ranges[-1][1] == token else token
            ranges.append((begins, token + 1))
        return replace(self, unused_ids=tuple(ranges))

    def without_adapters(self) -> "ModelConfig":
        """The base network, without adapters."""
        return self if self.lora is None else replace(self, lora=None)

    def for_any_routing(self) -> "ModelConfig":
        """The same network with expert buffers for any routing, see `Execution.buffer_factor`."""
        return replace(self, execution=replace(self.execution, buffer_factor=None))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("config", "mesh"):
                raise TypeError("a ModelConfig is not a Model: pass Model(config, mesh) instead.")
            raise AttributeError(f"'ModelConfig' object has no attribute {name!r}")


@dataclass(frozen=True)
class Model:
    """Model on a mesh, without weights: a static argument of the functions that run it.

        model = Model(config, sharding.fold(sharding.Layout(dp=2)))
        logits = next_token_logits(weights, tokens, valid, model)     # inside a shard_map

    Attributes:
      config: sizes and options of the network.
      mesh: the devices that it runs on.
    """

    config: ModelConfig
    mesh: FoldedMesh

    def without_adapters(self) -> "Model":
        """The base network, without adapters, on the same mesh."""
        return replace(self, config=self.config.without_adapters())


def check_choices(config: ModelConfig) -> None:
    """Raises ValueError for a field that is none of the values of its `Literal`."""
    for name, choices in _choices().items():
        value = getattr(config, name)
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {choices}.")


@cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """Values of the fields that are a `Literal`, or one and None."""
    choices = {}
    for name, hint in get_type_hints(ModelConfig).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        values = [None if kind is NoneType else get_args(kind) for kind in kinds]
        if any(get_origin(kind) is Literal for kind in kinds) and () not in values:
            choices[name] = tuple(x for each in values for x in (each or (None,)))
    return choices


def tiny(vocab_size: int) -> ModelConfig:
    """About 0.48 M parameters, 8 experts of which each token takes 2: trains on a laptop."""
    return ModelConfig(vocab_size)


def tiny_dense(vocab_size: int) -> ModelConfig:
    """The width and depth of `tiny`, its layers dense: the router gone, all parameters active."""
    return ModelConfig(vocab_size, num_experts=0, d_ff=448, rope_base=100.0)


def small(vocab_size: int) -> ModelConfig:
    """About 11 M parameters, 16 experts of which each token takes 2, and a shared expert."""
    return ModelConfig(
        vocab_size,
        num_layers=6,
        d_model=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        num_experts=16,
        experts_per_token=2,
        d_expert=128,
        d_ff=128,
    )


PRESETS = {"tiny": tiny, "tiny-dense": tiny_dense, "small": small}
"""Models that `--model` knows by name."""


def preset(name: str, vocab_size: int) -> ModelConfig:
    """A model of `PRESETS`.

    Raises:
      ValueError: for another name.
    """
    if name not in PRESETS:
        raise ValueError(f"model={name!r} is not a preset: one of {', '.join(PRESETS)}.")
    return PRESETS[name](vocab_size)


def training_flops(config: ModelConfig, time: int) -> float:
    """Floating-point operations of one trained token in sequences of `time` tokens.

    ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``: a multiplication and an
    addition for each weight that the token uses, forward and twice backward, and the products of
    queries with keys and of probabilities with values, of which a causal mask leaves half. In a
    layer with a window of w tokens ``w (2 - w / time)`` replaces the last `time`. An attention gate
    has as many weights as the queries. h is `d_model`, q and kv the widths of all query and key
    heads, f the hidden width of all the experts of a token, the shared one included, or of the
    dense layer, V the vocabulary size.

    A layer with Gated DeltaNet has ``6 (h (2 k + 3 v + 2 n) + 3 v d)`` instead of the terms of
    attention: its projections, and for each value head a state that is read, corrected and read
    again, as in the token-by-token rule. k and v are the widths of all its keys and values, n its
    number of value heads, d the width of a key.

    Recomputation, padding and discarded work do not count, nor do norms, the embedding, the router
    (less than a hundredth) and the optimizer: this is the work that the model needs, the numerator
    of model FLOPs utilisation, ``tokens per second x this / peak``.

    Raises:
      ValueError: for multi-head latent attention, which the formula does not describe.

    References:
      Chowdhery et al., "PaLM", 2022, appendix B. https://arxiv.org/abs/2204.02311
      Megatron-Core counts so, and Liu et al., "MoE parallel folding", 2025, report with it.
      https://arxiv.org/abs/2504.14960

    Examples:
      >>> training_flops(ModelConfig(100, num_layers=1, d_model=10, num_heads=1, num_kv_heads=1,
      ...     head_dim=10, num_experts=0, d_ff=20), time=8)
      12480.0
    """
    if config.mla is not None:
        raise ValueError("training_flops does not support latent attention (mla).")
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    delta, num_layers = config.delta, config.num_layers
    if delta is not None:
        num_layers -= len(delta.layers)
    gates = queries if config.attention_gate else 0
    attention = num_layers * config.d_model * (2 * queries + gates + 2 * keys)
    if delta is not None:
        attention += len(delta.layers) * _delta_multiplications(delta, config.d_model)
    width = config.num_dense_layers * config.dense_d_ff
    width += (config.num_layers - config.num_dense_layers) * (
        config.experts_per_token * config.d_expert * (config.num_experts > 0) + config.d_ff
    )
    head_width = 1 if config.head == "value" else config.vocab_size
    weights = attention + 3 * config.d_model * width + config.d_model * head_width
    window, full = config.sliding_window, num_layers
    if window is not None and window < time:
        full = len(set(config.full_attention_layers) - set(delta_layers(config)))
    else:
        window = time
    # Twice the mean number of keys that a query sees, summed over layers.
    seen = full * time + (num_layers - full) * window * (2 - window / time)
    return 6.0 * (weights + queries * seen)


def _delta_multiplications(delta: GatedDeltaNet, d_model: int) -> int:
    """Multiplications of a token in a layer with Gated DeltaNet."""
    keys = delta.num_key_heads * delta.key_head_dim
    values = delta.num_value_heads * delta.value_head_dim
    projected = d_model * (2 * keys + 3 * values + 2 * delta.num_value_heads)
    return projected + 3 * values * delta.key_head_dim
