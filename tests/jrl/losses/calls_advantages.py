"""Calls of the advantage estimators, for the contract of arrays."""

import jax.numpy as jnp

import jrl


def scores(b):
    """One reward per response: the sum of those of its tokens."""
    rewards = b["rewards"]
    if rewards.dtype == jnp.bfloat16:
        rewards = rewards.astype(jnp.float32)
    return jnp.sum(jnp.where(b["mask"].astype(bool), rewards, 0), -1)


def squares(b):
    """Something that can be the sum of squared probabilities, made from what a batch has."""
    return jnp.exp(-b["entropy"])


def lengths(b):
    return jnp.sum(b["mask"].astype(bool), -1)


def grouped(estimator):
    """An estimator on responses and their groups, for any leading axes, spread over the tokens."""

    def call(b):
        rows = {n: x.reshape(-1, *x.shape[b["mask"].ndim - 1 :]) for n, x in b.items()}
        result = estimator(rows)
        result = result if result.ndim > 1 else result[:, None]
        counts = rows["mask"].astype(bool)
        return jnp.where(counts, result, 0).reshape(b["mask"].shape)

    return call


# One result per token, of which each row depends on that row alone.
PER_TOKEN = {
    "gae": lambda b: jrl.gae(b["rewards"], b["values"], b["mask"], gamma=b["gamma"], lam=b["lam"]),
    "gae, cut or ended": lambda b: jrl.gae(
        b["rewards"],
        b["values"],
        b["mask"],
        bootstrap_value=b["scores"],
        terminated=b["correct"],
    ),
    "decoupled_gae": lambda b: jrl.decoupled_gae(
        b["rewards"], b["values"], b["mask"], gamma=b["gamma"], lam_policy=b["lam"], lam_critic=0.9
    ),
    "extended_gae": lambda b: jrl.extended_gae(
        b["rewards"], b["values"], b["mask"], b["correct"] == 0, gamma=0.9, ignore_last=1
    ),
    "reinforce_plus_plus_advantages, not whitened": lambda b: jrl.reinforce_plus_plus_advantages(
        b["rewards"], b["mask"], gamma=b["gamma"], whitened=False
    ),
    "remax_advantages": lambda b: jrl.remax_advantages(b["rewards"], b["scores"], b["mask"]),
}
# One result per token that depends on the whole batch.
PER_BATCH = {
    "whiten": lambda b: jrl.whiten(b["advantages"], b["mask"]),
    "whiten, mean kept": lambda b: jrl.whiten(b["advantages"], b["mask"], keep_mean=True),
    "whiten, least variance": lambda b: jrl.whiten(
        b["advantages"], b["mask"], unbiased=False, epsilon=0.0, min_variance=1e-8
    ),
    "reinforce_plus_plus_advantages": lambda b: jrl.reinforce_plus_plus_advantages(
        b["rewards"], b["mask"]
    ),
    "reinforce_plus_plus_baseline_advantages": grouped(
        lambda b: jrl.reinforce_plus_plus_baseline_advantages(scores(b), b["groups"], b["mask"])
    ),
    "grpo_advantages": grouped(lambda b: jrl.grpo_advantages(scores(b), b["groups"], epsilon=1e-2)),
    "dr_grpo_advantages": grouped(lambda b: jrl.dr_grpo_advantages(scores(b), b["groups"])),
    "rloo_advantages": grouped(lambda b: jrl.rloo_advantages(scores(b), b["groups"])),
    "maxrl_advantages": grouped(
        lambda b: jrl.maxrl_advantages(1 + jnp.abs(scores(b)), b["groups"])
    ),
    "opo_advantages": grouped(lambda b: jrl.opo_advantages(scores(b), b["groups"], lengths(b))),
    "gpg_advantages": grouped(lambda b: jrl.gpg_advantages(scores(b), b["groups"], alpha=1.5)),
    "pass_at_k_advantages": grouped(
        lambda b: jrl.pass_at_k_advantages(scores(b), b["groups"], epsilon=1e-2)
    ),
    "pass_at_k_exact_advantages": grouped(
        lambda b: jrl.pass_at_k_exact_advantages(scores(b), b["groups"], k=2)
    ),
    "gdpo_advantages": grouped(
        lambda b: jrl.gdpo_advantages(
            jnp.stack([scores(b), scores(b) ** 2], -1),
            b["groups"],
            lengths=lengths(b),
            epsilon=1e-2,
            whiten_epsilon=1e-2,
        )
    ),
    "token_level_group_average": grouped(
        lambda b: jrl.token_level_group_average(scores(b), b["groups"], b["mask"], fallback=5.0)
    ),
    "optimal_token_baseline": grouped(
        lambda b: jrl.optimal_token_baseline(
            b["rewards"],
            b["groups"],
            b["logprobs"],
            squares(b),
            b["mask"],
            importance_weights=b["importance_weights"],
        )
    ),
}
EVERYTHING = [*PER_TOKEN.values(), *PER_BATCH.values()]
