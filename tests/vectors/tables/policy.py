"""Vectors of jrl/losses/policy: the clip, ratios of sequences, weights, gates, imitation."""

from math import log

import oracles

from vectors.vector import Case, Vector, per_token

# SEQ-1: two responses of three and two tokens.
OLD = [[-1.0, -2.0, -0.5], [-0.7, -1.1, None]]
NEW = [[-0.9, -2.3, -0.5], [-0.2, -1.0, None]]
LENGTHS = [[1, 1, 1], [1, 1, 0]]
SEQ_1 = {
    "logprobs": NEW,
    "old_logprobs": OLD,
    "advantages": [[1.0], [-0.5]],
    "mask": LENGTHS,
}

# Holes, left padding, a row without a token, a single token; advantages of each token, one of 0.
HOLES = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
UNEVEN = {
    "logprobs": [
        [-0.4, None, -1.5, -0.2],
        [None, -2.2, -0.9, None],
        [None] * 4,
        [None, None, None, -0.6],
    ],
    "old_logprobs": [
        [-0.9, None, -1.3, -0.25],
        [None, -1.4, -1.2, None],
        [None] * 4,
        [None, None, None, -1.6],
    ],
    "advantages": [
        [1.5, None, -0.5, 0.75],
        [None, -1.25, 0.0, None],
        [None] * 4,
        [None, None, None, -2.0],
    ],
    "mask": HOLES,
}
WEIGHTS = [[0.5, None, 2.0, 1.25], [None, 0.75, 1.5, None], [None] * 4, [None, None, None, 3.0]]
ROW_WEIGHTS = [[0.5], [2.0], [7.0], [1.5]]
LOW = [[0.1, None, 0.05, 0.3], [None, 0.3, 0.1, None], [None] * 4, [None, None, None, 0.2]]
HIGH = [[0.7, None, 0.1, 0.02], [None, 0.2, 0.4, None], [None] * 4, [None, None, None, 0.1]]
# Log-ratios on both sides of the clamp at 20 nats, with either sign of the advantage.
EXTREME = {
    "logprobs": [[-30.0, -0.5, -0.1], [-25.0, -1.0, -0.2]],
    "old_logprobs": [[-1.0, -24.0, -0.3], [-0.5, -28.0, -0.2]],
    "advantages": [[1.0], [-1.0]],
    "mask": [[1, 1, 1], [1, 1, 1]],
}
NOTHING = {**SEQ_1, "mask": [[0, 0, 0], [0, 0, 0]]}

MODES = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"max_length": 5},
}


def per_row(inputs):
    """The inputs with one advantage for each row, the others as they are."""
    return {**inputs, "advantages": [[1.5], [-1.25], [9.0], [-2.0]]}


def policy_loss(name, row_loss, formula, source, cases, usual, bounds=None, weighted=None):
    """Vectors of a loss, reduced and per token.

    `cases` are tried in both ways; `weighted` are the settings under which the loss is tried with
    weights, every aggregation and given denominators.
    """
    bounds, weighted = bounds or {}, weighted or {}
    first = cases[0].inputs
    uneven = {key: UNEVEN[key] for key in first}
    return Vector(
        function=f"{name}_loss",
        formula=(
            f"The losses of the tokens, times importance_weights if given, reduced by "
            f"`aggregation` (default {usual}) as in aggregate, or as they are if it is null: "
            f"{formula}"
        ),
        source=source,
        outputs=["loss", "metrics"],
        oracle=oracles.policy_loss(row_loss, aggregation=usual, **bounds),
        cases=[
            *cases,
            *(
                Case(
                    f"{mode or 'per token'}, importance weights",
                    uneven,
                    {**weighted, "aggregation": mode, "importance_weights": WEIGHTS, **settings},
                )
                for mode, settings in {**MODES, None: {}}.items()
            ),
            Case(
                "importance weights of rows",
                uneven,
                {**weighted, "importance_weights": ROW_WEIGHTS},
            ),
            Case(
                "given denominators",
                uneven,
                {**weighted, "num_tokens": 11, "num_sequences": 7},
            ),
            Case(
                "empty rows count",
                uneven,
                {**weighted, "aggregation": "seq-mean-token-mean", "empty_rows": "count"},
            ),
            Case("no token at all", {key: NOTHING[key] for key in first}, weighted),
            *per_token(cases),
        ],
    )


def usual_cases(**settings):
    """The published sequences, holes with advantages of tokens and of rows, and extreme ratios."""
    return [
        Case("SEQ-1", SEQ_1, settings),
        Case("holes", UNEVEN, settings),
        Case("one advantage per row", per_row(UNEVEN), settings),
        Case("ratios beyond the clamp", EXTREME, settings),
        Case("a clamp that acts", UNEVEN, {**settings, "max_log_ratio": 0.4}),
        Case("without a clamp", EXTREME, {**settings, "max_log_ratio": None}),
        Case("equal policies", {**UNEVEN, "old_logprobs": UNEVEN["logprobs"]}, settings),
    ]


def sequence_level(**settings):
    """One ratio for each row."""
    settings = {**settings, "level": "sequence"}
    return [
        Case("sequence level, SEQ-1", SEQ_1, settings),
        Case("sequence level, holes", UNEVEN, settings),
        Case("sequence level, one advantage per row", per_row(UNEVEN), settings),
        Case("sequence level, a clamp that acts", UNEVEN, {**settings, "max_log_ratio": 0.4}),
    ]


RATIOS = [0.5, 0.79, 1.0, 1.25, 1.3, 4.0, 12.0]


def ratios(advantage):
    """One row of the ratios of CLIP-1."""
    return {
        "logprobs": [[log(ratio) for ratio in RATIOS]],
        "old_logprobs": [[0.0] * 7],
        "advantages": [[advantage]],
        "mask": [[1] * 7],
    }


PPO_CASES = [
    Case("CLIP-1 A=+1 eps .2/.2", ratios(1.0)),
    Case("CLIP-1 A=+1 eps .2/.28", ratios(1.0), {"clip_high": 0.28}),
    Case("CLIP-1 A=+1 eps .2/.28 c=3", ratios(1.0), {"clip_high": 0.28, "clip_dual": 3}),
    Case("CLIP-1 A=-1 eps .2/.2", ratios(-1.0)),
    Case("CLIP-1 A=-1 eps .2/.28", ratios(-1.0), {"clip_high": 0.28}),
    Case("CLIP-1 A=-1 c=3", ratios(-1.0), {"clip_dual": 3}),
    Case("CLIP-1 A=-1 c=4", ratios(-1.0), {"clip_dual": 4}),
    Case(
        "RATIO-1",
        {
            "logprobs": [[-2.3, -2.1, -2.0, -1.9, -1.7]],
            "old_logprobs": [[-2.0] * 5],
            "advantages": [[-1.0]],
            "mask": [[1] * 5],
        },
        {"clip_low": "inf", "clip_high": "inf"},
    ),
    *usual_cases(clip_low=0.2, clip_high=0.28),
    Case(
        "bounds of 0, equal policies",
        {**UNEVEN, "old_logprobs": UNEVEN["logprobs"]},
        {
            "clip_low": 0.0,
            "clip_high": 0.0,
        },
    ),
    Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
    Case("bounds of rows", UNEVEN, {"clip_low": [[0.1], [0.9], [0.0], [0.2]], "clip_high": 0.5}),
    Case("dual clip with holes", UNEVEN, {"clip_dual": 1.5}),
]

GSPO_CASES = [
    *usual_cases(),
    Case("SEQ-1 sequence gradient", SEQ_1, {"gradient": "sequence"}),
    Case("holes, sequence gradient", UNEVEN, {"gradient": "sequence"}),
    Case("one advantage per row, sequence gradient", per_row(UNEVEN), {"gradient": "sequence"}),
    Case(
        "a clamp that acts, sequence gradient",
        UNEVEN,
        {"gradient": "sequence", "max_log_ratio": 0.4, "clip_low": 0.5, "clip_high": 0.5},
    ),
    Case("wide bounds", UNEVEN, {"clip_low": 0.1, "clip_high": 0.3}),
    Case("without bounds", UNEVEN, {"clip_low": "inf", "clip_high": "inf"}),
    Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
    Case("dual clip", UNEVEN, {"clip_dual": 1.5}),
    Case("dual clip, sequence gradient", UNEVEN, {"clip_dual": 1.5, "gradient": "sequence"}),
]

WITHOUT_OLD = ("logprobs", "advantages", "mask")


def without_old(inputs):
    return {name: inputs[name] for name in WITHOUT_OLD}


REINFORCE_CASES = [
    Case("SEQ-1", without_old(SEQ_1)),
    Case("holes", without_old(UNEVEN)),
    Case("one advantage per row", without_old(per_row(UNEVEN))),
]
REINFORCE = policy_loss(
    "reinforce",
    oracles.reinforce_row,
    "l = -A logp",
    "Williams, 1992; GPG, arXiv 2504.02546",
    REINFORCE_CASES,
    "token-mean",
)

POSITIVE = {
    "logprobs": [[-1.0, -2.0, -0.5], [-0.3, -0.4, None], [-4.0, None, None]],
    "correct": [1, 0, 1],
    "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0]],
}
POSITIVE_HOLES = {
    "logprobs": UNEVEN["logprobs"],
    "correct": [True, False, True, True],
    "mask": HOLES,
}

VECTORS = [
    policy_loss(
        "ppo",
        oracles.ppo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio) and r = exp(d), "
        "l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), then min(l, -A clip_dual) where "
        "A < 0",
        "PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 4; DAPO, arXiv 2503.14476",
        PPO_CASES,
        "token-mean",
        {"clip_low": 0.2, "clip_high": 0.2},
        {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 1.5},
    ),
    REINFORCE,
    Vector(
        function="gpg_loss",
        formula="l = -A logp, the loss of REINFORCE",
        source="GPG, arXiv 2504.02546",
        outputs=REINFORCE.outputs,
        oracle=REINFORCE.oracle,
        cases=REINFORCE_CASES,
    ),
    policy_loss(
        "cispo",
        oracles.cispo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), "
        "l = -stop[clip(exp(d), 1 - clip_low, 1 + clip_high)] A max(logp, old - max_log_ratio); a "
        "bound of null is off; for level=sequence exp of the mean of d over the row's true tokens",
        "MiniMax-M1, arXiv 2506.13585; verl",
        [
            *usual_cases(),
            Case("both bounds", UNEVEN, {"clip_low": 0.2, "clip_high": 0.28}),
            Case("no bound", UNEVEN, {"clip_high": None}),
            Case("TRL epsilon_high 5", EXTREME, {"clip_high": 4.0}),
            Case("verl's low of 10", SEQ_1, {"clip_low": 10, "clip_high": 0.2}),
            Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
            *sequence_level(clip_low=0.05, clip_high=0.1),
        ],
        "token-mean",
        {"clip_high": 0.2},
        {"clip_low": 0.2},
    ),
    policy_loss(
        "vespo",
        oracles.vespo_row,
        "with W the product of a row's ratios exp(clip(logp - old, -max_log_ratio, "
        "max_log_ratio)), log phi = lam + k log W - lam W and (k, lam) = (k_positive, "
        "lam_positive) where A >= 0, (k_negative, lam_negative) where A < 0, "
        "l = -stop[phi] A max(logp, old - max_log_ratio)",
        "VESPO, arXiv 2602.10693; TRL",
        [
            *usual_cases(),
            Case(
                "other powers and rates",
                UNEVEN,
                {"k_positive": 1, "lam_positive": 0.5, "k_negative": 1.5, "lam_negative": 0.25},
            ),
        ],
        "token-mean",
    ),
    policy_loss(
        "gspo",
        oracles.gspo_row,
        "with s_i = exp(mean of clip(logp - old, -max_log_ratio, max_log_ratio) over the row's "
        "true tokens), s_it = stop[s_i] p_it / stop[p_it] for gradient=token and s_i for "
        "gradient=sequence, l = max(-A s_it, -A clip(s_it, 1 - clip_low, 1 + clip_high)), then "
        "min(l, -A clip_dual) where A < 0",
        "GSPO, arXiv 2507.18071, sections 4.1 and 4.3; verl, TRL",
        GSPO_CASES,
        "seq-mean-token-mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        {"clip_low": 0.1, "clip_high": 0.3, "gradient": "sequence"},
    ),
    policy_loss(
        "luspo",
        oracles.luspo_row,
        "n_i times the loss of gspo_loss per token, n_i the row's true tokens",
        "LUSPO, arXiv 2602.05261; TRL",
        GSPO_CASES,
        "seq-mean-token-mean",
        {"clip_low": 2e-3, "clip_high": 2.5e-3},
        {"clip_low": 0.1, "clip_high": 0.3},
    ),
    policy_loss(
        "gmpo",
        oracles.gmpo_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), c = min(d, clip_high) where "
        "A > 0, max(d, -clip_low) where A < 0 and 0 where A = 0, "
        "l = -mean_row(A) exp(mean_row(c)) at every true token of the row",
        "GMPO, arXiv 2507.20673; verl geo_mean",
        [
            *usual_cases(),
            Case("narrow bounds", UNEVEN, {"clip_low": 0.15, "clip_high": 0.03}),
            Case("without bounds", UNEVEN, {"clip_low": "inf", "clip_high": "inf"}),
            Case("bounds of each token", UNEVEN, {"clip_low": LOW, "clip_high": HIGH}),
        ],
        "seq-mean-token-mean",
        {"clip_low": 0.4, "clip_high": 0.4},
    ),
    policy_loss(
        "sapo",
        oracles.sapo_row,
        "with r = exp(clip(logp - old, -max_log_ratio, max_log_ratio)), "
        "l = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_positive where A > 0, tau_negative where "
        "A <= 0; for level=sequence r = exp of the mean over the row's true tokens",
        "SAPO, arXiv 2511.20347; verl, TRL",
        [
            *usual_cases(),
            Case("other tau", UNEVEN, {"tau_positive": 0.5, "tau_negative": 2}),
            *sequence_level(),
        ],
        "seq-mean-token-mean",
    ),
    policy_loss(
        "dro",
        oracles.dro_row,
        "with d = clip(logp - old, -max_log_ratio, max_log_ratio), "
        "l = -(A max(logp, old - max_log_ratio) - beta / 2 d^2)",
        "DRO, arXiv 2405.19107; verl",
        [*usual_cases(beta=0.3), Case("without a penalty", UNEVEN, {"beta": 0.0})],
        "token-mean",
        weighted={"beta": 0.3},
    ),
    Vector(
        function="positive_example_loss",
        formula=(
            "-sum of logp over the true tokens of the rows with correct, over the number of those "
            "tokens or num_tokens; 0 if there are none"
        ),
        source="VAPO, arXiv 2504.05118, section 4.3",
        outputs=["loss", "metrics"],
        oracle=oracles.positive_examples,
        cases=[
            Case("POSLM-1", POSITIVE),
            Case("given number of tokens", POSITIVE, {"num_tokens": 9}),
            Case("holes and an empty row", POSITIVE_HOLES),
            Case("none correct", {**POSITIVE, "correct": [0, 0, 0]}),
        ],
    ),
]
