"""The loss of `trl.GRPOTrainer`, given log-probabilities and no model."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer

from ..frameworks import NotExpressed

USUAL: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


class _Discarded(dict):
    """Metrics that are not read."""

    def __missing__(self, key: str) -> list:
        return []


def trainer_loss(
    loss_type: str,
    *,
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    entropy: torch.Tensor | None = None,
    ref_logprobs: torch.Tensor | None = None,
    behaviour_logprobs: torch.Tensor | None = None,
    importance_weights: torch.Tensor | None = None,
    num_items: Any = None,
    longest: int = 100,
    arguments: dict[str, Any] | None = None,
    **attributes: Any,
) -> torch.Tensor:
    """`GRPOTrainer._compute_loss` of a batch whose log-probabilities are known.

    Args:
      loss_type: of `GRPOConfig`.
      num_items: true tokens of the whole batch, by default of this one.
      longest: `max_completion_length`.
      arguments: of `GRPOConfig` beside its defaults.
      attributes: of the trainer, for example `epsilon_high=0.28`.
    """
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        get_high_entropy_mask=lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        args=SimpleNamespace(**{**USUAL, **(arguments or {})}),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=longest,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        loss_type=loss_type,
        use_vllm=importance_weights is not None,
        vllm_importance_sampling_correction=True,
        _metrics={"train": _Discarded()},
        **{
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "off_policy_mask_threshold": None,
            "top_entropy_quantile": 1.0,
            **attributes,
        },
    )
    prompt = torch.zeros((len(logprobs), 1), dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "sampling_per_token_logps": behaviour_logprobs,
        "importance_sampling_ratio": importance_weights,
        "num_items_in_batch": mask.sum() if num_items is None else num_items,
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def _clipped(types: dict[str, str], usual: str, level: str) -> Callable[..., torch.Tensor]:
    """A clipped loss, whose type is the way to reduce it."""

    def loss(
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        clip_low: Any = 0.2,
        clip_high: Any = 0.2,
        aggregation: str | None = usual,
        gradient: str = "sequence",
        importance_weights: torch.Tensor | None = None,
        max_length: int = 100,
        num_tokens: int | None = None,
    ) -> torch.Tensor:
        if aggregation not in types:
            raise NotExpressed(f"no loss_type reduces by {aggregation}")
        if level == "sequence" and gradient != "sequence":
            raise NotExpressed("its ratio has the gradient of the whole mean")
        if isinstance(clip_low, torch.Tensor) or isinstance(clip_high, torch.Tensor):
            raise NotExpressed("epsilon is one number there")
        passed = None if num_tokens is None else torch.tensor(num_tokens)
        return trainer_loss(
            types[aggregation],
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            mask=mask.to(logprobs.dtype),
            importance_weights=importance_weights,
            num_items=passed,
            longest=max_length,
            epsilon_low=clip_low,
            epsilon_high=clip_high,
            importance_sampling_level=level,
        )

    return loss


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: str = "token",
) -> torch.Tensor:
    temperatures = {"sapo_temperature_pos": tau_positive, "sapo_temperature_neg": tau_negative}
    arrays = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    how = {"arguments": temperatures, "importance_sampling_level": level}
    return trainer_loss("sapo", **arrays, mask=mask.to(logprobs.dtype), **how)


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    level: str = "token",
    num_tokens: int | None = None,
) -> torch.Tensor:
    """Its bound of the ratio is the cap itself, above; it has none below."""
    if clip_low is not None or not isinstance(clip_high, float):
        raise NotExpressed("it bounds the ratio above alone, by one number")
    arrays = {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
    passed = None if num_tokens is None else torch.tensor(num_tokens)
    how = {"epsilon_high": 1 + clip_high, "importance_sampling_level": level, "num_items": passed}
    return trainer_loss("cispo", **arrays, mask=mask.to(logprobs.dtype), **how)


TYPES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    yield "ppo_loss", "loss_type of the reduction", _clipped(TYPES, "token-mean", "token")
    yield "dapo_loss", "dapo", _clipped(TYPES, "token-mean", "token")
    sequences = {"seq-mean-token-mean": "grpo"}
    yield "gspo_loss", "grpo, sequence", _clipped(sequences, "seq-mean-token-mean", "sequence")
    sums = {"seq-mean-token-mean": "luspo"}
    yield "luspo_loss", "luspo, sequence", _clipped(sums, "seq-mean-token-mean", "sequence")
    yield "cispo_loss", "cispo", cispo
    yield "sapo_loss", "sapo", sapo
