"""Rows of jrl/losses/rewards.py and coefficients.py, and the mean of a mask."""

import math

import oracles

from vectors.call import scalar
from vectors.objective import Case, Objective


def _pass_at_k(num_samples, num_correct, k):
    pairs = zip(num_samples, num_correct, strict=True)
    return {"chance": [oracles.share_of_draws(n, c, k) for n, c in pairs]}


COUNTS = {"num_samples": [4, 4, 4, 4, 4, 9, 12], "num_correct": [0, 1, 2, 3, 4, 2, 1]}


LENGTHS = [16384, 16385, 17408, 18432, 20479, 20480, 20481, 22528]


PAPER = {"max_length": 20480, "buffer": 4096}


X = [[1.0, None, -2.5, 4.0], [None, 0.5, None, 7.25], [None] * 4]


MASK = [[1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]


def _overlong_penalty(lengths, **settings):
    return {"penalty": [oracles.overlong_penalty(length, **settings) for length in lengths]}


def _overlong_filter(mask, truncated):
    return {"mask": oracles.overlong_filter(mask, truncated)}


def _informative(scores, groups):
    return {"informative": oracles.informative(scores, groups)}


def _masked_mean(x, mask, axis=None):
    if axis is None:
        chosen = [x[i][t] for i, times in enumerate(oracles.rows(mask)) for t in times]
        return {"mean": math.fsum(chosen) / max(len(chosen), 1)}
    lines = list(zip(*x, strict=True)) if axis == 0 else x
    masks = list(zip(*mask, strict=True)) if axis == 0 else mask
    means = []
    for line, true in zip(lines, masks, strict=True):
        chosen = [value for value, counts in zip(line, true, strict=True) if counts]
        means.append(math.fsum(chosen) / max(len(chosen), 1))
    return {"mean": means}


def _kl_coefficient(coefficient, kl, **settings):
    return {"coefficient": oracles.adaptive_kl_coefficient(coefficient, kl, **settings)}


def _entropy_coefficient(coefficient, entropy, **settings):
    kept, applied = oracles.adaptive_entropy_coefficient(coefficient, entropy, **settings)
    return {"coefficient": kept, "applied": applied}


def _sequence():
    """KL-2: each case begins with what the one before it gave."""
    coefficient, settings = 0.2, {"target": 6.0, "num_samples": 256, "horizon": 10000.0}
    for number, kl in enumerate((3.0, 12.0, 6.0), start=1):
        yield Case(f"KL-2 step {number}", {"coefficient": coefficient, "kl": kl}, settings)
        coefficient = oracles.adaptive_kl_coefficient(coefficient, kl, **settings)


ROWS = [
    Objective(
        function="masked_mean",
        formula="sum(mask x) / sum(mask), over everything or along an axis; 0 if none is true.",
        source="definition",
        outputs=["mean"],
        oracle=_masked_mean,
        cases=[
            Case("everything", {"x": X, "mask": MASK}),
            Case("along time", {"x": X, "mask": MASK}, {"axis": 1}),
            Case("along rows", {"x": X, "mask": MASK}, {"axis": 0}),
            Case("nothing", {"x": [[None] * 2], "mask": [[0, 0]]}),
        ],
        calls={"": scalar({"x": "per_token"})},
    ),
    Objective(
        function="overlong_penalty",
        formula=(
            "0 up to max_length - buffer, then (max_length - buffer - length) / buffer, and no "
            "less than floor; with buffer = 0 it is max_length - length beyond max_length."
        ),
        source="DAPO, arXiv 2503.14476, eq. 13; verl for floor = none",
        outputs=["penalty"],
        oracle=_overlong_penalty,
        cases=[
            Case("OVERLONG-1 paper", {"lengths": LENGTHS}, PAPER),
            Case("OVERLONG-1 verl", {"lengths": LENGTHS}, {**PAPER, "floor": None}),
            Case("no buffer", {"lengths": [0, 6, 7, 8, 9]}, {"max_length": 7, "buffer": 0}),
            Case(
                "another floor",
                {"lengths": [5, 9, 12]},
                {"max_length": 8, "buffer": 2, "floor": -1.5},
            ),
        ],
        defaults={"floor": -1.0},
        required={"max_length": 4, "buffer": 2},
    ),
    Objective(
        function="overlong_filter",
        formula="mask and not truncated, row by row.",
        source="DAPO, arXiv 2503.14476, section 3.4",
        outputs=["mask"],
        oracle=_overlong_filter,
        cases=[
            Case("a row of each kind", {"mask": MASK, "truncated": [0, 1, 1]}),
            Case("none", {"mask": MASK, "truncated": [False, False, False]}),
        ],
    ),
    Objective(
        function="informative_groups",
        formula="True for the rows whose group holds two different scores.",
        source="DAPO, arXiv 2503.14476, eq. 11",
        outputs=["informative"],
        oracle=_informative,
        cases=[
            Case(
                "mixed, right, wrong, alone",
                {"scores": [1, 0, 1, 1, 0, 0, 1], "groups": [7, 2, 7, 3, 2, 7, 3]},
            ),
            Case(
                "scores that are no binary fraction",
                {"scores": [0.1, 0.1, 0.1, 0.3], "groups": [4, 4, 9, 9]},
            ),
        ],
    ),
    Objective(
        function="adaptive_kl_coefficient",
        formula="coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon)",
        source="Ziegler et al., arXiv 1909.08593, section 2.2",
        outputs=["coefficient"],
        oracle=_kl_coefficient,
        cases=[
            *_sequence(),
            Case(
                "within the bound",
                {"coefficient": 0.05, "kl": 0.011},
                {"target": 0.01, "num_samples": 512, "horizon": 2000.0},
            ),
        ],
        required={"target": 0.5, "num_samples": 8, "horizon": 16},
    ),
    Objective(
        function="adaptive_entropy_coefficient",
        formula=(
            "If entropy <= target: coefficient + step, applied; if not, coefficient - step, and 0 "
            "is applied. The coefficient stays in [low, high]."
        ),
        source="Skywork-OR1, arXiv 2505.22312; TRL GRPO",
        outputs=["coefficient", "applied"],
        oracle=_entropy_coefficient,
        cases=[
            Case("low entropy", {"coefficient": 0.01, "entropy": 0.1}),
            Case("high entropy", {"coefficient": 0.01, "entropy": 0.7}),
            Case("at the target", {"coefficient": 0.01, "entropy": 0.25}, {"target": 0.25}),
            Case("at the lower end", {"coefficient": 0.002, "entropy": 5.5}, {"target": 5.0}),
            Case(
                "at the upper end", {"coefficient": 0.5, "entropy": 0.0}, {"high": 0.5, "step": 0.1}
            ),
            Case("a lower end above zero", {"coefficient": 0.1, "entropy": 1.0}, {"low": 0.1}),
        ],
        defaults={"target": 0.2, "step": 0.005, "low": 0.0, "high": 1.0},
    ),
    Objective(
        function="pass_at_k",
        formula="1 - C(n - c, k) / C(n, k), n samples of which c are correct",
        source="Chen et al., arXiv 2107.03374, eq. 1",
        outputs=["chance"],
        oracle=_pass_at_k,
        cases=[Case(f"k {k}", COUNTS, {"k": k}) for k in (1, 2, 4)],
        required={"k": 2},
    ),
]
