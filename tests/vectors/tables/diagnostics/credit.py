"""Rows of jrl/losses/diagnostics: lambdas, credit, lengths and groups."""

import jax.numpy as jnp
from oracles import diagnostics as slow

from vectors.call import of, scalar
from vectors.objective import Case, Objective
from vectors.tables.diagnostics.batches import ADVANTAGES, MASK, SOURCE, VALUES, _named

REWARDS = [
    [0.0, 0.0, 0.0, 1.0, None, None],
    [0.0, None, 0.0, 0.0, None, 0.25],
    [None] * 6,
    [None, None, -0.5, None, None, None],
    [0.0, 0.125, 0.0, 0.0, 0.0, 1.0],
]


def _terminal_reach(mask, lam, gamma=1.0, threshold=0.01):
    result = slow.terminal_reach(mask, [lam] * len(mask), gamma, threshold)
    return dict(zip(("share", "tokens", "horizon", "relative_horizon"), result, strict=True))


ROWS = [
    Objective(
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
        defaults={"gamma": 1.0, "threshold": 0.01},
        required={"lam": 0.5},
        calls={"": scalar(lam=0.5, threshold=0.2)},
    ),
    Objective(
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
        defaults={"gamma": 1.0, "edges": ()},
        required={"lam": 0.5},
        calls={"": scalar(lam=of("lam"), edges=(1, 3))},
    ),
    Objective(
        function="diagnostics.guard_rate",
        formula="share of responses of positive length l with 1 - 1 / (alpha l) <= floor",
        source="VAPO, arXiv 2504.05118",
        outputs=["rate"],
        oracle=lambda lengths, alpha, floor=0.0: {"rate": slow.guard_rate(lengths, alpha, floor)},
        cases=[
            Case("alpha .05", {"lengths": [10.0, 20.0, 21.0, 0.0, 400.0]}, {"alpha": 0.05}),
            Case("floor", {"lengths": [10.0, 300.0, 500.0]}, {"alpha": 0.05, "floor": 0.95}),
        ],
        defaults={"floor": 0.0},
        required={"alpha": 0.25},
        calls={
            "": scalar(
                {"lengths": lambda b: jnp.sum(b["mask"], axis=-1, dtype=jnp.int32)}, alpha=0.3
            )
        },
    ),
    Objective(
        function="diagnostics.within_between_variance",
        formula=(
            "mean over responses of the variance of A within, the variance over responses of the "
            "mean A, and their ratio (0 where the second is 0)"
        ),
        source=SOURCE,
        outputs=["within", "between", "ratio"],
        oracle=_named(("within", "between", "ratio"), slow.within_between_variance),
        cases=[Case("holes", {"advantages": ADVANTAGES, "mask": MASK})],
        calls={"": scalar()},
    ),
    Objective(
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
        defaults={"gamma": 1.0, "share": 0.05},
        calls={"": scalar(share=0.3)},
    ),
    Objective(
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
        defaults={"gamma": 1.0},
        calls={"": scalar()},
    ),
    Objective(
        function="diagnostics.length_share",
        formula="per bucket of response length: share of the responses, share of the tokens",
        source=SOURCE,
        outputs=["responses", "tokens"],
        oracle=_named(("responses", "tokens"), slow.length_share),
        cases=[
            Case(f"edges {edges}", {"mask": MASK}, {"edges": edges}) for edges in ([3], [1, 4, 5])
        ],
        required={"edges": (2,)},
        calls={"": scalar(edges=(1, 3))},
    ),
    Objective(
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
        calls={"": scalar()},
    ),
    Objective(
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
]
