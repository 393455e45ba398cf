"""LoRA settings: target modules, rank and scale."""

from collections.abc import Collection
from dataclasses import dataclass

TARGETS = ("attention", "experts", "dense", "shared", "head")
"""Products that may have adapters: of attention; of routed experts, an adapter for each; of
dense layers; of the shared expert; of a head that is not the embedding."""
MATRICES = {
    "attention": ("query_down", "query", "key", "value", "down", "up", "out"),
    "experts": ("gate_up", "down"),
    "dense": ("gate_up", "down"),
    "shared": ("gate_up", "down"),
}
"""The weights of a target, which may be targets alone: ``attention.query``."""


def group_targets(weights: Collection[str], available: Collection[str]) -> tuple[str, ...]:
    """Targets of some of a network's `available` weights, which are targets of their own: the name
    of a group if all of its weights are among them."""
    targets: list[str] = []
    for group in TARGETS:
        members = [each for each in available if each.partition(".")[0] == group]
        chosen = [each for each in members if each in weights]
        targets += [group] if chosen == members and members else chosen
    return tuple(targets)


def is_target(target: str) -> bool:
    """True for the name of a target, of `TARGETS` or a single weight."""
    group, _, weight = target.partition(".")
    return target in TARGETS or weight in MATRICES.get(group, ())


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation: a product ``x W`` becomes ``x W + s (x A) B``; only A and B are trained.

    Args:
      rank: rank of ``A B``.
      alpha: ``s = alpha / rank``.
      targets: some of `TARGETS`, or single weights of them, ``TARGET.WEIGHT`` of `MATRICES`.
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
        unknown = [target for target in self.targets if not is_target(target)]
        twice = [
            each for each in self.targets if each.partition(".")[0] in set(self.targets) - {each}
        ]
        if unknown or twice or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora_targets={','.join(self.targets)!r} must be one or more of "
                f"{','.join(TARGETS)}, each once."
            )

    def has_target(self, weight: str) -> bool:
        """True if a weight, by its name as a target of its own, has adapters."""
        return weight in self.targets or weight.partition(".")[0] in self.targets

    @property
    def scale(self) -> float:
        """``s``."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)
