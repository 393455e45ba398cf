"""Rows of jrl/losses/divergence.py and jrl/losses/logits.py."""

import jax.numpy as jnp
import numpy as np
import oracles

from vectors.call import of, token
from vectors.objective import Case, Objective

LOGPROBS, REFERENCE = [-1.0, -2.0, -0.5, -3.0], [-1.2, -1.5, -0.5, -2.0]


KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")


HOLES = [[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]


FAR = {
    "logprobs": [[-0.1, None, -31.0, -4.0], [None] * 4, [None, -0.7, None, -6.0]],
    "reference_logprobs": [[-27.0, None, -0.25, -1.5], [None] * 4, [None, -0.6, None, -0.5]],
    "mask": HOLES,
}


NONE = [None] * 5


LOGITS = [
    [
        [0.3, -1.2, 2.0, 0.0, 0.7],
        NONE,
        [1.0, "-inf", 0.5, -0.5, "-inf"],
        [5.0, 4.0, -3.0, 0.1, 0.2],
    ],
    [NONE, NONE, NONE, NONE],
    [NONE, [0.0, 0.0, 0.0, 0.0, 0.0], NONE, [700.0, 701.0, "-inf", 650.0, 699.5]],
]


REF_LOGITS = [
    [[0.0, -1.0, 1.5, 0.5, 0.5], NONE, [0.7, "-inf", 0.1, 0.0, 2.0], [1.0, 4.5, 0.3, -0.1, 0.0]],
    [NONE, NONE, NONE, NONE],
    [NONE, [0.0, 1.0, 2.0, 3.0, 4.0], NONE, [-700.0, -701.0, "-inf", -699.0, -698.5]],
]


# The policy may not lack a token that the reference allows, or this divergence is infinite.
SHARED_SUPPORT = [
    [REF_LOGITS[0][0], NONE, [0.7, "-inf", 0.1, 0.0, "-inf"], REF_LOGITS[0][3]],
    REF_LOGITS[1],
    REF_LOGITS[2],
]


TOKENS = [[2, 99, 3, 2], [0, 0, -7, 0], [0, 4, 0, 0]]


def _numbers(logits):
    return [float(z) for z in logits]


def per_token(mask, shape, one):
    """Values and derivatives of `one(row, time)` where the mask is true, zeros elsewhere."""
    values, slopes = np.zeros(np.shape(mask)), np.zeros(shape)
    for i, times in enumerate(oracles.rows(mask)):
        for t in times:
            values[i, t], slopes[i, t] = one(i, t)
    return values, slopes


def _kl_estimate(logprobs, reference_logprobs, mask=None, **settings):
    settings = {"kind": "k3", "max_log_ratio": 20.0, **settings}
    if mask is None:
        pairs = [
            oracles.kl_clamped_token(a - b, **settings)
            for a, b in zip(logprobs, reference_logprobs, strict=True)
        ]
        values, slopes = zip(*pairs, strict=True)
    else:
        values, slopes = per_token(
            mask,
            np.shape(mask),
            lambda i, t: oracles.kl_clamped_token(
                logprobs[i][t] - reference_logprobs[i][t], **settings
            ),
        )
    return {"kl": values, "gradients": {"logprobs": slopes}}


def _logits(name, one):
    def oracle(logits, *rest, chunk_size=None, mask, **settings):
        values, slopes = per_token(
            mask,
            np.shape(logits),
            lambda i, t: one(_numbers(logits[i][t]), *(x[i][t] for x in rest), **settings),
        )
        return {name: values, "gradients": {"logits": slopes}}

    return oracle


def _entropy(logits, mask, chunk_size=None):
    one = lambda z: (oracles.entropy(z), oracles.entropy_slopes(z))  # noqa: E731 - a value and its slopes
    return _logits("entropy", one)(logits, mask=mask)


def _kl_from_logits(logits, ref_logits, mask, chunk_size=None, **settings):
    one = lambda z, r, **given: oracles.kl_divergence(z, _numbers(r), **given)  # noqa: E731 - as above
    return _logits("kl", one)(logits, ref_logits, mask=mask, **settings)


def _logprobs(logits, tokens, mask, chunk_size=None):
    return _logits("logprobs", oracles.token_logprob)(logits, tokens, mask=mask)


CHUNKS = (None, 1, 2, 5)


CLAMPS = {"max_log_ratio": 20.0, "max_value": 10.0}


# Other logits than the policy's.
OTHER_LOGITS = {"ref_logits": lambda b: b["logits"][..., ::-1] / 2}


def some_tokens(b):
    """Some token of the vocabulary of three."""
    return (b["rewards"] > 0).astype(jnp.int32) + (b["returns"] > 0.5).astype(jnp.int32)


ROWS = [
    Objective(
        function="kl_estimate",
        formula=(
            "With d = logprobs - reference_logprobs, clamped to +-max_log_ratio: k1 = d; "
            "k2 = d^2/2; k3 = exp(-d) + d - 1; abs = |d|; then clamped to +-max_value. Where a "
            "clamp acts the derivative is 0. k1+, k3+ and abs+ have those values and, clamped or "
            "not, the derivative d."
        ),
        source="Schulman, http://joschu.net/blog/kl-approx.html; verl kl_penalty",
        outputs=["kl"],
        oracle=_kl_estimate,
        cases=[
            *(
                Case(
                    f"KL-1 {kind}",
                    {"logprobs": LOGPROBS, "reference_logprobs": REFERENCE},
                    {"kind": kind},
                )
                for kind in KINDS
                # |d| has no derivative at d = 0, and the third token lies there.
                if kind != "abs"
            ),
            Case(
                "KL-1 abs, off its kink",
                {
                    "logprobs": [*LOGPROBS[:2], LOGPROBS[3]],
                    "reference_logprobs": [*REFERENCE[:2], REFERENCE[3]],
                },
                {"kind": "abs"},
            ),
            *(Case(f"both clamps {kind}", FAR, {"kind": kind, **CLAMPS}) for kind in KINDS),
            *(
                Case(f"result clamped {kind}", FAR, {"kind": kind, "max_value": 3.0})
                for kind in ("k1", "k2", "abs", "k1+")
            ),
            Case("log-ratio clamped k3", FAR, {"kind": "k3", "max_log_ratio": 2.0}),
            Case("the usual clamp k3", FAR),
            Case("no clamp k3", FAR, {"max_log_ratio": None}),
        ],
        defaults={"kind": "k3", "max_log_ratio": 20.0},
        calls={kind: token(kind=kind, mask=of("mask")) for kind in KINDS if kind != "k1+"},
    ),
    Objective(
        function="kl_from_logits",
        formula=(
            "p = softmax(logits), q = softmax(ref_logits). policy||reference: "
            "sum_v p_v log(p_v/q_v), derivative p_v (log(p_v/q_v) - KL). reference||policy: "
            "sum_v q_v log(q_v/p_v), derivative p_v - q_v. 0 log 0 is 0. chunk_size changes "
            "no result."
        ),
        source="definition of the Kullback-Leibler divergence",
        outputs=["kl"],
        oracle=_kl_from_logits,
        cases=[
            Case(
                f"{direction}, chunk {chunk}",
                {"logits": LOGITS, "ref_logits": reference, "mask": HOLES},
                {"direction": direction, "chunk_size": chunk},
            )
            for direction, reference in (
                ("policy||reference", REF_LOGITS),
                ("reference||policy", SHARED_SUPPORT),
            )
            for chunk in CHUNKS
        ],
        defaults={"direction": "policy||reference"},
        calls={
            "": token(OTHER_LOGITS),
            "in chunks": token(OTHER_LOGITS, chunk_size=2),
            "reverse in chunks": token(OTHER_LOGITS, direction="reference||policy", chunk_size=2),
        },
    ),
    Objective(
        function="entropy_from_logits",
        formula=(
            "H = -sum_v p_v log p_v with p = softmax(logits); derivative by logits_v: "
            "-p_v (log p_v + H). A logit of -inf adds nothing. chunk_size changes no result."
        ),
        source="definition of Shannon's entropy",
        outputs=["entropy"],
        oracle=_entropy,
        cases=[
            Case(f"chunk {chunk}", {"logits": LOGITS, "mask": HOLES}, {"chunk_size": chunk})
            for chunk in CHUNKS
        ],
        calls={"": token(), "in chunks": token(chunk_size=2)},
    ),
    Objective(
        function="logprobs_from_logits",
        formula=(
            "logits_token - log sum_v exp(logits_v); derivative by logits_v: [v = token] - p_v. "
            "chunk_size changes no result."
        ),
        source="definition of the softmax",
        outputs=["logprobs"],
        oracle=_logprobs,
        cases=[
            Case(
                f"chunk {chunk}",
                {"logits": LOGITS, "tokens": TOKENS, "mask": HOLES},
                {"chunk_size": chunk},
            )
            for chunk in CHUNKS
        ],
        calls={"": token({"tokens": some_tokens}, chunk_size=2)},
    ),
]
