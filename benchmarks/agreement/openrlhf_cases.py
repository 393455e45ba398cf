"""What OpenRLHF computes, by the modules of `openrlhf.models.loss`."""

from collections.abc import Callable, Iterator
from typing import Any

import jrl
from benchmarks.agreement.batch import (
    COUNT_PLUS_EPSILON,
    EXACT,
    PARTLY_FLOAT32,
    Batch,
    Comparison,
)
from jrl.conformance.adapters.of_openrlhf import PolicyLoss, ValueLoss, compute_approx_kl

SETTINGS = jrl.conventions(like="openrlhf")


def _arrays(b: Batch) -> tuple[Any, Any, Any, Any]:
    return b.logprobs, b.old_logprobs, b.advantages, b.mask


def comparisons() -> Iterator[Comparison]:
    yield from _policy_losses()
    yield from _corrected_losses()
    for clip in (None, 0.5):
        settings, module = {**SETTINGS["value_loss"], "clip": clip}, ValueLoss(clip_eps=clip)
        yield Comparison(
            "value_loss",
            f"ValueLoss, clip_eps={clip}",
            lambda b, settings=settings: jrl.value_loss(
                b.values, b.old_values, b.returns, b.mask, **settings
            )[0],
            lambda b, module=module: module(b.values, b.old_values, b.returns, b.mask),
            by="values",
        )
    for kind in ("k1", "k2", "k3"):
        settings = {**SETTINGS["kl_estimate"], "kind": kind}
        yield Comparison(
            "kl_estimate",
            f"compute_approx_kl, {kind}",
            lambda b, settings=settings: jrl.kl_estimate(b.logprobs, b.ref_logprobs, **settings),
            lambda b, kind=kind: compute_approx_kl(b.logprobs, b.ref_logprobs, kl_estimator=kind),
            by="logprobs",
            tolerance=PARTLY_FLOAT32,
        )


def _case(
    function: str,
    ours: Callable[[Batch], tuple[Any, Any]],
    label: str,
    *,
    tolerance: float = EXACT,
    **settings: Any,
) -> Comparison:
    module = PolicyLoss(clip_eps_low=0.15, clip_eps_high=0.3, **settings)
    return Comparison(
        function,
        f"PolicyLoss, {label}",
        lambda b: ours(b)[0],
        lambda b: module(*_arrays(b), b.behaviour_logprobs)[0],
        by="logprobs",
        tolerance=tolerance,
    )


BOUNDS: dict[str, Any] = {"clip_low": 0.15, "clip_high": 0.3}
PPO = {**SETTINGS["ppo_loss"], **BOUNDS}


def _policy_losses() -> Iterator[Comparison]:
    def ppo(**settings: Any) -> Callable[[Batch], tuple[Any, Any]]:
        return lambda b: jrl.ppo_loss(*_arrays(b), **{**PPO, **settings})

    yield _case("ppo_loss", ppo(), "token level")
    yield _case(
        "ppo_loss",
        ppo(aggregation="seq-mean-token-mean"),
        "sample level",
        tolerance=COUNT_PLUS_EPSILON,
        token_level_loss=False,
    )
    yield _case("ppo_loss", ppo(clip_dual=2.0), "dual_clip", dual_clip=2.0)
    for dual in (None, 1.2):
        gspo = {**SETTINGS["gspo_loss"], **BOUNDS, "clip_dual": dual}
        yield _case(
            "gspo_loss",
            lambda b, s=gspo: jrl.gspo_loss(*_arrays(b), **s),
            "gspo" + ", dual_clip" * (dual is not None),
            tolerance=COUNT_PLUS_EPSILON,
            policy_loss_type="gspo",
            dual_clip=dual,
        )


def _corrected_losses() -> Iterator[Comparison]:
    """PPO with weights of the old policy over the sampler, which are not clamped there."""

    def corrected(weights: Callable[[Batch], Any]) -> Callable[[Batch], tuple[Any, Any]]:
        return lambda b: jrl.ppo_loss(*_arrays(b), **PPO, importance_weights=weights(b))

    for mode, bounded in (("clip", jrl.truncated_weights), ("mask", jrl.icepop_weights)):

        def of_tokens(b: Batch, bounded: Callable[..., Any] = bounded) -> Any:
            policies = b.old_logprobs, b.behaviour_logprobs
            weights = jrl.mismatch_weights(*policies, b.mask, max_log_weight=None)
            return bounded(weights, b.mask, low=0.7, high=1.5)

        yield _case(
            f"{bounded.__name__}, ppo_loss",
            corrected(of_tokens),
            f"is_correction token, {mode}",
            is_correction_level="token",
            is_correction_mode=mode,
            is_correction_threshold=[0.7, 1.5],
        )

    def of_sequences(b: Batch) -> Any:
        bounds = {"low": 0.95, "high": 1.05}
        policies = b.old_logprobs, b.behaviour_logprobs
        return jrl.sequence_masked_weights(*policies, b.mask, **bounds, max_log_weight=None)

    yield _case(
        "sequence_masked_weights, ppo_loss",
        corrected(of_sequences),
        "is_correction seq, mask",
        is_correction_level="seq",
        is_correction_threshold=[0.95, 1.05],
    )
