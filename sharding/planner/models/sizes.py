"""Model description of the planner: sizes, parameter counts and floating-point operations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder-only transformer with grouped-query attention and SwiGLU.

    Args:
      num_layers: blocks.
      d_model: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads.
      head_dim: width of a head.
      vocab_size: token ids.
      num_experts: experts of a layer; 0 makes every layer dense.
      experts_per_token: experts that a token is sent to.
      d_expert: hidden width of one expert.
      d_ff: hidden width of the dense layer, or of the shared expert; 0 is none.
      num_dense_layers: the first blocks, which have a dense layer in place of experts.
      dense_d_ff: hidden width of those.
      tied: logits come from the embedding.
      capacity_factor: experts take at most this multiple of what even routing sends them from one
        device; None drops nothing.
    """

    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    d_ff: int = 0
    num_dense_layers: int = 0
    dense_d_ff: int = 0
    tied: bool = False
    capacity_factor: float | None = None

    def __post_init__(self):
        for name in (
            *("num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
            *(("experts_per_token", "d_expert") if self.num_experts else ("d_ff",)),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_expert_layers(self) -> int:
        """Blocks that have experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_parameters(self) -> int:
        """Matrices of one attention layer."""
        return 2 * self.d_model * (self.queries + self.keys)

    @property
    def expert_parameters(self) -> int:
        """Matrices of the routed experts of one layer."""
        return 3 * self.num_experts * self.d_model * self.d_expert

    @property
    def parameters(self) -> int:
        """Numbers in all matrices and norms."""
        norms = 2 * self.num_layers * self.d_model + self.d_model
        embedding_and_head = self.vocab_size * self.d_model * (1 if self.tied else 2)
        num_main_layers = self.num_layers - self.num_dense_layers
        router = self.num_expert_layers * self.d_model * self.num_experts
        return (
            self.num_layers * self.attention_parameters
            + self.num_expert_layers * self.expert_parameters
            + 3
            * self.d_model
            * (num_main_layers * self.d_ff + self.num_dense_layers * self.dense_d_ff)
            + router
            + norms
            + embedding_and_head
        )

    @property
    def layer_width(self) -> int:
        """Hidden units per token in one of the layers after the dense first ones."""
        routed = self.experts_per_token * self.d_expert if self.num_experts else 0
        return routed + self.d_ff

    def training_flops(self, time: int) -> float:
        """Floating-point operations of one trained token in sequences of `time`.

        ``6 (L (h (q + 2 kv) + q h) + sum_layers 3 h f + h V) + 6 L q time``, as
        `moe.counts.flops.training_flops` counts them without windows, and Megatron-Core.
        """
        num_main_layers = self.num_layers - self.num_dense_layers
        width = num_main_layers * self.layer_width + self.num_dense_layers * self.dense_d_ff
        weights = self.num_layers * self.attention_parameters
        weights += 3 * self.d_model * width + self.d_model * self.vocab_size
        return 6.0 * (weights + self.num_layers * self.queries * time)
