"""LoRA settings: target modules, rank and scale."""

from dataclasses import dataclass

TARGETS = ("attention", "experts", "dense", "shared", "head")
"""Products that may have adapters: those of attention; of routed experts, an adapter for each; of
dense layers; of the shared expert; of a head that is not the embedding."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation: a product ``x W`` becomes ``x W + s (x A) B``; only A and B are trained.

    Args:
      rank: of ``A B``.
      alpha: ``s = alpha / rank``.
      targets: some of `TARGETS`.
      rank_stabilised: ``s = alpha / sqrt(rank)``, so that steps keep their size at higher ranks.

    References:
      Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
      https://arxiv.org/abs/2106.09685
      Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
      https://arxiv.org/abs/2312.03732
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rank_stabilised: bool = False

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(
                f"lora_rank={self.rank} must be at least 1; leave it out to train without adapters."
            )
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora_alpha={self.alpha} must be above 0; 2 x rank is usual.")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora_targets={','.join(self.targets)!r} must be one or more of "
                f"{','.join(TARGETS)}, each once."
            )

    @property
    def scale(self) -> float:
        """``s``."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)
