"""What verl computes, by the functions of `verl.trainer.ppo`; its advantages are in a file of their
own.

It adds 1e-8 to the counts that it divides by, which float64 shows.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig

import jrl
from benchmarks.agreement import verl_advantages
from benchmarks.agreement.batch import COUNT_PLUS_EPSILON, EXACT, Batch, Comparison

SETTINGS = jrl.conventions(like="verl")


def comparisons() -> Iterator[Comparison]:
    yield from verl_advantages.comparisons()
    yield from _policy_losses()
    yield from _value_and_divergence()
    yield from _importance_weights()
    yield from _rejection()
    yield from _mismatch_statistics()


def _arrays(b: Batch) -> tuple[Any, Any, Any, Any]:
    return b.logprobs, b.old_logprobs, b.advantages, b.mask


def _policy_loss(
    function: str,
    name: str,
    ours: Callable[..., tuple[Any, Any]],
    *,
    mode: str = "token-mean",
    label: str = "",
    tolerance: float = EXACT,
    weighted: bool = False,
    **config: Any,
) -> Comparison:
    settings = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **config)

    def theirs(b: Batch) -> torch.Tensor:
        # The old policy comes first there.
        logprobs, old_logprobs, advantages, mask = _arrays(b)
        weights = {"rollout_is_weights": b.importance_weights} if weighted else {}
        policy_loss = core_algos.get_policy_loss_fn(name)
        return policy_loss(old_logprobs, logprobs, advantages, mask, mode, settings, **weights)[0]

    label = ", ".join(filter(None, [name, mode, label, "rollout_is_weights" * weighted]))
    return Comparison(
        function, label, lambda b: ours(b)[0], theirs, by="logprobs", tolerance=tolerance
    )


def _policy_losses() -> Iterator[Comparison]:
    def ours(loss: Callable[..., tuple[Any, Any]], **settings: Any) -> Callable[[Batch], Any]:
        return lambda b: loss(*_arrays(b), **settings)

    theirs: dict[str, Any] = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.3}
    bounds = {"clip_low": 0.15, "clip_high": 0.3}
    ppo = {**SETTINGS["ppo_loss"], **bounds}
    for mode, tolerance in {
        "token-mean": EXACT,
        "token-sum": EXACT,
        "seq-mean-token-sum": EXACT,
        "seq-mean-token-mean": COUNT_PLUS_EPSILON,
    }.items():
        settings = {**ppo, "aggregation": mode}
        yield _policy_loss(
            "ppo_loss",
            "vanilla",
            ours(jrl.ppo_loss, **settings),
            mode=mode,
            tolerance=tolerance,
            **theirs,
        )
    longest = {"aggregation": "seq-mean-token-sum-norm", "max_length": 100}
    yield _policy_loss(
        "ppo_loss",
        "vanilla",
        ours(jrl.ppo_loss, **{**ppo, **longest}),
        mode="seq-mean-token-sum-norm",
        global_batch_info={"loss_scale_factor": 100},
        **theirs,
    )
    yield _policy_loss(
        "ppo_loss",
        "vanilla",
        lambda b: jrl.ppo_loss(*_arrays(b), **ppo, importance_weights=b.importance_weights),
        weighted=True,
        **theirs,
    )
    yield _policy_loss(
        "gspo_loss",
        "gspo",
        ours(
            jrl.gspo_loss,
            **{**SETTINGS["gspo_loss"], **bounds, "aggregation": "seq-mean-token-mean"},
        ),
        mode="seq-mean-token-mean",
        tolerance=COUNT_PLUS_EPSILON,
        **theirs,
    )
    yield _policy_loss(
        "gspo_loss",
        "gspo",
        ours(jrl.gspo_loss, **{**SETTINGS["gspo_loss"], **bounds}),
        **theirs,
    )
    yield _policy_loss(
        "gmpo_loss",
        "geo_mean",
        ours(jrl.gmpo_loss, **{**SETTINGS["gmpo_loss"], **bounds}),
        tolerance=COUNT_PLUS_EPSILON,
        **theirs,
    )
    sapo, gpg = SETTINGS["sapo_loss"], SETTINGS["gpg_loss"]
    yield _policy_loss(
        "sapo_loss", "sapo", ours(jrl.sapo_loss, **sapo), tolerance=COUNT_PLUS_EPSILON
    )
    yield _policy_loss(
        "gpg_loss", "gpg", lambda b: jrl.gpg_loss(b.logprobs, b.advantages, b.mask, **gpg)
    )
    cispo = {**SETTINGS["cispo_loss"], **bounds}
    yield _policy_loss("cispo_loss", "cispo", ours(jrl.cispo_loss, **cispo), **theirs)
    yield _policy_loss(
        "dro_loss",
        "dro",
        ours(jrl.dro_loss, beta=0.3, **SETTINGS["dro_loss"]),
        policy_loss=PolicyLossConfig(dro_beta=0.3),
    )
    for kind, down, up in (
        ("tv", 0.1, 0.1),
        ("tv", 0.05, 0.2),
        ("kl", 0.05, 0.05),
        ("kl", 0.1, 0.02),
    ):
        dppo = {**SETTINGS["dppo_loss"], "max_divergence": (down, up)}
        yield _policy_loss(
            "dppo_loss",
            f"dppo_{kind}",
            ours(jrl.dppo_loss, kind=kind, **dppo),
            label=f"clip_ratio_low={down}, clip_ratio_high={up}",
            clip_ratio_low=down,
            clip_ratio_high=up,
        )
    yield _policy_loss(
        "kl_cov_loss",
        "kl_cov",
        ours(jrl.kl_cov_loss, **{**SETTINGS["kl_cov_loss"], "fraction": 0.1, "coefficient": 0.8}),
        policy_loss=PolicyLossConfig(kl_cov_ratio=0.1, ppo_kl_coef=0.8),
    )
    # With a share of 1 every token in the range is chosen, whatever is drawn.
    yield _policy_loss(
        "clip_cov_loss",
        "clip_cov",
        ours(
            jrl.clip_cov_loss,
            **{**SETTINGS["clip_cov_loss"], "fraction": 1.0, "low": 0.1, "high": 0.6, **bounds},
        ),
        label="all in the range",
        policy_loss=PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.6),
        **theirs,
    )


def _value_and_divergence() -> Iterator[Comparison]:
    yield Comparison(
        "value_loss",
        "compute_value_loss",
        lambda b: jrl.value_loss(
            b.values, b.old_values, b.returns, b.mask, **SETTINGS["value_loss"]
        )[0],
        lambda b: core_algos.compute_value_loss(b.values, b.returns, b.old_values, b.mask, 0.5)[0],
        by="values",
    )
    for kind in ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"):
        # It clamps k3 alone.
        clamps = SETTINGS["kl_estimate"] if kind.startswith("k3") else {"max_log_ratio": None}
        settings: dict[str, Any] = {**clamps, "kind": kind}
        yield Comparison(
            "kl_estimate",
            f"kl_penalty, {kind}",
            lambda b, settings=settings: jrl.kl_estimate(b.logprobs, b.ref_logprobs, **settings),
            lambda b, kind=kind: core_algos.kl_penalty(b.logprobs, b.ref_logprobs, kind),
            by="logprobs",
        )
    yield Comparison(
        "entropy_from_logits",
        "entropy_from_logits",
        lambda b: jrl.entropy_from_logits(b.logits),
        lambda b: torch_functional.entropy_from_logits(b.logits),
        by="logits",
    )
    yield Comparison(
        "logprobs_from_logits",
        "logprobs_from_logits_v2",
        lambda b: jrl.logprobs_from_logits(b.logits, b.logits.argmin(-1)),
        lambda b: torch_functional.logprobs_from_logits_v2(b.logits, b.logits.argmin(-1)),
        by="logits",
    )

    def their_coefficient(_: Batch) -> torch.Tensor:
        controller = core_algos.AdaptiveKLController(0.2, target_kl=0.1, horizon=1000)
        controller.update(0.13, n_steps=64)
        return torch.tensor(controller.value, dtype=torch.float64)

    yield Comparison(
        "adaptive_kl_coefficient",
        "AdaptiveKLController",
        lambda _: jrl.adaptive_kl_coefficient(
            np.float64(0.2), np.float64(0.13), target=0.1, num_samples=64, horizon=1000
        ),
        their_coefficient,
    )


def _importance_weights() -> Iterator[Comparison]:
    def ours(b: Batch, *, level: Any, bounds: dict[str, float], normalized: bool) -> Any:
        weights = jrl.mismatch_weights(b.logprobs, b.behaviour_logprobs, b.mask, level=level)
        bounded = jrl.icepop_weights if "low" in bounds else jrl.truncated_weights
        weights = bounded(weights, b.mask, **bounds)
        return jrl.normalized_weights(weights, b.mask, over=level) if normalized else weights

    def theirs(b: Batch, *, level: str, threshold: str, normalized: bool) -> torch.Tensor:
        return rollout_corr_helper.compute_rollout_correction_weights(
            b.logprobs - b.behaviour_logprobs, b.mask, level, threshold, normalized
        )[0]

    for bounds in ({"high": 1.3}, {"low": 0.8, "high": 1.3}):
        for level in ("token", "sequence"):
            for normalized in (False, True):
                threshold = "_".join(str(bound) for bound in bounds.values())
                how = {"level": level, "normalized": normalized}
                yield Comparison(
                    "icepop_weights" if "low" in bounds else "truncated_weights",
                    f"rollout correction, {level}, {threshold}" + ", normalised" * normalized,
                    partial(ours, bounds=bounds, **how),
                    partial(theirs, threshold=threshold, **how),
                    tolerance=COUNT_PLUS_EPSILON if normalized else EXACT,
                )


def _rejection() -> Iterator[Comparison]:
    def theirs(b: Batch, *, option: str, threshold: str) -> torch.Tensor:
        return rollout_corr_helper.compute_rollout_rejection_mask(
            b.logprobs - b.behaviour_logprobs, b.mask, option, threshold
        )[0]

    for kind in ("k2", "k3"):
        for over, bound in (("token", 0.001), ("sum", 0.03), ("mean", 0.0012), ("max", 0.01)):
            option = f"{over}_{kind}" if over == "token" else f"seq_{over}_{kind}"
            settings: dict[str, Any] = {"kind": kind, "over": over, "bound": bound}
            yield Comparison(
                "divergence_rejection_mask",
                f"rejection, {option}",
                lambda b, settings=settings: jrl.divergence_rejection_mask(
                    b.logprobs, b.behaviour_logprobs, b.mask, **settings
                ),
                partial(theirs, option=option, threshold=str(bound)),
            )
    # verl's k1 is minus our log-weight, so its bounds are the inverse of ours.
    yield Comparison(
        "geometric_rejection_mask",
        "rejection, seq_mean_k1",
        lambda b: jrl.geometric_rejection_mask(
            b.logprobs, b.behaviour_logprobs, b.mask, low=1 / 1.01, high=1 / 0.99
        ),
        partial(theirs, option="seq_mean_k1", threshold="0.99_1.01"),
    )


def _mismatch_statistics() -> Iterator[Comparison]:
    def theirs(b: Batch, *, name: str) -> torch.Tensor:
        found = rollout_corr_helper.compute_offpolicy_metrics(
            b.logprobs, b.behaviour_logprobs, b.mask
        )
        return torch.tensor(found[name], dtype=torch.float64)

    for name in ("kl", "k3_kl", "chi2_token", "log_ppl_diff", "log_ppl_abs_diff", "chi2_seq"):
        yield Comparison(
            "mismatch_statistics",
            f"compute_offpolicy_metrics, {name}",
            lambda b, name=name: jrl.mismatch_statistics(b.logprobs, b.behaviour_logprobs, b.mask)[
                name
            ].value(),
            partial(theirs, name=name),
            # A row without a true token is a sequence there.
            degenerate=name in ("kl", "k3_kl", "chi2_token"),
            tolerance=COUNT_PLUS_EPSILON,
        )
