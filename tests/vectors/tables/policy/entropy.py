"""Rows of jrl/losses/policy/hapo.py and hapo_signal.py."""

import numpy as np
import oracles
from oracles.rows import rows

import jrl
from vectors.call import batch, loss_of_batch, token
from vectors.objective import Case, Objective, per_token
from vectors.tables.policy.other_batches import (
    ALL,
    H_HOLES,
    H_MASK,
    NOTHING,
    REDUCED,
    TOKENS,
    H,
    _loss,
)


def at_tokens(function, mask, *arrays, **settings):
    """A function of one token's numbers on every true token, 0 elsewhere."""
    out = np.zeros(np.shape(mask))
    for i, times in enumerate(rows(mask)):
        for t in times:
            out[i, t] = function(*(float(x[i][t]) for x in arrays), **settings)
    return out


H_CASES = [
    Case("HAPO-1", {"entropy": H, "mask": ALL}),
    Case("holes and a floored entropy", {"entropy": H_HOLES, "mask": H_MASK}),
    Case("a half rounds to even", {"entropy": H_HOLES, "mask": H_MASK}, {"quantile": 0.375}),
    Case("the least is the pivot", {"entropy": H_HOLES, "mask": H_MASK}, {"quantile": 0}),
    Case("the greatest is the pivot", {"entropy": H_HOLES, "mask": H_MASK}, {"quantile": 1}),
    Case("all equal", {"entropy": [[0.5, 0.5, None]], "mask": [[1, 1, 0]]}),
    Case("no token at all", {"entropy": H_HOLES, "mask": NOTHING}),
]


# The last token lies inside its zone, the first of the second row outside it.
SIGNAL = [[-1.0, 0.0, -0.5, 1.0], [0.4, None, None, -0.25], [None, None, None, None]]


def _signals(entropy, mask, **settings):
    return {"signal": oracles.entropy_signal(entropy, mask, **settings)}


def _bounds(signal, **settings):
    pairs = [[oracles.asymmetric_clip_bounds(h, **settings) for h in row] for row in signal]
    return {
        "clip_low": [[low for low, _ in row] for row in pairs],
        "clip_high": [[high for _, high in row] for row in pairs],
    }


def _redistributed(logprobs, old_logprobs, advantages, mask, signal, **settings):
    def one(logprob, old, advantage, h):
        return oracles.redistributed_advantage(np.exp(logprob - old), advantage, h, **settings)

    arrays = (logprobs, old_logprobs, advantages, signal)
    return {"advantages": at_tokens(one, mask, *arrays)}


def _hapo_loss(
    logprobs, old_logprobs, advantages, mask, signal, aggregation="token-mean", **settings
):
    losses, slopes, acts = oracles.hapo(
        logprobs, old_logprobs, advantages, mask, signal, **settings
    )
    return _loss(losses, slopes, acts, mask, aggregation)


HAPO_FORMULA = (
    "With s the signal, r = exp(logprobs - old_logprobs), c = clip_strength, b = redistribution. "
    "Bounds: s > 0: L = clip_low, U = clip_high (1 + c s); s <= 0: L = clip_low (1 - c s), "
    "U = clip_high. Advantage: A (1 + b s) if s > 0 and r is strictly outside [1 - L/2, 1 + U/2], "
    "or s <= 0 and r strictly inside; A otherwise; a constant to gradients. Loss with that A: "
    "max(-A r, -A clip(r, 1 - L, 1 + U)), and if A < 0 at most -A clip_dual."
)


HAPO_SOURCE = "HAPO, arXiv 2509.16591; order and constants of the released code"


HAPO_CASES = [
    Case("holes", {**TOKENS, "signal": SIGNAL}),
    Case("no dual clip", {**TOKENS, "signal": SIGNAL}, {"clip_dual": None}),
    Case("a dual clip that binds", {**TOKENS, "signal": SIGNAL}, {"clip_dual": 1.5}),
    Case("bounds alone", {**TOKENS, "signal": SIGNAL}, {"redistribution": 0.0}),
    Case("redistribution alone", {**TOKENS, "signal": SIGNAL}, {"clip_strength": 0.0}),
    Case(
        "off, as PPO", {**TOKENS, "signal": SIGNAL}, {"redistribution": 0.0, "clip_strength": 0.0}
    ),
    Case("no token at all", {**TOKENS, "signal": SIGNAL, "mask": NOTHING}),
]


HAPO2_RATIOS = [[1, 1.2, 0.95, 0.7, 1, 1.05, 1, 1.3]]


HAPO2 = {
    "logprobs": np.log(HAPO2_RATIOS).tolist(),
    "old_logprobs": [[0.0] * 8],
    "advantages": [[1.0] * 8],
    "mask": ALL,
    "signal": oracles.entropy_signal(H, ALL).tolist(),
}


# The entropy serves as a signal, which is then no statistic of the batch.
ENTROPY_AS_SIGNAL = {"signal": "entropy"}

ROWS = [
    Objective(
        function="standardized_entropy",
        formula=(
            "x = log max(H, 1e-8) over the N true tokens, increasing; pivot = x[round(q (N - 1))], "
            "halves to even; scale = sqrt(mean (x - pivot)^2); h = (x - pivot) / scale, 0 if the "
            "scale is 0. quantile q is 0.8 unless given."
        ),
        source="HAPO, arXiv 2509.16591; statistics of the released code",
        outputs=["h"],
        oracle=lambda entropy, mask, **s: {"h": oracles.standardized_entropy(entropy, mask, **s)},
        cases=H_CASES,
        defaults={"quantile": 0.8},
        calls={"": batch()},
    ),
    Objective(
        function="entropy_signal",
        formula=(
            "With h of standardized_entropy and its extremes over the true tokens: h / h_max where "
            "h > 0, h / |h_min| where h <= 0; sign=release divides by h_min itself."
        ),
        source="HAPO, arXiv 2509.16591, eq. 6 with the sign of the text",
        outputs=["signal"],
        oracle=_signals,
        cases=[
            *H_CASES,
            Case("HAPO-1 released sign", {"entropy": H, "mask": ALL}, {"sign": "release"}),
        ],
        defaults={"quantile": 0.8, "sign": "intended"},
        calls={"": batch(), "released sign": batch(sign="release")},
    ),
    Objective(
        function="adaptive_temperature",
        formula="T = base (1 + strength clip(signal, -max_signal, max_signal)); null is no clip.",
        source="HAPO, arXiv 2509.16591; 0.05 and the clip of the released code",
        outputs=["temperature"],
        oracle=lambda signal, **s: {
            "temperature": [[oracles.adaptive_temperature(h, **s) for h in row] for row in signal]
        },
        cases=[
            Case("HAPO-1 code", {"signal": oracles.entropy_signal(H, ALL).tolist()}),
            Case(
                "HAPO-1 paper",
                {"signal": oracles.standardized_entropy(H, ALL).tolist()},
                {"strength": 0.1, "max_signal": None},
            ),
            Case("clipped", {"signal": [[-3.0, 1.5, 0.5]]}, {"base": 0.6, "strength": 0.2}),
        ],
        defaults={"base": 1.0, "strength": 0.05, "max_signal": 1.0},
    ),
    Objective(
        function="asymmetric_clip_bounds",
        formula=(
            "signal > 0: clip_low, clip_high (1 + strength signal); signal <= 0: "
            "clip_low (1 - strength signal), clip_high."
        ),
        source="HAPO, arXiv 2509.16591, asymmetric adaptive clipping",
        outputs=["clip_low", "clip_high"],
        oracle=_bounds,
        cases=[
            Case("HAPO-1", {"signal": oracles.entropy_signal(H, ALL).tolist()}),
            Case(
                "HAPO-1 released sign",
                {"signal": oracles.entropy_signal(H, ALL, sign="release").tolist()},
            ),
            Case(
                "half strength",
                {"signal": [[-1.0, 0.0, 0.5]]},
                {"clip_low": 0.1, "clip_high": 0.3, "strength": 0.5},
            ),
        ],
        defaults={"clip_low": 0.2, "clip_high": 0.28, "strength": 1.0},
    ),
    Objective(
        function="redistributed_advantages",
        formula=(
            "With r = exp(logprobs - old_logprobs): A (1 + strength signal) if signal > 0 and r is "
            "strictly outside [1 - clip_low/2, 1 + clip_high/2], or signal <= 0 and r strictly "
            "inside; A otherwise."
        ),
        source="HAPO, arXiv 2509.16591, differential advantage redistribution",
        outputs=["advantages"],
        oracle=_redistributed,
        cases=[
            Case("HAPO-2", HAPO2),
            Case("holes", {**TOKENS, "signal": SIGNAL}),
            Case(
                "half strength, other zone",
                {**TOKENS, "signal": SIGNAL},
                {"strength": 0.5, "clip_low": 0.8, "clip_high": 4.0},
            ),
            Case("no token at all", {**TOKENS, "signal": SIGNAL, "mask": NOTHING}),
        ],
        defaults={"clip_low": 0.2, "clip_high": 0.28, "strength": 1.0},
        calls={"": token(ENTROPY_AS_SIGNAL)},
    ),
    Objective(
        function="hapo_loss",
        formula=HAPO_FORMULA + REDUCED,
        source=HAPO_SOURCE,
        outputs=["loss", "metrics"],
        oracle=_hapo_loss,
        cases=[
            *HAPO_CASES,
            Case(
                "mean of sequences",
                {**TOKENS, "signal": SIGNAL},
                {"aggregation": "seq-mean-token-mean"},
            ),
            *per_token([Case("HAPO-2", HAPO2), *HAPO_CASES]),
        ],
        defaults={
            "clip_low": 0.2,
            "clip_high": 0.28,
            "clip_strength": 1.0,
            "redistribution": 1.0,
            "clip_dual": 10.0,
            "max_log_ratio": 20.0,
            "aggregation": "token-mean",
        },
        calls={
            "": loss_of_batch(
                {"signal": lambda b: jrl.entropy_signal(b["entropy"], b["mask"])}, clip_dual=1.5
            ),
            "of a given signal": token(ENTROPY_AS_SIGNAL, aggregation=None),
        },
    ),
]
