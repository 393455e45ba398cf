"""Batches of the policy losses, and the row that most of them have."""

import oracles

from vectors.objective import Case, Objective, per_token

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


# Holes, left padding, an empty row, a single token; advantages of each token, one of 0.
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


def policy_loss(name, row_loss, formula, source, cases, usual, bounds=None, weighted=None, **row):
    """The row of a loss, whose cases are reduced and per token.

    `cases` are tried in both ways; `weighted` are the settings under which the loss is tried with
    weights, every aggregation and given denominators.
    """
    bounds, weighted = bounds or {}, weighted or {}
    first = cases[0].inputs
    uneven = {key: UNEVEN[key] for key in first}
    return Objective(
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
        **row,
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
