"""Rows of jrl/losses/diagnostics: along a response, and between a critic and its outcomes."""

import oracles
from oracles import diagnostics as slow

from vectors.call import of, scalar, token
from vectors.objective import Case, Objective
from vectors.tables.diagnostics.batches import ADVANTAGES, MASK, SOURCE, VALUES, _named

RETURNS = [
    [1.0, 1.0, 1.0, 1.0, None, None],
    [0.0, None, 0.0, 0.0, None, 0.0],
    [None] * 6,
    [None, None, 0.5, None, None, None],
    [0.9, 0.95, 1.0, 1.0, 0.8, 0.7],
]


ERRORS = [
    [0.2, 0.15, 0.1, 0.05, None, None],
    [-0.1, None, 0.3, -0.2, None, 0.02],
    [None] * 6,
    [None, None, 0.4, None, None, None],
    [0.25, -0.15, 0.05, 0.35, -0.3, 0.1],
]


# The identity of section 5 of the bias analysis: five errors, lam 0.9.
BIAS_1 = [[0.2, 0.15, 0.1, 0.05, 0.02]]


def _spread(per_row, mask):
    """Results of an oracle for the true tokens, put back in their places."""
    out, result = [[0.0] * len(mask[0]) for _ in mask], iter(per_row)
    for i, times in enumerate(oracles.rows(mask)):
        if times:
            for t, value in zip(times, next(result), strict=True):
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
    result = slow.calibration(values, per_row, mask, low, high, num_bins)
    return dict(zip(("brier", "ece", "predicted", "observed", "tokens"), result, strict=True))


ROWS = [
    Objective(
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
        defaults={"num_bins": 10},
        calls={"": scalar(num_bins=3)},
    ),
    Objective(
        function="diagnostics.relative_position",
        formula="floor(num_bins t / l) for the true token with rank t of l",
        source=SOURCE,
        outputs=["bins"],
        oracle=_relative_position,
        cases=[Case(f"{n} bins", {"mask": MASK}, {"num_bins": n}) for n in (2, 4, 10)],
        defaults={"num_bins": 10},
    ),
    Objective(
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
        defaults={"low": 0.0, "high": 1.0, "num_bins": 10},
        calls={"": scalar({"successes": lambda b: b["returns"] > 0.3}, num_bins=4)},
    ),
    Objective(
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
        defaults={"gamma": 1.0},
        calls={"": token({"errors": "returns"}, gamma=of("gamma"))},
    ),
    Objective(
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
        defaults={"gamma": 1.0},
        calls={"": scalar({"errors": "per_token"})},
    ),
]
