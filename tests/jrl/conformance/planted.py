"""Right functions of NumPy, and the same with one error each.

Errors of one line are keywords of the right function; the table of them is `PLANTED`.
"""

import numpy as np


def loss(per_token, mask, num_tokens):
    losses = np.where(mask, per_token, 0)
    return losses.sum() / (max(np.sum(mask), 1) if num_tokens is None else num_tokens)


def surrogate(logprobs, old_logprobs, advantages, clip_low=0.2, clip_high=0.2, pick=np.maximum):
    ratio = np.exp(logprobs - old_logprobs)
    return pick(-advantages * ratio, -advantages * np.clip(ratio, 1 - clip_low, 1 + clip_high))


def ppo(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2, num_tokens=None):
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    return loss(surrogate(logprobs, old_logprobs, advantages, **clip), mask, num_tokens)


def wrong_sign(logprobs, old_logprobs, advantages, mask):
    return loss(surrogate(logprobs, old_logprobs, -advantages), mask, None)


def clip_on_the_wrong_side(logprobs, old_logprobs, advantages, mask):
    return loss(surrogate(logprobs, old_logprobs, advantages, pick=np.minimum), mask, None)


def clip_bounds_exchanged(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2):
    return ppo(logprobs, old_logprobs, advantages, mask, clip_high, clip_low)


def mean_over_padding(logprobs, old_logprobs, advantages, mask):
    return loss(surrogate(logprobs, old_logprobs, advantages), mask, mask.size)


def mask_off_by_one(logprobs, old_logprobs, advantages, mask):
    shifted = np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    return loss(surrogate(logprobs, old_logprobs, advantages), shifted, mask.sum() or 1)


def mean_of_micro_batches(logprobs, old_logprobs, advantages, mask, num_tokens=None):
    return loss(surrogate(logprobs, old_logprobs, advantages), mask, None)


def divided_once_too_often(logprobs, old_logprobs, advantages, mask, num_tokens=None):
    return ppo(logprobs, old_logprobs, advantages, mask, num_tokens=num_tokens) / len(mask)


def mask_by_product(logprobs, old_logprobs, advantages, mask):
    products = surrogate(logprobs, old_logprobs, advantages) * mask
    return products.sum() / max(mask.sum(), 1)


def inverted_integer_mask(logprobs, old_logprobs, advantages, mask):
    hidden = np.where(~mask, 0, surrogate(logprobs, old_logprobs, advantages))
    return hidden.sum() / max(mask.sum(), 1)


def empty_rows_count(logprobs, old_logprobs, advantages, mask, aggregation="token-mean"):
    losses = np.where(mask, surrogate(logprobs, old_logprobs, advantages), 0)
    return (losses.sum(1) / np.maximum(mask.sum(1), 1)).mean()


def grpo(rewards, groups, epsilon=1e-6):
    result = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = rewards[groups == group]
        if np.ptp(own) > 0:
            result[groups == group] = (own - own.mean()) / (own.std(ddof=1) + epsilon)
    return result


def group_mixed(rewards, groups, epsilon=1e-6):
    spread = np.array([rewards[groups == group].std(ddof=1) for group in groups])
    return np.nan_to_num((rewards - rewards.mean()) / (spread + epsilon))


def groups_by_position(rewards, groups, epsilon=1e-6):
    pairs = rewards.reshape(-1, 2)
    return ((pairs - pairs.mean(1, keepdims=True)) / (pairs.std(1, keepdims=True) + 1)).ravel()


def variance_of_rounding(rewards, groups):
    result = np.zeros_like(rewards)
    for group in np.unique(groups):
        own = rewards[groups == group]
        result[groups == group] = (own - own.mean()) / (own.std(ddof=len(own) > 1) + 1e-20)
    return result


def whiten(x, mask):
    kept = x[mask.astype(bool)]
    spread = kept.std(ddof=1) if len(kept) > 1 else 1
    return np.where(mask, (x - kept.sum() / max(len(kept), 1)) / (spread or 1), 0)


def whiten_over_padding(x, mask):
    return np.where(mask, (x - x.mean()) / (x.std() or 1), 0)


def gae(rewards, values, mask, gamma=1.0, lam=0.95, over=lambda mask: mask):
    """`over` says which positions the recursion reads."""
    result, read = np.zeros(values.shape), over(mask)
    gamma, lam = (np.broadcast_to(x, values.shape) for x in (gamma, lam))
    for i, row in enumerate(read):
        following, advantage = 0.0, 0.0
        for t in reversed(np.flatnonzero(row)):
            error = rewards[i, t] + gamma[i, t] * following - values[i, t]
            advantage = error + gamma[i, t] * lam[i, t] * advantage
            following, result[i, t] = values[i, t], advantage
    return np.where(mask, result, 0)


def gae_from_masked_values(rewards, values, mask, gamma=1.0, lam=0.95):
    return gae(rewards, values, mask, gamma, lam, over=np.ones_like)


RIGHT = {"ppo_loss": ppo, "dapo_loss": ppo, "grpo_advantages": grpo, "gae": gae}

PLANTED = [
    # The function, the quantity, and the case or rule that must say so.
    (wrong_sign, "ppo_loss", "CLIP-1 A=+1 eps .2/.2"),
    (clip_on_the_wrong_side, "ppo_loss", "CLIP-1 A=-1 eps .2/.2"),
    (clip_bounds_exchanged, "dapo_loss", "CLIP-1 A=+1 eps .2/.28"),
    (mean_over_padding, "ppo_loss", "padding"),
    (mask_off_by_one, "ppo_loss", "masked values"),
    (mean_of_micro_batches, "ppo_loss", "micro-batches"),
    (divided_once_too_often, "ppo_loss", "micro-batches"),
    (mask_by_product, "ppo_loss", "masked NaN"),
    (inverted_integer_mask, "ppo_loss", "mask dtypes"),
    (empty_rows_count, "ppo_loss", "empty rows"),
    (group_mixed, "grpo_advantages", "groups apart"),
    (groups_by_position, "grpo_advantages", "row order"),
    (variance_of_rounding, "grpo_advantages", "equal rewards"),
    (whiten_over_padding, "whiten", "masked values"),
    (gae_from_masked_values, "gae", "masked values"),
    (gae_from_masked_values, "gae", "holes"),
]
