"""The advantages that verl computes, by the functions of `verl.trainer.ppo`."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

import jrl
from benchmarks.agreement.batch import COUNT_PLUS_EPSILON, PARTLY_FLOAT32, Batch, Comparison

SETTINGS = jrl.conventions(like="verl")


def comparisons() -> Iterator[Comparison]:
    yield from _of_rows()
    yield from _of_tokens()


def on_last_token(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One score per row, as a reward on its last true token."""
    last = mask.shape[-1] - 1 - mask.flip(-1).argmax(-1, keepdim=True)
    return torch.zeros_like(mask).scatter_(-1, last, scores[:, None])


def _of_rows() -> Iterator[Comparison]:
    """Ours are one per row; verl repeats them over the true tokens."""

    def case(
        function: str, name: str, ours: Callable[[Batch], Any], label: str = "", **rest: Any
    ) -> Comparison:
        options = {
            key: rest.pop(key) for key in ("config", "norm_adv_by_std_in_grpo") if key in rest
        }

        def theirs(b: Batch) -> torch.Tensor:
            estimator = core_algos.get_adv_estimator_fn(name)
            rewards = on_last_token(b.scores, b.mask)
            return estimator(rewards, b.mask, index=b.groups.numpy(), **options)[0]

        return Comparison(
            function, f"{name}{label}", lambda b: ours(b)[:, None] * b.mask, theirs, **rest
        )

    grpo = SETTINGS["grpo_advantages"]
    yield case(
        "grpo_advantages",
        "grpo",
        lambda b: jrl.grpo_advantages(b.scores, b.groups, **grpo),
        # Of equal scores it divides what rounding left by 1e-6; ours are 0.
        tolerance=COUNT_PLUS_EPSILON,
    )
    yield case(
        "grpo_advantages, no scale",
        "grpo",
        lambda b: jrl.grpo_advantages(b.scores, b.groups, **{**grpo, "scale": None}),
        norm_adv_by_std_in_grpo=False,
        label=", norm_adv_by_std_in_grpo=False",
    )
    # A response that is alone keeps its score in verl and has the advantage 0 here.
    lone: dict[str, Any] = {"degenerate": False}
    yield case(
        "dr_grpo_advantages",
        "grpo",
        lambda b: jrl.dr_grpo_advantages(b.scores, b.groups),
        norm_adv_by_std_in_grpo=False,
        label=", norm_adv_by_std_in_grpo=False",
        **lone,
    )
    for name in ("rloo", "rloo_vectorized"):
        # The second has the advantage 0 for a response that is alone, as ours.
        alone = lone if name == "rloo" else {}
        yield case(
            "rloo_advantages", name, lambda b: jrl.rloo_advantages(b.scores, b.groups), **alone
        )
    yield case(
        "opo_advantages",
        "opo",
        lambda b: jrl.opo_advantages(b.scores, b.groups, b.mask.sum(-1)),
        **lone,
    )
    gpg = SETTINGS["gpg_advantages"]
    yield case(
        "gpg_advantages", "gpg", lambda b: jrl.gpg_advantages(b.scores, b.groups, **gpg), **lone
    )
    for scale in ("group", None):
        yield case(
            "pass_at_k_advantages",
            "grpo_passk",
            lambda b, s=scale: jrl.pass_at_k_advantages(
                b.scores, b.groups, **{**SETTINGS["pass_at_k_advantages"], "scale": s}
            ),
            config=AlgoConfig(norm_adv_by_std_in_grpo=scale is not None),
            label=f", norm_adv_by_std_in_grpo={scale is not None}",
            **lone,
        )
    yield Comparison(
        "gdpo_advantages",
        "gdpo",
        lambda b: (
            jrl.gdpo_advantages(
                b.components,
                b.groups,
                weights=np.array([0.7, 1.6]),
                lengths=b.mask.sum(-1),
                **SETTINGS["gdpo_advantages"],
            )[:, None]
            * b.mask
        ),
        _their_gdpo,
        tolerance=PARTLY_FLOAT32,
        **lone,
    )


def _their_gdpo(b: Batch) -> torch.Tensor:
    prompt_and_response = torch.ones((len(b.mask), 1 + b.mask.shape[-1]), dtype=torch.int64)
    keys = ("first", "second")
    return core_algos.compute_gdpo_outcome_advantage(
        b.rewards,
        b.mask,
        b.groups.numpy(),
        config={"gdpo_reward_keys": keys, "gdpo_reward_weights": [0.7, 1.6]},
        non_tensor_batch=dict(zip(keys, b.components.T.numpy(), strict=True)),
        batch={"prompts": prompt_and_response[:, :1], "attention_mask": prompt_and_response},
    )[0]


def _of_tokens() -> Iterator[Comparison]:
    def gae(b: Batch) -> tuple[Any, Any]:
        return jrl.gae(b.rewards, b.values, b.mask, gamma=0.97, lam=0.9)

    def their_gae(b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return core_algos.compute_gae_advantage_return(b.rewards, b.values, b.mask, 0.97, 0.9)

    # What is under the mask is 0 here and whatever it is there.
    yield Comparison(
        "gae, whiten",
        "gae",
        lambda b: jrl.whiten(gae(b)[0], b.mask, **SETTINGS["whiten"]),
        lambda b: their_gae(b)[0] * b.mask,
    )
    yield Comparison("gae", "gae, returns", lambda b: gae(b)[1], lambda b: their_gae(b)[1] * b.mask)
    yield Comparison(
        "reinforce_plus_plus_advantages",
        "reinforce_plus_plus",
        lambda b: jrl.reinforce_plus_plus_advantages(
            b.rewards, b.mask, gamma=0.97, **SETTINGS["reinforce_plus_plus_advantages"]
        ),
        lambda b: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            b.rewards, b.mask, config=AlgoConfig(gamma=0.97)
        )[0],
    )
    yield Comparison(
        "reinforce_plus_plus_baseline_advantages",
        "reinforce_plus_plus_baseline",
        lambda b: jrl.reinforce_plus_plus_baseline_advantages(b.scores, b.groups, b.mask),
        lambda b: core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            on_last_token(b.scores, b.mask), b.mask, b.groups.numpy()
        )[0],
        degenerate=False,
    )
    yield Comparison(
        "remax_advantages",
        "remax",
        lambda b: jrl.remax_advantages(b.rewards, b.greedy_scores, b.mask),
        lambda b: (
            core_algos.compute_remax_outcome_advantage(b.rewards, b.greedy_scores, b.mask)[0]
            * b.mask
        ),
    )
    for weighted in (False, True):
        yield Comparison(
            "optimal_token_baseline",
            "tir_optimal_token_baseline" + ", rollout_is_weights" * weighted,
            lambda b, w=weighted: jrl.optimal_token_baseline(
                *(b.rewards, b.groups, b.old_logprobs, b.sum_squared_probs, b.mask),
                importance_weights=b.importance_weights if w else None,
                **SETTINGS["optimal_token_baseline"],
            ),
            lambda b, w=weighted: core_algos.compute_multi_turn_optimal_token_baseline_advantage(
                *(b.rewards, b.mask, b.groups.numpy(), b.old_logprobs, b.sum_squared_probs),
                b.importance_weights if w else None,
            )[0],
        )
