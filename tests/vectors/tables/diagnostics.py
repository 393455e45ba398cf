"""Vectors of the diagnostics, and of the statistics that other functions take."""

import math

import oracles
from oracles import diagnostics as slow

from vectors.vector import Case, Vector

# Right padding, a hole, a row without a token, a single token, a full row.
MASK = [
    [1, 1, 1, 1, 0, 0],
    [1, 0, 1, 1, 0, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [1, 1, 1, 1, 1, 1],
]
VALUES = [
    [0.5, 0.6, 0.7, 0.8, None, None],
    [0.4, None, 0.3, 0.2, None, 0.1],
    [None] * 6,
    [None, None, 0.45, None, None, None],
    [0.35, 0.5, 0.15, 0.65, 0.9, 1.1],
]
RETURNS = [
    [1.0, 1.0, 1.0, 1.0, None, None],
    [0.0, None, 0.0, 0.0, None, 0.0],
    [None] * 6,
    [None, None, 0.5, None, None, None],
    [0.9, 0.95, 1.0, 1.0, 0.8, 0.7],
]
REWARDS = [
    [0.0, 0.0, 0.0, 1.0, None, None],
    [0.0, None, 0.0, 0.0, None, 0.25],
    [None] * 6,
    [None, None, -0.5, None, None, None],
    [0.0, 0.125, 0.0, 0.0, 0.0, 1.0],
]
ADVANTAGES = [
    [0.4, 0.3, -0.2, 0.2, None, None],
    [-0.6, None, -0.25, 0.1, None, -0.4],
    [None] * 6,
    [None, None, 0.75, None, None, None],
    [0.5, -0.125, 0.3, -0.35, 0.15, 0.05],
]
ERRORS = [
    [0.2, 0.15, 0.1, 0.05, None, None],
    [-0.1, None, 0.3, -0.2, None, 0.02],
    [None] * 6,
    [None, None, 0.4, None, None, None],
    [0.25, -0.15, 0.05, 0.35, -0.3, 0.1],
]
LOGPROBS = [
    [-0.9, -2.3, -0.5, -0.05, None, None],
    [-0.2, None, -1.0, -3.0, None, -0.4],
    [None] * 6,
    [None, None, -1.2, None, None, None],
    [-0.7, -0.6, -1.5, -2.2, -0.1, -0.3],
]
SAMPLER = [
    [-1.0, -2.1, -0.5, -0.15, None, None],
    [-0.7, None, -1.1, -2.6, None, -0.4],
    [None] * 6,
    [None, None, -1.0, None, None, None],
    [-0.75, -0.6, -1.3, -2.4, -0.05, -0.35],
]
ENTROPY = [
    [0.02, 0.05, 0.1, 0.3, None, None],
    [0.6, None, 0.9, 1.2, None, 2.0],
    [None] * 6,
    [None, None, 0.45, None, None, None],
    [0.7, 0.15, 1.6, 0.35, 0.8, 1e-9],
]
# The identity of section 5 of the bias analysis: five errors, lam 0.9.
BIAS_1 = [[0.2, 0.15, 0.1, 0.05, 0.02]]
SOURCE = "Concerns of arXiv 2505.17997 and 2506.03038; the formulas are this library's"


def _named(names, function):
    """The results of an oracle under their names."""

    def oracle(*args, **settings):
        return dict(zip(names, function(*args, **settings), strict=True))

    return oracle


def _spread(per_row, mask):
    """What an oracle says of the true tokens, back in its place."""
    out, found = [[0.0] * len(mask[0]) for _ in mask], iter(per_row)
    for i, times in enumerate(oracles.rows(mask)):
        if times:
            for t, value in zip(times, next(found), strict=True):
                out[i][t] = value
    return out


def _relative_position(mask, num_bins=10):
    out = [[0] * len(mask[0]) for _ in mask]
    for i, times in enumerate(oracles.rows(mask)):
        for rank, t in enumerate(times):
            out[i][t] = num_bins * rank // len(times)
    # Positions under the mask mean nothing and are not compared.
    return {
        "bins": [
            [b if m else None for b, m in zip(bs, ms, strict=True)]
            for bs, ms in zip(out, mask, strict=True)
        ]
    }


def _calibration(values, successes, mask, low=0.0, high=1.0, num_bins=10):
    per_row = [row[0] for row in successes]
    found = slow.calibration(values, per_row, mask, low, high, num_bins)
    return dict(zip(("brier", "ece", "predicted", "observed", "tokens"), found, strict=True))


def _terminal_reach(mask, lam, gamma=1.0, threshold=0.01):
    found = slow.terminal_reach(mask, [lam] * len(mask), gamma, threshold)
    return dict(zip(("share", "tokens", "horizon", "relative_horizon"), found, strict=True))


def _covariance_statistics(logprobs, advantages, mask):
    places = [(i, t) for i, times in enumerate(oracles.rows(mask)) for t in times]
    return {
        name: math.fsum(x[i][t] for i, t in places) / len(places)
        for name, x in (("advantages", advantages), ("logprobs", logprobs))
    }


def _entropy_threshold(entropy, mask, fraction=0.2):
    values = sorted(entropy[i][t] for i, times in enumerate(oracles.rows(mask)) for t in times)
    return {"threshold": values[-(math.floor(fraction * (len(values) - 1) + 1e-6) + 1)]}


STATISTICS = (
    "kl",
    "k3_kl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "chi2_token",
    "chi2_seq",
    "weight",
    "eff_sample_size",
)
VECTORS = [
    Vector(
        function="diagnostics.by_position",
        formula=(
            "Token with rank t of l true tokens falls into bin floor(num_bins t / l). Per bin: "
            "1 - Var(V - G) / Var(G) (0 where G does not vary), mean(V - G), the root of "
            "mean((V - G)^2), and how many tokens."
        ),
        source=SOURCE,
        outputs=["explained_variance", "bias", "error", "tokens"],
        oracle=_named(("explained_variance", "bias", "error", "tokens"), slow.by_position),
        cases=[
            Case(
                f"{num_bins} bins",
                {"values": VALUES, "returns": RETURNS, "mask": MASK},
                {"num_bins": num_bins},
            )
            for num_bins in (2, 3, 5)
        ],
    ),
    Vector(
        function="diagnostics.relative_position",
        formula="floor(num_bins t / l) for the true token with rank t of l",
        source=SOURCE,
        outputs=["bins"],
        oracle=_relative_position,
        cases=[Case(f"{n} bins", {"mask": MASK}, {"num_bins": n}) for n in (2, 4, 10)],
    ),
    Vector(
        function="diagnostics.calibration",
        formula=(
            "p = clip((V - low) / (high - low), 0, 1). Brier score mean((p - success)^2); per bin "
            "[k, k + 1) / num_bins of p its mean, the mean success and the number of tokens; "
            "ece is the mean over tokens of the bin's |mean p - mean success|."
        ),
        source="Brier, 1950; Naeini et al., 2015",
        outputs=["brier", "ece", "predicted", "observed", "tokens"],
        oracle=_calibration,
        cases=[
            Case(
                name,
                {"values": VALUES, "successes": [[1], [0], [1], [0], [1]], "mask": MASK},
                settings,
            )
            for name, settings in (
                ("ten bins", {}),
                ("rewards from -1 to 1, three bins", {"low": -1.0, "high": 1.0, "num_bins": 3}),
            )
        ],
    ),
    Vector(
        function="diagnostics.bootstrap_bias",
        formula="B_t = (1 - lam) sum_{k=1}^{T-1-t} lam^(k-1) e_{t+k} over the true tokens",
        source=SOURCE,
        outputs=["bias"],
        oracle=lambda errors, mask, lam: {
            "bias": _spread(slow.bootstrap_bias(errors, mask, lam), mask)
        },
        cases=[
            Case("BIAS-1", {"errors": BIAS_1, "mask": [[1] * 5], "lam": 0.9}),
            *(
                Case(f"holes, lam {lam}", {"errors": ERRORS, "mask": MASK, "lam": lam})
                for lam in (0.0, 0.5, 0.95, 1.0)
            ),
        ],
    ),
    Vector(
        function="diagnostics.bootstrap_bias_bound",
        formula=(
            "mean |B_t| of bootstrap_bias, mean over tokens of max|e| (1 - lam^(T-1-t)), and the "
            "first over the standard deviation of the advantages"
        ),
        source=SOURCE,
        outputs=["bias", "bound", "relative"],
        oracle=_named(("bias", "bound", "relative"), slow.bootstrap_bias_bound),
        cases=[
            Case(
                f"lam {lam}",
                {"errors": ERRORS, "advantages": ADVANTAGES, "mask": MASK, "lam": lam},
            )
            for lam in (0.5, 0.95)
        ],
    ),
    Vector(
        function="diagnostics.terminal_reach",
        formula=(
            "With d = gamma lam: the share of tokens with d^(T-1-t) > threshold, how many per "
            "response, the mean of 1 / (1 - d), and of that over the length, at most 1 each"
        ),
        source=SOURCE,
        outputs=["share", "tokens", "horizon", "relative_horizon"],
        oracle=_terminal_reach,
        cases=[
            Case("lam .5", {"mask": MASK}, {"lam": 0.5, "threshold": 0.2}),
            Case("a discount", {"mask": MASK}, {"lam": 0.9, "gamma": 0.4, "threshold": 0.1}),
            Case("lam .95", {"mask": MASK}, {"lam": 0.95}),
        ],
    ),
    Vector(
        function="diagnostics.lambda_sensitivity",
        formula=(
            "Per bucket of response length (edges belong below): Pearson correlation of GAE "
            "advantages at lam with those at 1, the share of tokens with equal sign, and tokens"
        ),
        source=SOURCE,
        outputs=["correlation", "sign_agreement", "tokens"],
        oracle=_named(("correlation", "sign_agreement", "tokens"), slow.lambda_sensitivity),
        cases=[
            Case(
                f"lam {lam}, edges {edges}",
                {"rewards": REWARDS, "values": VALUES, "mask": MASK},
                {"lam": lam, "edges": edges},
            )
            for lam, edges in ((0.5, [3]), (0.9, [1, 4]))
        ],
    ),
    Vector(
        function="diagnostics.guard_rate",
        formula="share of responses of positive length l with 1 - 1 / (alpha l) <= floor",
        source="VAPO, arXiv 2504.05118",
        outputs=["rate"],
        oracle=lambda lengths, alpha, floor=0.0: {"rate": slow.guard_rate(lengths, alpha, floor)},
        cases=[
            Case("alpha .05", {"lengths": [10.0, 20.0, 21.0, 0.0, 400.0]}, {"alpha": 0.05}),
            Case("floor", {"lengths": [10.0, 300.0, 500.0]}, {"alpha": 0.05, "floor": 0.95}),
        ],
    ),
    Vector(
        function="diagnostics.within_between_variance",
        formula=(
            "mean over responses of the variance of A within, the variance over responses of the "
            "mean A, and their ratio (0 where the second is 0)"
        ),
        source=SOURCE,
        outputs=["within", "between", "ratio"],
        oracle=_named(("within", "between", "ratio"), slow.within_between_variance),
        cases=[Case("holes", {"advantages": ADVANTAGES, "mask": MASK})],
    ),
    Vector(
        function="diagnostics.td_concentration",
        formula=(
            "Of |delta_t| = |r_t + V_{t+1} - V_t| in each response: its Gini coefficient, the mass "
            "of the largest ceil(share l) of them, both as means over responses, and the largest "
            "gap |sum delta - (R - V_0)|, which is 0 but for rounding"
        ),
        source=SOURCE,
        outputs=["gini", "top_mass", "identity_gap"],
        oracle=_named(("gini", "top_mass", "identity_gap"), slow.td_concentration),
        cases=[
            Case(
                f"share {share}",
                {"rewards": REWARDS, "values": VALUES, "mask": MASK},
                {"share": share},
            )
            for share in (0.05, 0.5)
        ],
    ),
    Vector(
        function="diagnostics.outcome_contradiction",
        formula="share of tokens with sign(A_t) different from sign(R - V_0) of their response",
        source=SOURCE,
        outputs=["share"],
        oracle=lambda **arrays: {"share": slow.outcome_contradiction(**arrays)},
        cases=[
            Case(
                "holes",
                {"rewards": REWARDS, "values": VALUES, "advantages": ADVANTAGES, "mask": MASK},
            )
        ],
    ),
    Vector(
        function="diagnostics.length_share",
        formula="per bucket of response length: share of the responses, share of the tokens",
        source=SOURCE,
        outputs=["responses", "tokens"],
        oracle=_named(("responses", "tokens"), slow.length_share),
        cases=[
            Case(f"edges {edges}", {"mask": MASK}, {"edges": edges}) for edges in ([3], [1, 4, 5])
        ],
    ),
    Vector(
        function="diagnostics.negative_share",
        formula=(
            "Of responses whose mean advantage is negative: share of the responses, of the tokens, "
            "mean length; mean length of those where it is positive; mean A over all tokens"
        ),
        source=SOURCE,
        outputs=["responses", "tokens", "length", "other_length", "drift"],
        oracle=_named(
            ("responses", "tokens", "length", "other_length", "drift"), slow.negative_share
        ),
        cases=[Case("holes", {"advantages": ADVANTAGES, "mask": MASK})],
    ),
    Vector(
        function="diagnostics.group_degeneracy",
        formula=(
            "share of groups all right, share all wrong, mean share right, share with one right, "
            "and the difference of the last two"
        ),
        source=SOURCE,
        outputs=["all_right", "all_wrong", "pass_at_1", "pass_at_k", "gap"],
        oracle=_named(
            ("all_right", "all_wrong", "pass_at_1", "pass_at_k", "gap"), slow.group_degeneracy
        ),
        cases=[
            Case(
                "groups of several sizes",
                {"correct": [1, 1, 0, 0, 1, 0, 1], "groups": [4, 4, 9, 9, 2, 2, 2]},
            )
        ],
    ),
    Vector(
        function="mismatch_statistics",
        formula=(
            "With x = logprobs - sampler_logprobs over the true tokens: mean(-x), "
            "mean(e^x - 1 - x), over sequences the mean of -mean(x) and of |mean(x)|, "
            "mean(e^2x) - 1 over tokens and over sequences of sum(x), mean(e^x), and "
            "1 / mean((e^x / mean(e^x))^2)"
        ),
        source="verl, rollout correction; Kish, 1965, for the effective sample size",
        outputs=STATISTICS,
        oracle=oracles.mismatch_statistics,
        cases=[
            Case("holes", {"logprobs": LOGPROBS, "sampler_logprobs": SAMPLER, "mask": MASK}),
            Case("equal", {"logprobs": SAMPLER, "sampler_logprobs": SAMPLER, "mask": MASK}),
        ],
    ),
    Vector(
        function="entropy_statistics",
        formula=(
            "Of log max(H, 1e-8) over the true tokens: the order statistic "
            "round(quantile (N - 1)), the root mean square distance from it, and the greatest and "
            "least distance over that"
        ),
        source="HAPO, arXiv 2509.16591",
        outputs=["pivot", "scale", "h_max", "h_min"],
        oracle=_named(("pivot", "scale", "h_max", "h_min"), oracles.entropy_statistics),
        cases=[
            Case(f"quantile {q}", {"entropy": ENTROPY, "mask": MASK}, {"quantile": q})
            for q in (0.8, 0.5)
        ],
    ),
    Vector(
        function="entropy_threshold",
        formula="the floor(fraction (N - 1)) + 1 greatest entropy of the N true tokens",
        source="Wang et al., arXiv 2506.01939",
        outputs=["threshold"],
        oracle=_entropy_threshold,
        cases=[
            Case(f"fraction {f}", {"entropy": ENTROPY, "mask": MASK}, {"fraction": f})
            for f in (0.2, 0.5)
        ],
    ),
    Vector(
        function="covariance_statistics",
        formula="means of the advantages and of the log-probabilities over the true tokens",
        source="Cui et al., arXiv 2505.22617",
        outputs=["advantages", "logprobs"],
        oracle=_covariance_statistics,
        cases=[
            Case("holes", {"logprobs": LOGPROBS, "advantages": ADVANTAGES, "mask": MASK}),
        ],
    ),
]
