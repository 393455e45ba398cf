"""Batches and helpers of the tables of advantages."""

import jax.numpy as jnp
import numpy as np

HOLES = [
    [1, 1, 1, 1, 0, 0],
    [1, 1, 0, 0, 1, 1],
    [0, 0, 1, 0, 1, 0],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 0],
]


DRAW = np.random.default_rng(20260101)


def _draw(mask, low, high, digits=3):
    """Numbers of a few digits, None under the mask."""
    return [
        [round(float(DRAW.uniform(low, high)), digits) if true else None for true in row]
        for row in mask
    ]


REWARDS, VALUES = _draw(HOLES, -1, 1), _draw(HOLES, -0.5, 1.5)


GAMMA, LAM = _draw(HOLES, 0.8, 1.0), _draw(HOLES, 0.2, 1.0)


BOOTSTRAP = [0.4, -0.3, 0.8, 5.0, 0.6]


GAE_1 = {
    "rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, -1.0, None]],
    "values": [[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, None]],
    "mask": [[1, 1, 1, 1], [1, 1, 1, 0]],
}


def _filled(setting):
    """A setting per token with 0 for what is under the mask; other settings as they are."""
    if not isinstance(setting, list):
        return setting
    return [[0.0 if x is None else x for x in row] for row in setting]


def _advantages(oracle):
    return lambda *arrays, **settings: {"advantages": oracle(*arrays, **settings)}


# ADV-1: two groups of four; "far" has other names, sizes and order, negative rewards and ties.
ADV_1 = {"rewards": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], "groups": [0, 0, 0, 0, 1, 1, 1, 1]}


ADV_1_LENGTHS = [4, 2, 6, 8, 3, 3, 6, 4]


ADV_1_MASK = [[1 if t < length else 0 for t in range(8)] for length in ADV_1_LENGTHS]


FAR = {
    "rewards": [0.3, -1.25, 2.0, 0.1, 0.1, 0.75, -0.5, 0.1, 2.0, 4.5],
    "groups": [7, -3, 7, 100, 100, -3, 7, 100, 7, 55],
}


FAR_LENGTHS = [5, 1, 3, 2, 2, 4, 0, 1, 6, 3]


FAR_MASK = [[1 if 1 <= t <= length else 0 for t in range(8)] for length in FAR_LENGTHS]


OTB = {
    "rewards": REWARDS,
    "groups": [4, 4, 9, 4, 9],
    "logprobs": _draw(HOLES, -3, -0.05),
    "sum_squared_probs": _draw(HOLES, 0.2, 0.9),
    "mask": HOLES,
}


RHO = _draw(HOLES, 0.5, 2.0)


GROUP_SOURCE = "vectors ADV-1 are derived from the formula"


def scores(b):
    """One reward per response: the sum over its tokens."""
    rewards = b["rewards"]
    if rewards.dtype == jnp.bfloat16:
        rewards = rewards.astype(jnp.float32)
    return jnp.sum(jnp.where(b["mask"].astype(bool), rewards, 0), -1)


SCORES = {"rewards": scores}


def lengths(b):
    return jnp.sum(b["mask"].astype(bool), -1)
