"""What the network is: sizes, and the few choices that make another architecture."""

from dataclasses import dataclass, field, replace
from typing import Literal

from moe.execution import Execution

Head = Literal["tied", "untied", "value"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer whose feed-forward layers are mixtures of experts.

    Args:
      vocab_size: number of token ids.
      num_layers: number of blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; a divisor of `num_heads` (grouped-query attention).
      head_dim: width of a head, even.
      num_experts: experts of a layer; 0 makes every feed-forward layer dense.
      experts_per_token: experts that each token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer (`num_experts=0`), or of the shared expert that every
        token passes beside its routed ones; 0 is no shared expert.
      head: "tied" (logits from the embedding), "untied" (their own matrix) or "value" (one number
        per
        position: the critic).
      rope_base: base of the rotary wavelengths.
      norm_epsilon: added to the mean square in RMSNorm.
      load_balance_coef: weight of the load-balancing loss in the training loss.
      router_z_coef: weight of the router z-loss in the training loss.
      dtype: of activations and of weights where they are used; "float32" or "bfloat16". Stored
        weights, router, norms, softmax and logits are float32.
      execution: how it is computed; no value depends on it.
    """

    vocab_size: int
    num_layers: int = 3
    d_model: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 24
    num_experts: int = 8
    experts_per_token: int = 2
    d_expert: int = 56
    d_ff: int = 0
    head: Head = "untied"
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    load_balance_coef: float = 0.01
    router_z_coef: float = 0.001
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
        if self.head_dim % 2:
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

    def as_critic(self) -> "ModelConfig":
        """The same network with a value head."""
        return replace(self, head="value")


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
