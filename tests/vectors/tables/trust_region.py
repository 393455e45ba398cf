"""Vectors of the losses that bound a step by more than a ratio: HAPO, DPPO, covariances, masks."""

import numpy as np
import oracles
from oracles.rows import rows

from vectors.vector import Case, Vector, per_token

LOGPROBS = [[-0.5, -1.2, -0.1, -2.0], [-0.9, None, None, -0.3], [None, None, None, None]]
OLD = [[-0.6, -0.8, -0.1, -3.5], [-1.9, None, None, -0.9], [None, None, None, None]]
ADVANTAGES = [[1.0, -0.5, 2.0, -1.5], [0.75, None, None, -1.0], [None, None, None, None]]
MASK = [[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]]
NOTHING = [[0, 0, 0, 0]] * 3
REDUCED = " Then aggregate, by token-mean unless given, or one loss per token for null."
TOKENS = {"logprobs": LOGPROBS, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK}


def at_tokens(function, mask, *arrays, **settings):
    """A function of one token's numbers on every true token, 0 elsewhere."""
    out = np.zeros(np.shape(mask))
    for i, times in enumerate(rows(mask)):
        for t in times:
            out[i, t] = function(*(float(x[i][t]) for x in arrays), **settings)
    return out


def _loss(losses, slopes, acts, mask, aggregation):
    """What a loss returns, from the losses of its tokens and which bounds act on them.

    Without an aggregation it is those losses as they are.
    """
    tokens = max(int(np.sum(mask)), 1)
    if aggregation is None:
        reduced, factors = losses, 1.0
    else:
        reduced = oracles.aggregate(losses, mask, aggregation)
        factors = oracles.token_weights(mask, aggregation)
    return {
        "loss": reduced,
        "metrics": {
            "pg_clipfrac": (acts == "clip").sum() / tokens,
            "pg_clipfrac_lower": (acts == "dual").sum() / tokens,
        },
        "gradients": {"logprobs": slopes * factors},
    }


H = [[0.02, 0.05, 0.10, 0.30, 0.60, 0.90, 1.20, 2.00]]
ALL = [[1] * 8]
H_HOLES = [[0.3, None, 0.0, 1.5], [None, 2.5, 0.7, None], [None, None, None, None]]
H_MASK = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
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

HAPO = [
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
]


def _dppo_loss(logprobs, old_logprobs, advantages, mask, aggregation="token-mean", **settings):
    losses, slopes, acts = oracles.dppo(logprobs, old_logprobs, advantages, mask, **settings)
    return _loss(losses, slopes, acts, mask, aggregation)


DPPO_FORMULA = (
    "With p = exp(logprobs), q = exp(old_logprobs), d = max_divergence: "
    "-A sg(min(p / q, max_ratio)) logprobs where kept, 0 otherwise. kind=tv keeps if A > 0 and "
    "p - q <= d, or A <= 0 and p - q >= -d. kind=kl keeps if q log(q/p) + (1-q) log((1-q)/(1-p)) "
    "<= d, or A > 0 and p <= q, or A <= 0 and p >= q. Of two d the first bounds A <= 0, the second "
    "A > 0."
)
DPPO_SOURCE = "DPPO, arXiv 2602.04879; max_ratio of verl"
DPPO_1 = {
    "logprobs": np.log([[0.95, 0.03], [0.9, 0.01]]).tolist(),
    "old_logprobs": np.log([[0.9, 0.01], [0.95, 0.03]]).tolist(),
    "advantages": [[1.0, 1.0], [-1.0, -1.0]],
    "mask": [[1, 1], [1, 1]],
}
DPPO_CASES = [
    Case("DPPO-1 tv", DPPO_1, {"kind": "tv", "max_divergence": 0.03}),
    Case("DPPO-1 kl", DPPO_1, {"kind": "kl", "max_divergence": 0.013}),
    Case("holes tv", TOKENS, {"kind": "tv", "max_divergence": 0.15}),
    Case("holes kl", TOKENS, {"kind": "kl", "max_divergence": 0.05}),
    Case("capped ratio", TOKENS, {"kind": "tv", "max_divergence": 0.9, "max_ratio": 1.5}),
    Case("no cap", TOKENS, {"kind": "kl", "max_divergence": 9.0, "max_ratio": None}),
    Case("no token", {**TOKENS, "mask": NOTHING}, {"kind": "tv", "max_divergence": 0.1}),
    Case("two bounds tv", TOKENS, {"kind": "tv", "max_divergence": [0.4, 0.05]}),
    Case("two bounds tv, the other way", TOKENS, {"kind": "tv", "max_divergence": [0.05, 0.4]}),
    Case("two bounds kl", TOKENS, {"kind": "kl", "max_divergence": [0.5, 0.01]}),
    Case("two bounds kl, the other way", TOKENS, {"kind": "kl", "max_divergence": [0.01, 0.5]}),
]

DPPO = [
    Vector(
        function="dppo_loss",
        formula=DPPO_FORMULA + REDUCED,
        source=DPPO_SOURCE,
        outputs=["loss", "metrics"],
        oracle=_dppo_loss,
        cases=[
            *DPPO_CASES,
            Case(
                "mean of sequences",
                TOKENS,
                {"kind": "tv", "max_divergence": 0.15, "aggregation": "seq-mean-token-mean"},
            ),
            *per_token(DPPO_CASES),
        ],
    ),
]


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

COVARIANCE = [
    Vector(
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
    ),
    Vector(
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
    ),
    Vector(
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
    ),
]

OFF_POLICY = {
    "logprobs": [[-2.0, -1.2, None], [-2.0, -1.2, -1.0], [-0.1, -0.1, -0.1], [-9.0, -9.0, -9.0]],
    "behaviour_logprobs": [[-1.0, -1.0, None], *[[-1.0, -1.0, -1.0]] * 3],
    "advantages": [[-1.0], [-1.0], [-1.0], [0.5]],
    "mask": [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 1]],
}

SELECTION = [
    Vector(
        function="top_entropy_mask",
        formula=(
            "The floor(fraction (N - 1)) + 1 highest of the N true entropies, and what is equal to "
            "the least of them; or those that are at least threshold."
        ),
        source="80/20 rule, arXiv 2506.01939; count as in TRL",
        outputs=["mask"],
        oracle=lambda *a, **k: {"mask": oracles.top_entropy_mask(*a, **k)},
        cases=[
            Case("a fifth of eight", {"entropy": H, "mask": ALL}),
            Case("all", {"entropy": H, "mask": ALL}, {"fraction": 1}),
            Case(
                "ties",
                {"entropy": [[1.0, 2.0, 2.0, 0.5, 3.0]], "mask": [[1] * 5]},
                {"fraction": 0.25},
            ),
            Case("holes", {"entropy": H_HOLES, "mask": H_MASK}, {"fraction": 0.5}),
            Case("threshold", {"entropy": H_HOLES, "mask": H_MASK}, {"threshold": 0.6}),
            Case("no token at all", {"entropy": H_HOLES, "mask": NOTHING}),
        ],
    ),
    Vector(
        function="off_policy_sequence_mask",
        formula=(
            "A sequence goes if A < 0 and mean_t(behaviour_logprobs - logprobs) > max_divergence."
        ),
        source="DeepSeek-V3.2, arXiv 2512.02556; 0.5 of TRL",
        outputs=["mask"],
        oracle=lambda *a, **k: {"mask": oracles.off_policy_sequence_mask(*a, **k)},
        cases=[
            Case("first goes", OFF_POLICY, {"max_divergence": 0.5}),
            Case("two go", OFF_POLICY, {"max_divergence": 0.3}),
            Case("all that are negative go", OFF_POLICY, {"max_divergence": -1.0}),
            Case(
                "one per token",
                {**OFF_POLICY, "advantages": [[-1.0, 2.0, None], *[[-1.0, 1.0, 0.0]] * 3]},
                {"max_divergence": 0.5},
            ),
        ],
    ),
]

VECTORS = [*HAPO, *DPPO, *COVARIANCE, *SELECTION]
