"""Rows of jrl/losses/mismatch.py."""

import numpy as np
import oracles

from vectors.call import batch, token
from vectors.objective import Case, Objective

MASK = [[1, 1, 1, 1], [1, 1, 1, 0]]


LOG_WEIGHTS = [[0.1, -0.2, 1.2, 0.0], [-0.5, -0.9, 0.3, None]]


CORR = {
    "logprobs": LOG_WEIGHTS,
    "behaviour_logprobs": [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, None]],
    "mask": MASK,
}


HOLES = {
    "logprobs": [[None, -1.0, None, -0.5], [-2.0, None, -0.3, -0.1], [None] * 4],
    "behaviour_logprobs": [[None, -1.3, None, -0.45], [-0.9, None, -0.35, -0.1], [None] * 4],
    "mask": [[0, 1, 0, 1], [1, 0, 1, 1], [0, 0, 0, 0]],
}


NOTHING = {**HOLES, "mask": [[0] * 4] * 3}


FAR = {"logprobs": [[-0.1, -30.0]], "behaviour_logprobs": [[-30.0, -0.1]], "mask": [[1, 1]]}


def _weights(level, arrays):
    """Weights as the arrays of a case, None under the mask."""
    weights = oracles.mismatch_weights(**arrays, level=level)
    return {
        "weights": np.where(np.array(arrays["mask"], bool), weights, None).tolist(),
        "mask": arrays["mask"],
    }


def _each(function, weights, mask, **settings):
    def one(w, true):
        return function(float(w), **settings) if true else 0.0

    return {
        "weights": [
            [one(w, m) for w, m in zip(*row, strict=True)]
            for row in zip(weights, mask, strict=True)
        ]
    }


def _named(name, oracle):
    return lambda *args, **kwargs: {name: oracle(*args, **kwargs)}


VERL = "verl, rollout correction"


BOTH = "trainer over sampler, w = exp(logprobs - behaviour_logprobs)"


WEIGHTS = {"weights": "importance_weights"}

ROWS = [
    Objective(
        function="mismatch_weights",
        formula=(
            f"With {BOTH}: level=token w_t; sequence prod_t w_t on the whole row; geometric "
            "exp(mean_t log w_t). Logarithms are clamped to plus or minus max_log_weight, 20."
        ),
        source=VERL,
        outputs=["weights"],
        oracle=_named("weights", oracles.mismatch_weights),
        cases=[
            *(Case(f"CORR-1 {n}", CORR, {"level": n}) for n in ("token", "sequence", "geometric")),
            *(Case(f"holes {n}", HOLES, {"level": n}) for n in ("token", "sequence", "geometric")),
            Case("clamped", FAR),
            Case("clamped lower", FAR, {"max_log_weight": 3.0}),
            Case("unclamped", FAR, {"max_log_weight": None}),
            Case("no token at all", NOTHING),
        ],
        defaults={"level": "token", "max_log_weight": 20.0},
        calls={level: token(level=level) for level in ("token", "sequence", "geometric")},
    ),
    Objective(
        function="truncated_weights",
        formula="min(w, high), then max with low if it is set; null is off.",
        source="truncated importance sampling, " + VERL,
        outputs=["weights"],
        oracle=lambda weights, mask, **s: _each(oracles.truncated_weight, weights, mask, **s),
        cases=[
            Case("CORR-1 token", _weights("token", CORR)),
            Case("CORR-1 sequence", _weights("sequence", CORR)),
            Case("holes", _weights("token", HOLES), {"high": 1.2, "low": 0.5}),
            Case("off", _weights("token", CORR), {"high": None}),
        ],
        defaults={"high": 2.0},
        calls={"": token(WEIGHTS, high=1.5, low=0.8)},
    ),
    Objective(
        function="icepop_weights",
        formula="w where low <= w <= high, 0 elsewhere; null is off.",
        source="IcePop, arXiv 2510.18855; sequence MIS on weights of sequences",
        outputs=["weights"],
        oracle=lambda weights, mask, **s: _each(oracles.icepop_weight, weights, mask, **s),
        cases=[
            Case("CORR-1 token", _weights("token", CORR), {"low": 0.5, "high": 2.0}),
            Case("CORR-1 sequence", _weights("sequence", CORR), {"low": None, "high": 3.0}),
            Case("holes", _weights("token", HOLES)),
            Case("off", _weights("token", CORR), {"low": None, "high": None}),
        ],
        defaults={"low": 0.5, "high": 5.0},
        calls={"": token(WEIGHTS, low=0.8, high=1.5)},
    ),
    Objective(
        function="normalized_weights",
        formula=(
            "w / mean: over=token the mean over true tokens, over=sequence over sequences of their "
            "mean over tokens; w itself if the mean is 0."
        ),
        source=VERL + ", batch normalisation",
        outputs=["weights"],
        oracle=_named("weights", oracles.normalized_weights),
        cases=[
            *(
                Case(f"{name} {over}", _weights("token", arrays), {"over": over})
                for name, arrays in (("CORR-1", CORR), ("holes", HOLES), ("no token", NOTHING))
                for over in ("token", "sequence")
            ),
            Case("all 0", {"weights": [[0.0, 0.0]], "mask": [[1, 1]]}),
        ],
        defaults={"over": "token"},
        calls={over: batch(WEIGHTS, over=over) for over in ("token", "sequence")},
    ),
    Objective(
        function="sequence_masked_weights",
        formula=f"With {BOTH}: w_t where low <= exp(mean_t log w_t) <= high, 0 on other rows.",
        source="seq-mask-TIS of OpenRLHF and NeMo-RL",
        outputs=["weights"],
        oracle=_named("weights", oracles.sequence_masked_weights),
        cases=[
            Case("CORR-1 first stays", CORR, {"low": 0.7, "high": 1.4}),
            Case("CORR-1 second stays", CORR, {"low": 0.6, "high": 1.3}),
            Case("holes", HOLES, {"low": None, "high": 1.0}),
        ],
        defaults={"max_log_weight": 20.0},
        required={"low": 0.5, "high": 2.0},
        calls={"": token(low=0.8, high=1.5)},
    ),
    Objective(
        function="geometric_rejection_mask",
        formula=f"With {BOTH}: a row stays if low <= exp(mean_t log w_t) <= high.",
        source=VERL + ", with thresholds on w instead of 1/w",
        outputs=["mask"],
        oracle=_named("mask", oracles.geometric_rejection_mask),
        cases=[
            Case("CORR-1 upper", CORR, {"low": None, "high": 1.3}),
            Case("CORR-1 lower", CORR, {"low": 0.7, "high": None}),
            Case("CORR-1 both stay", CORR, {"low": 0.69, "high": 1.32}),
            Case("holes", HOLES, {"low": 0.9, "high": 1.5}),
        ],
        required={"low": 0.5, "high": 2.0},
        calls={"": token(low=0.8, high=1.5)},
    ),
    Objective(
        function="divergence_rejection_mask",
        formula=(
            f"With {BOTH}: kind=k2 log(w)^2 / 2, k3 w - 1 - log w; kept while over=token the value "
            "of the token, or the sum, mean or max over the row, is at most bound."
        ),
        source=VERL + ", K2 and K3 rejection",
        outputs=["mask"],
        oracle=_named("mask", oracles.divergence_rejection_mask),
        cases=[
            Case("CORR-1 k2 mean", CORR, {"kind": "k2", "over": "mean", "bound": 0.19}),
            Case("CORR-1 k3 mean", CORR, {"kind": "k3", "over": "mean", "bound": 0.2}),
            Case("CORR-1 k3 max", CORR, {"kind": "k3", "over": "max", "bound": 1.0}),
            Case("CORR-1 k3 sum", CORR, {"kind": "k3", "over": "sum", "bound": 0.5}),
            Case("CORR-1 k2 token", CORR, {"kind": "k2", "over": "token", "bound": 0.1}),
            Case("holes", HOLES, {"bound": 0.05}),
            Case("holes token", HOLES, {"over": "token", "bound": 0.05}),
        ],
        defaults={"kind": "k3", "over": "mean", "max_log_weight": 20.0},
        required={"bound": 0.25},
        calls={over: token(over=over, bound=0.2) for over in ("token", "sum", "mean", "max")},
    ),
]
