"""Rows of jrl/losses/distillation.py and of `jsd_from_logits`."""

import numpy as np
import oracles

from vectors.call import of, token
from vectors.objective import Case, Objective
from vectors.tables.divergence import (
    CHUNKS,
    HOLES,
    LOGITS,
    NONE,
    REF_LOGITS,
    SHARED_SUPPORT,
    per_token,
)

SAMPLED = {
    "logprobs": [[-0.1, None, -31.0, -4.0], [None] * 4, [None, -0.7, None, -6.0]],
    "teacher_logprobs": [[-27.0, None, -0.25, -1.5], [None] * 4, [None, -0.7, None, -0.5]],
}


BEYOND = {
    **SAMPLED,
    "reference_logprobs": [[-2.0, None, -24.0, -1], [None] * 4, [None, -1, None, -7.0]],
}


KL = [[0.25, None, 0.0, 3.5], [None] * 4, [None, 1.25, None, 0.75]]


# The last place of a row may have no token.
TOP = [
    [[-0.5, -2.0, -6.0], NONE[:3], [-3.0, -4.0, -5.0], [-0.01, -9.0, -8.0]],
    [NONE[:3]] * 4,
    [NONE[:3], [-1.0, -1.5, -0.1], NONE[:3], [-1.0, -2.0, -3.0]],
]


TEACHER_TOP = [
    [[-0.2, -2.5, -3.0], NONE[:3], [-0.4, -1.5, -3.5], [-0.7, -0.8, -9.0]],
    [NONE[:3]] * 4,
    [NONE[:3], [-1.2, -1.4, "-inf"], NONE[:3], [-1.0, -2.0, -3.0]],
]


def _advantages(one):
    def oracle(*arrays, mask, kl=None, **settings):
        advantages = np.zeros(np.shape(mask))
        for i, times in enumerate(oracles.rows(mask)):
            for t in times:
                baseline = {} if kl is None else {"kl": kl[i][t]}
                advantages[i, t] = one(*(x[i][t] for x in arrays), **settings, **baseline)
        return {"advantages": advantages}

    return oracle


def _sampled(logprobs, teacher_logprobs, mask, **settings):
    one = _advantages(oracles.distillation_advantage)
    return one(logprobs, teacher_logprobs, mask=mask, **settings)


def _extrapolated(logprobs, teacher_logprobs, reference_logprobs, mask, **settings):
    one = _advantages(oracles.extrapolated_advantage)
    return one(logprobs, teacher_logprobs, reference_logprobs, mask=mask, **settings)


def _divergence(one, name):
    def oracle(first, teacher, mask, chunk_size=None, **settings):
        numbers = lambda x: [float(z) for z in x]  # noqa: E731 - "-inf" is a number
        values, slopes = per_token(
            mask,
            np.shape(first),
            lambda i, t: one(numbers(first[i][t]), numbers(teacher[i][t]), **settings),
        )
        return {"divergence": values, "gradients": {name: slopes}}

    return oracle


def _jsd(logits, teacher_logits, mask, **settings):
    return _divergence(oracles.jsd, "logits")(logits, teacher_logits, mask, **settings)


def _top_k(top_logprobs, teacher_top_logprobs, mask, **settings):
    oracle = _divergence(oracles.top_k_divergence, "top_logprobs")
    return oracle(top_logprobs, teacher_top_logprobs, mask, **settings)


# Of a teacher, from a batch that has none.
OTHER_LOGITS = {"teacher_logits": lambda b: b["logits"][..., ::-1] / 2}
TEACHER = {"teacher_logprobs": "reference_logprobs"}
# Below 0 whatever is drawn, and of probabilities that sum to less than 1.
TOP_LOGPROBS = {
    "top_logprobs": lambda b: b["logits"] / 4 - 5,
    "teacher_top_logprobs": lambda b: b["logits"][..., ::-1] / 8 - 2,
}


ADVANTAGES = [
    Objective(
        function="distillation_advantages",
        formula=(
            "d = logprobs - teacher_logprobs, clamped to +-max_log_ratio; "
            "A = -coefficient (d - kl), kl being 0 if it is not given; 0 under the mask."
        ),
        source="Thinking Machines, On-policy distillation; arXiv:2605.07865 (kl)",
        outputs=["advantages"],
        oracle=_sampled,
        cases=[
            Case("defaults", {**SAMPLED, "mask": HOLES}),
            Case("baseline", {**SAMPLED, "mask": HOLES}, {"coefficient": 0.5, "kl": KL}),
            Case("no clamp", {**SAMPLED, "mask": HOLES}, {"max_log_ratio": None}),
            Case("coefficient 0", {**SAMPLED, "mask": HOLES}, {"coefficient": 0}),
        ],
        defaults={"coefficient": 1.0, "max_log_ratio": 20.0},
        calls={"": token(TEACHER), "baseline": token(TEACHER, kl=of("entropy"))},
    ),
    Objective(
        function="extrapolated_distillation_advantages",
        formula=(
            "A = scale (teacher_logprobs - reference_logprobs) - (logprobs - reference_logprobs), "
            "both differences clamped to +-max_log_ratio; 0 under the mask."
        ),
        source="arXiv:2602.12125",
        outputs=["advantages"],
        oracle=_extrapolated,
        cases=[
            Case("defaults", {**BEYOND, "mask": HOLES}),
            Case("the teacher", {**BEYOND, "mask": HOLES}, {"scale": 1, "max_log_ratio": None}),
        ],
        defaults={"scale": 1.25, "max_log_ratio": 20.0},
        calls={"": token({"teacher_logprobs": "behaviour_logprobs"}, scale=1.5)},
    ),
]


ROWS = [
    *ADVANTAGES,
    Objective(
        function="jsd_from_logits",
        formula=(
            "p = softmax(logits), q = softmax(teacher_logits), m = beta q + (1 - beta) p. "
            "beta 0: KL(q||p); beta 1: KL(p||q); between: beta KL(q||m) + (1 - beta) KL(p||m). "
            "Derivatives by logits_v: p_v - q_v; p_v (log(p_v/q_v) - KL); "
            "(1 - beta) p_v (log(p_v/m_v) - KL(p||m)). 0 log 0 is 0. chunk_size changes no result."
        ),
        source="arXiv:2306.13649, eq. 1, with the limits of TRL",
        outputs=["divergence"],
        oracle=_jsd,
        cases=[
            Case(
                f"beta {beta}, chunk {chunk}",
                {"logits": LOGITS, "teacher_logits": teacher, "mask": HOLES},
                {"beta": beta, "chunk_size": chunk},
            )
            for beta, teacher in (
                (0, SHARED_SUPPORT),
                (0.1, REF_LOGITS),
                (0.5, REF_LOGITS),
                (0.9, REF_LOGITS),
                (1, REF_LOGITS),
            )
            for chunk in (CHUNKS if beta == 0.1 else (2,))
        ],
        defaults={"beta": 0.5},
        calls={
            "": token(OTHER_LOGITS),
            "in chunks": token(OTHER_LOGITS, beta=0.9, chunk_size=2),
            "reverse": token(OTHER_LOGITS, beta=1),
        },
    ),
    Objective(
        function="top_k_divergence",
        formula=(
            "p_j = exp(top_logprobs_j), q_j = exp(teacher_top_logprobs_j) for the places that have "
            "a token (not -inf), and p, q of the rest = 1 - their sum. The divergence of "
            "jsd_from_logits on these k + 1 events. Derivative of beta 1 by top_logprobs_j: "
            "p_j (log(p_j/q_j) - log(p_rest/q_rest))."
        ),
        source="arXiv:2605.11182",
        outputs=["divergence"],
        oracle=_top_k,
        cases=[
            Case(
                f"beta {beta}",
                {"top_logprobs": TOP, "teacher_top_logprobs": TEACHER_TOP, "mask": HOLES},
                {"beta": beta},
            )
            for beta in (0, 0.3, 1)
        ],
        defaults={"beta": 1.0},
        calls={"": token(TOP_LOGPROBS), "mixture": token(TOP_LOGPROBS, beta=0.5)},
    ),
]
