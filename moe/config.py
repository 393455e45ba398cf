"""What the network is: sizes, and the few choices that make another architecture."""

from dataclasses import dataclass, field, replace
from typing import Literal

from moe.execution import Execution
from moe.rotary import RopeScaling

Head = Literal["tied", "untied", "value"]


@dataclass(frozen=True)
class LatentHeads:
    """Multi-head latent attention: keys and values come from one narrow vector per token.

    Args:
      rank: width of the vector that keys and values are expanded from.
      query_rank: width of the one that queries are expanded from; None makes queries directly.
      rope_dim: elements of a query and of a key that are rotated, even, part of `head_dim`; those
        of the key are the same for all heads.
      value_dim: width of a value head.
    """

    rank: int
    query_rank: int | None
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer whose feed-forward layers are mixtures of experts.

    Args:
      vocab_size: number of token ids.
      num_layers: number of blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; a divisor of `num_heads` (grouped-query attention).
      head_dim: width of a head, even; under `latent` that of queries and keys.
      latent: makes attention multi-head latent attention; None is grouped-query attention.
      qkv_bias: queries, keys and values have biases.
      query_key_norm: RMSNorm of queries and keys before rotation: of each "head", of the whole
        "projection" (all heads together), or None.
      num_experts: experts of a layer; 0 makes every feed-forward layer dense.
      experts_per_token: experts that each token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer (`num_experts=0`), or of the shared expert that every
        token passes beside its routed ones; 0 is no shared expert.
      shared_expert_gate: the shared expert's output is multiplied by the sigmoid of a number that
        each token has for it.
      num_dense_layers: how many of the `num_layers` blocks, the first ones, have a dense layer in
        place of experts.
      d_first: hidden width of those dense layers.
      embedding_scale: factor on embeddings where the stream starts; None is ``sqrt(d_model)``.
      head: "tied" (logits from the embedding), "untied" (their own matrix) or "value" (one number
        per
        position: the critic).
      rope_base: base of the rotary wavelengths.
      rope_scaling: how the wavelengths are stretched for a longer context, None for not at all.
      rope_interleaved: rotary pairs are neighbours, not halves apart.
      sliding_window: positions that a token may look back, itself included. A longer sequence is
        refused, a shorter one never notices; None is no limit.
      norm_epsilon: added to the mean square in RMSNorm.
      load_balance_coef: weight, in the training loss, of the load-balancing loss of each sequence.
      router_z_coef: weight of the router z-loss in the training loss.
      batch_balance_coef: weight of the load-balancing loss of each micro-batch on each
        sequence-parallel group.
      global_balance_coef: weight of the load-balancing loss of each micro-batch over all devices.
      router_scores: what makes scores of logits: "softmax" over the experts, or "sigmoid" of each
        (DeepSeek-V3).
      softmax_after_topk: the weights are a softmax over the chosen logits alone.
      renormalise: the weights of a token's experts are divided by their sum.
      routed_scaling: factor on the weights, after `renormalise`.
      num_expert_groups: equal groups of neighbouring experts; 1 is no grouping.
      expert_groups_per_token: groups that a token's experts may lie in, those with the largest sums
        of their best `experts_per_token / expert_groups_per_token` scores.
      selection_bias: each expert has a bias that is added to its score to select it and never to
        weigh it, moved by how loaded it is (`moe.balance.moved_bias`) and by nothing else.
      bias_update_rate: how far a selection bias moves in one optimiser step.
      capacity_factor: experts take at most ``ceil(capacity_factor tokens k / num_experts)`` tokens
        of `drop_scope` while learning and when scoring; None drops nothing. Generation never drops.
      drop_policy: which choices stay when an expert is full: the largest weights ("probs") or the
        earliest tokens ("position"), row after row.
      drop_scope: the tokens over which the capacity holds: those of one device ("sub_sequence") or
        those of all devices that hold parts of the same sequences ("full_sequence"), for which
        the result does not depend on ``cp`` and ``tp``.
      dtype: of activations and of weights where they are used; "float32" or "bfloat16". Stored
        weights, router, value head, norms, softmax and logits are float32. Products of "float32"
        activations are computed at the precision that the device takes by default (TF32 on recent
        NVIDIA GPUs; `jax_default_matmul_precision` sets it), but for those of the router and of the
        value head, which are float32 everywhere.
      execution: how it is computed; no value depends on it.
    """

    vocab_size: int
    num_layers: int = 3
    d_model: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    latent: LatentHeads | None = None
    qkv_bias: bool = False
    query_key_norm: Literal["head", "projection"] | None = None
    num_experts: int = 8
    experts_per_token: int = 2
    d_expert: int = 56
    d_ff: int = 0
    shared_expert_gate: bool = False
    num_dense_layers: int = 0
    d_first: int = 0
    embedding_scale: float | None = None
    head: Head = "untied"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_interleaved: bool = False
    sliding_window: int | None = None
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
        if self.head_dim % 2 and self.latent is None:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary pairs its halves.")
        if self.num_experts == 0 and self.d_ff == 0:
            raise ValueError(
                "num_experts=0 and d_ff=0 leave no feed-forward layer: set one of them."
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must lie in "
                f"1..num_experts={self.num_experts}."
            )
        _check_routing(self)
        _check_attention(self)
        _check_first_layers(self)

    @property
    def num_expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    def as_critic(self) -> "ModelConfig":
        """The same network with a value head."""
        return replace(self, head="value")


def _check_attention(config: ModelConfig) -> None:
    if config.query_key_norm not in (None, "head", "projection"):
        raise ValueError(
            f'query_key_norm={config.query_key_norm!r} must be "head", "projection" or None.'
        )
    if config.sliding_window is not None and config.sliding_window < 1:
        raise ValueError(
            f"sliding_window={config.sliding_window} must be at least 1; None is no limit."
        )
    latent = config.latent
    if latent is None:
        return
    for name in ("rank", "query_rank", "rope_dim", "value_dim"):
        size = getattr(latent, name)
        if size is not None and size < 1:
            raise ValueError(f"latent.{name}={size} must be at least 1.")
    if latent.rope_dim % 2 or latent.rope_dim >= config.head_dim:
        raise ValueError(
            f"latent.rope_dim={latent.rope_dim} must be even and below head_dim="
            f"{config.head_dim}, of which it is a part."
        )
    if config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"latent attention has as many key/value heads as heads: set num_kv_heads="
            f"{config.num_kv_heads} to num_heads={config.num_heads}."
        )
    if config.qkv_bias or config.query_key_norm is not None:
        raise ValueError("latent attention has no qkv_bias and no query_key_norm: leave them out.")


def _check_first_layers(config: ModelConfig) -> None:
    first = config.num_dense_layers
    if first and not (config.num_experts and 0 < first < config.num_layers and config.d_first > 0):
        raise ValueError(
            f"num_dense_layers={first} needs experts in the layers after it (num_experts="
            f"{config.num_experts}, num_layers={config.num_layers}) and a width, d_first="
            f"{config.d_first}: set 0 where all layers are alike."
        )
    if config.shared_expert_gate and not (config.num_experts and config.d_ff):
        raise ValueError(
            f"shared_expert_gate=True needs a shared expert, not num_experts={config.num_experts} "
            f"and d_ff={config.d_ff}."
        )


def _check_routing(config: ModelConfig) -> None:
    """What the router's fields must be, and be together."""
    for name, choices in (
        ("router_scores", ("softmax", "sigmoid")),
        ("drop_policy", ("probs", "position")),
        ("drop_scope", ("sub_sequence", "full_sequence")),
    ):
        if getattr(config, name) not in choices:
            raise ValueError(f"{name}={getattr(config, name)!r} must be one of {choices}.")
    if config.softmax_after_topk and config.router_scores == "sigmoid":
        raise ValueError(
            'softmax_after_topk=True needs router_scores="softmax": sigmoid scores are their own.'
        )
    if config.softmax_after_topk and not config.renormalise:
        raise ValueError(
            "softmax_after_topk=True with renormalise=False cannot be had: a softmax over the "
            "chosen sums to 1; leave renormalise=True."
        )
    if not config.routed_scaling > 0:
        raise ValueError(f"routed_scaling={config.routed_scaling} must be above 0; 1 is none.")
    if config.capacity_factor is not None and not config.capacity_factor > 0:
        raise ValueError(
            f"capacity_factor={config.capacity_factor} must be above 0; None drops nothing."
        )
    if config.bias_update_rate < 0:
        raise ValueError(
            f"bias_update_rate={config.bias_update_rate} must not be negative; 0 keeps the bias."
        )
    _check_groups(config)


def _check_groups(config: ModelConfig) -> None:
    groups, kept = config.num_expert_groups, config.expert_groups_per_token
    if not 1 <= kept <= groups:
        raise ValueError(
            f"expert_groups_per_token={kept} must lie in 1..num_expert_groups={groups}."
        )
    if groups == 1:
        return
    if config.num_experts % groups:
        raise ValueError(
            f"num_expert_groups={groups} does not divide num_experts={config.num_experts}: "
            "groups are of equal size."
        )
    if config.experts_per_token % kept:
        raise ValueError(
            f"expert_groups_per_token={kept} does not divide experts_per_token="
            f"{config.experts_per_token}: a group is judged by its best "
            "experts_per_token / expert_groups_per_token scores."
        )
    if config.experts_per_token // kept > config.num_experts // groups:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} are more than expert_groups_per_token="
            f"{kept} groups of {config.num_experts // groups} experts hold: keep more groups."
        )


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
