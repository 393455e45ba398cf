"""Rows of jrl/losses/reduction.py."""

import oracles

from vectors.call import scalar
from vectors.objective import Case, Objective

PER_TOKEN = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, None, None], [None, None, None, None]]


MASK = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


HOLES = [[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 0]]


UNEVEN = [[None, 0.5, -2.0, None], [1.25, None, None, -0.75], [None, None, 3.5, None]]


def _aggregate(per_token, mask, mode="token-mean", **denominators):
    weights = oracles.token_weights(mask, mode, **denominators)
    return {
        "loss": oracles.aggregate(per_token, mask, mode, **denominators),
        "gradients": {"per_token": weights},
    }


MODES = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"max_length": 4},
}

ROWS = [
    Objective(
        function="aggregate",
        formula=(
            "With l the loss of a token, n_i the true tokens of row i, N those of the batch, S the "
            "rows that have one, L max_length. token-mean: sum l / N; token-sum: sum l; "
            "seq-mean-token-sum: sum l / S; seq-mean-token-mean: sum_i (sum_t l / n_i) / S; "
            "seq-mean-token-sum-norm: sum l / (S L). num_tokens and num_sequences replace N and S; "
            "empty_rows=count counts every row in S. A batch without a true token gives 0."
        ),
        source="DAPO, arXiv 2503.14476, section 3.3; Dr. GRPO, arXiv 2503.20783",
        outputs=["loss"],
        oracle=_aggregate,
        cases=[
            *(
                Case(
                    f"AGG-1 {mode}",
                    {"per_token": PER_TOKEN, "mask": MASK},
                    {"mode": mode, **settings},
                )
                for mode, settings in MODES.items()
            ),
            *(
                Case(
                    f"holes {mode}",
                    {"per_token": UNEVEN, "mask": HOLES},
                    {"mode": mode, **settings},
                )
                for mode, settings in MODES.items()
            ),
            *(
                Case(
                    f"given denominators {mode}",
                    {"per_token": PER_TOKEN, "mask": MASK},
                    {"mode": mode, "num_tokens": 11, "num_sequences": 5, **settings},
                )
                for mode, settings in MODES.items()
            ),
            *(
                Case(
                    f"empty rows count {mode}",
                    {"per_token": PER_TOKEN, "mask": MASK},
                    {"mode": mode, "empty_rows": "count", **settings},
                )
                for mode, settings in MODES.items()
            ),
            Case("no token at all", {"per_token": PER_TOKEN, "mask": [[0] * 4] * 3}),
        ],
        defaults={"mode": "token-mean", "empty_rows": "skip"},
        calls={mode: scalar(mode=mode, max_length=9) for mode in MODES},
    ),
]
