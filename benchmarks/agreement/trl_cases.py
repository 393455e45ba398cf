"""What TRL computes, by the loss of `trl.GRPOTrainer`, given log-probabilities and no model."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import torch
from trl.trainer.utils import nanstd

import jrl
from benchmarks.agreement.batch import EXACT, PARTLY_FLOAT32, Batch, Comparison
from jrl.conformance.adapters import of_trl as adapter

SETTINGS = jrl.conventions(like="trl")
LONGEST = 100


def trainer_loss(
    batch: Batch,
    loss_type: str,
    *,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    max_divergence: float | None = None,
    top_entropy: float = 1.0,
    importance_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """`GRPOTrainer._compute_loss` of a batch whose log-probabilities are known."""
    return adapter.trainer_loss(
        loss_type,
        logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.row_advantages,
        mask=batch.mask,
        entropy=batch.entropy,
        ref_logprobs=batch.ref_logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        importance_weights=importance_weights,
        longest=LONGEST,
        arguments={"delta": delta},
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        off_policy_mask_threshold=max_divergence,
        top_entropy_quantile=top_entropy,
    )


def comparisons() -> Iterator[Comparison]:
    yield from _advantages()
    yield from _losses()


def _advantages() -> Iterator[Comparison]:
    # The trainer has these lines in the middle of a method that samples, so they stand here again,
    # with its own standard deviation.
    def theirs(b: Batch, scale: str | None) -> torch.Tensor:
        by_group = b.scores.view(-1, 3)
        centred = b.scores - by_group.mean(1).repeat_interleave(3)
        if scale is None:
            return centred
        std = nanstd(by_group, dim=1).repeat_interleave(3) if scale == "group" else nanstd(b.scores)
        return centred / (std + 1e-4)

    for scale in ("group", "batch", None):
        settings = {**SETTINGS["grpo_advantages"], "scale": scale}
        yield Comparison(
            "grpo_advantages",
            f"scale_rewards={scale or 'none'}",
            lambda b, s=settings: jrl.grpo_advantages(b.scores, b.groups, **s),
            lambda b, s=scale: theirs(b, s),
            # TRL's groups are three rows each by position, so none of them can be alone.
            degenerate=False,
            tolerance=PARTLY_FLOAT32 if scale == "batch" else EXACT,
        )


def _losses() -> Iterator[Comparison]:
    def loss(
        function: str,
        loss_type: str,
        ours: Callable[[Batch], tuple[Any, Any]],
        *,
        weighted: bool = False,
        label: str = "",
        tolerance: float = EXACT,
        **settings: Any,
    ) -> Comparison:
        def theirs(b: Batch) -> torch.Tensor:
            # 1 under the mask, as TRL has it: VESPO sums logarithms over whole rows.
            weights = {"importance_weights": b.importance_weights**b.mask} if weighted else {}
            return trainer_loss(b, loss_type, **settings, **weights)

        label = ", ".join(filter(None, [loss_type, label, "importance_sampling_ratio" * weighted]))
        return Comparison(
            function, label, lambda b: ours(b)[0], theirs, by="logprobs", tolerance=tolerance
        )

    def arrays(b: Batch) -> tuple[Any, Any, Any, Any]:
        return b.logprobs, b.old_logprobs, b.row_advantages[:, None], b.mask

    ppo = {**SETTINGS["ppo_loss"], "clip_high": 0.3}
    modes = {
        "grpo": {"aggregation": "seq-mean-token-mean"},
        "bnpo": {"aggregation": "token-mean"},
        "dapo": {"aggregation": "token-mean"},
        "dr_grpo": {"aggregation": "seq-mean-token-sum-norm", "max_length": LONGEST},
        "luspo": {"aggregation": "seq-mean-token-sum"},
    }
    for loss_type, mode in modes.items():
        yield loss(
            "ppo_loss",
            loss_type,
            lambda b, m=mode: jrl.ppo_loss(*arrays(b), **{**ppo, **m}),
            high=0.3,
        )
    yield loss(
        "ppo_loss",
        "dapo",
        lambda b: jrl.ppo_loss(*arrays(b), **ppo, guard=1.5),
        high=0.3,
        delta=1.5,
        label="delta",
    )
    yield loss(
        "ppo_loss",
        "dapo",
        lambda b: jrl.ppo_loss(*arrays(b), **ppo, importance_weights=b.importance_weights),
        high=0.3,
        weighted=True,
    )

    def with_kl(b: Batch) -> tuple[Any, Any]:
        policy, _ = jrl.ppo_loss(*arrays(b), **ppo)
        kl = jrl.kl_estimate(b.logprobs, b.ref_logprobs, b.mask, **SETTINGS["kl_estimate"])
        return policy + 0.3 * jrl.aggregate(kl, b.mask, mode="token-mean"), None

    yield loss("ppo_loss, kl_estimate", "dapo", with_kl, high=0.3, beta=0.3, label="beta")

    def of_high_entropy(b: Batch) -> tuple[Any, Any]:
        chosen = jrl.top_entropy_mask(b.entropy, b.mask, fraction=0.3)
        return jrl.ppo_loss(*arrays(b)[:3], chosen, **ppo, num_tokens=b.mask.sum())

    yield loss(
        "top_entropy_mask",
        "dapo",
        of_high_entropy,
        high=0.3,
        top_entropy=0.3,
        label="top_entropy_quantile",
    )

    def near_policy(b: Batch) -> tuple[Any, Any]:
        kept = jrl.off_policy_sequence_mask(
            b.logprobs, b.behaviour_logprobs, b.row_advantages[:, None], b.mask, max_divergence=0.0
        )
        return jrl.ppo_loss(*arrays(b)[:3], kept, **ppo, num_tokens=b.mask.sum())

    yield loss(
        "off_policy_sequence_mask",
        "dapo",
        near_policy,
        high=0.3,
        max_divergence=0.0,
        label="off_policy_mask_threshold",
    )
    # TRL's ratio of a sequence keeps the gradient of the whole mean.
    for loss_type, function in (("grpo", jrl.gspo_loss), ("luspo", jrl.luspo_loss)):
        bounds = {"clip_low": 0.05, "clip_high": 0.1}
        for delta in (None, 1.15):
            settings: dict[str, Any] = {**SETTINGS[function.__name__], **bounds, "clip_dual": delta}
            yield loss(
                function.__name__,
                loss_type,
                lambda b, f=function, s=settings: f(*arrays(b), **s),
                level="sequence",
                low=0.05,
                high=0.1,
                delta=delta,
                label="sequence level" + ", delta" * (delta is not None),
            )
    # The cap itself there, and its distance from one here.
    for level, cap in (("token", 1.5), ("sequence", 1.1)):
        cispo: dict[str, Any] = {**SETTINGS["cispo_loss"], "clip_high": cap - 1, "level": level}
        yield loss(
            "cispo_loss",
            "cispo",
            lambda b, s=cispo: jrl.cispo_loss(*arrays(b), **s),
            level=level,
            high=cap,
            label="sequence level" * (level == "sequence"),
        )
        sapo: dict[str, Any] = {**SETTINGS["sapo_loss"], "level": level}
        yield loss(
            "sapo_loss",
            "sapo",
            lambda b, s=sapo: jrl.sapo_loss(*arrays(b), **s),
            level=level,
            label="sequence level" * (level == "sequence"),
            tolerance=PARTLY_FLOAT32,
        )
    vespo = SETTINGS["vespo_loss"]
    yield loss("vespo_loss", "vespo", lambda b: jrl.vespo_loss(*arrays(b), **vespo))
    # TRL puts the weights into the sequence's ratio: it becomes trainer over sampler.
    yield loss(
        "vespo_loss",
        "vespo",
        lambda b: jrl.vespo_loss(
            b.logprobs, b.old_logprobs - jnp.log(b.importance_weights), *arrays(b)[2:]
        ),
        weighted=True,
    )
