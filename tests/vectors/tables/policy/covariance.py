"""Rows of jrl/losses/policy/covariance.py."""

import numpy as np
import oracles

from vectors.call import batch, loss_of_batch
from vectors.objective import Case, Objective, per_token
from vectors.tables.policy.other_batches import NOTHING, REDUCED, TOKENS, _loss


def _cov_loss(losses, slopes, acts, mask, aggregation):
    result = _loss(losses, slopes, acts, mask, aggregation)
    tokens = max(int(np.sum(mask)), 1)
    return {**result, "metrics": {"cov_frac": (acts == "cov").sum() / tokens}}


def _clip_cov_loss(
    logprobs, old_logprobs, advantages, mask, fraction, aggregation="token-mean", **settings
):
    out = oracles.clip_cov(logprobs, old_logprobs, advantages, mask, **settings)
    return _cov_loss(*out, mask, aggregation)


def _kl_cov_loss(logprobs, old_logprobs, advantages, mask, aggregation="token-mean", **settings):
    out = oracles.kl_cov(logprobs, old_logprobs, advantages, mask, **settings)
    return _cov_loss(*out, mask, aggregation)


COV_1 = {
    "logprobs": [[-0.1, -3.0, -1.0, -0.05, -2.0, -0.5]],
    "old_logprobs": [[-0.1, -3.2, -0.9, -0.15, -1.0, -0.5]],
    "advantages": [[2.0, -1.0, 0.5, -1.5, 0.0, 0.0]],
    "mask": [[1] * 6],
}


COV_SOURCE = "Entropy mechanism, arXiv 2505.22617"


COV = "cov = (A - mean A) (logprobs - mean logprobs), means over the true tokens. "


CLIP_COV_FORMULA = (
    COV + "PPO's clipped loss, and 0 on the tokens that are not clipped and have low < cov < high. "
    "(All of them: fraction is 1 here. Otherwise max(1, floor(fraction N)) of them at random.)"
)


KL_COV_FORMULA = (
    COV + "-A r, and + coefficient |logprobs - old_logprobs| on the max(1, floor(fraction N)) "
    "tokens of highest cov; the derivative of the absolute value is 0 at 0."
)


ALL_OF_THEM = {"fraction": 1}


CLIP_COV_CASES = [
    Case("COV-1", COV_1, ALL_OF_THEM),
    Case(
        "holes and bounds",
        TOKENS,
        {**ALL_OF_THEM, "low": 0.05, "high": 2.0, "clip_low": 0.2, "clip_high": 0.28},
    ),
    Case("no token at all", {**TOKENS, "mask": NOTHING}, ALL_OF_THEM),
]


KL_COV_CASES = [
    Case("COV-1", COV_1),
    Case("COV-1 half", COV_1, {"fraction": 0.5, "coefficient": 0.1}),
    Case("holes", TOKENS, {"fraction": 0.4}),
    Case("none", TOKENS, {"fraction": 0}),
    Case("no token at all", {**TOKENS, "mask": NOTHING}),
]


MEAN_OF_SEQUENCES = {"aggregation": "seq-mean-token-mean"}

ROWS = [
    Objective(
        function="covariances",
        formula=COV,
        source=COV_SOURCE,
        outputs=["covariances"],
        oracle=lambda *a, **k: {"covariances": oracles.covariances(*a, **k)},
        cases=[
            Case(name, {n: arrays[n] for n in ("logprobs", "advantages", "mask")})
            for name, arrays in (
                ("COV-1", COV_1),
                ("holes", TOKENS),
                ("no token at all", {**TOKENS, "mask": NOTHING}),
            )
        ],
        calls={"": batch()},
    ),
    Objective(
        function="clip_cov_loss",
        formula=CLIP_COV_FORMULA + REDUCED,
        source=COV_SOURCE,
        outputs=["loss", "metrics"],
        oracle=_clip_cov_loss,
        cases=[
            *CLIP_COV_CASES,
            Case("mean of sequences", TOKENS, {**ALL_OF_THEM, "low": 0.05, **MEAN_OF_SEQUENCES}),
            *per_token(CLIP_COV_CASES),
        ],
        defaults={
            "fraction": 0.0002,
            "low": 1.0,
            "high": 5.0,
            "clip_low": 1.0,
            "clip_high": 1.0,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        required={"fraction": 1},
        calls={"": loss_of_batch(fraction=1, low=0.1, high=1.0, clip_low=0.2, clip_high=0.28)},
    ),
    Objective(
        function="kl_cov_loss",
        formula=KL_COV_FORMULA + REDUCED,
        source=COV_SOURCE,
        outputs=["loss", "metrics"],
        oracle=_kl_cov_loss,
        cases=[
            *KL_COV_CASES,
            Case("mean of sequences", TOKENS, {"fraction": 0.4, **MEAN_OF_SEQUENCES}),
            *per_token(KL_COV_CASES),
        ],
        defaults={
            "fraction": 0.002,
            "coefficient": 1.0,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        calls={"": loss_of_batch(fraction=0.3)},
    ),
]
