"""The modules of `openrlhf.models.loss`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from ..frameworks import NotExpressed


def _make_importable() -> None:
    """Puts an empty `openrlhf.models` in place, whose own code needs flash-attn and so a GPU."""
    outcome = importlib.util.find_spec("openrlhf")
    if outcome is None or outcome.submodule_search_locations is None:
        raise ModuleNotFoundError("openrlhf is not installed", name="openrlhf")
    package = ModuleType("openrlhf.models")
    package.__path__ = [f"{outcome.submodule_search_locations[0]}/models"]
    sys.modules["openrlhf.models"] = package


_make_importable()
PolicyLoss = importlib.import_module("openrlhf.models.loss").PolicyLoss
ValueLoss = importlib.import_module("openrlhf.models.loss").ValueLoss
compute_approx_kl = importlib.import_module("openrlhf.models.utils").compute_approx_kl


def _policy_loss(kind: str, usual: str) -> Callable[..., torch.Tensor]:
    def loss(
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        clip_low: Any = 0.2,
        clip_high: Any = 0.2,
        clip_dual: float | None = None,
        aggregation: str | None = usual,
        gradient: str = "sequence",
        num_tokens: int | None = None,
        num_sequences: int | None = None,
    ) -> torch.Tensor:
        if aggregation not in ("token-mean", "seq-mean-token-mean"):
            raise NotExpressed(f"it does not reduce by {aggregation}")
        if kind == "gspo" and gradient != "sequence":
            raise NotExpressed("its ratio has the gradient of the whole mean")
        if isinstance(clip_low, torch.Tensor) or isinstance(clip_high, torch.Tensor):
            raise NotExpressed("clip_eps is one number there")
        module = PolicyLoss(
            clip_eps_low=clip_low,
            clip_eps_high=clip_high,
            dual_clip=clip_dual,
            token_level_loss=aggregation == "token-mean",
            policy_loss_type=kind,
        )
        arrays = logprobs, old_logprobs, advantages, mask.to(logprobs.dtype)
        counts = {"batch_num_tokens": num_tokens, "global_batch_size": num_sequences}
        passed = {name: x for name, x in counts.items() if x is not None}
        return module(*arrays, **passed)[0]

    return loss


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    clip: Any = None,
    aggregation: str | None = "token-mean",
    num_tokens: int | None = None,
) -> torch.Tensor:
    if aggregation != "token-mean" or isinstance(clip, torch.Tensor):
        raise NotExpressed("it is a mean over tokens with one clip")
    passed = {} if num_tokens is None else {"batch_num_tokens": num_tokens}
    arrays = values, old_values, returns, mask.to(values.dtype)
    return ValueLoss(clip_eps=clip)(*arrays, **passed)


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str = "k3"
) -> torch.Tensor:
    if kind not in ("k1", "k2", "k3"):
        raise NotExpressed(f"it has no {kind}")
    return compute_approx_kl(logprobs, reference_logprobs, kl_estimator=kind)


def functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    yield "ppo_loss", "PolicyLoss", _policy_loss("ppo", "token-mean")
    yield "dapo_loss", "PolicyLoss", _policy_loss("ppo", "token-mean")
    yield "gspo_loss", "PolicyLoss, gspo", _policy_loss("gspo", "seq-mean-token-mean")
    yield "value_loss", "ValueLoss", value_loss
    yield "kl_estimate", "compute_approx_kl", kl_estimate
