"""Rows of jrl/losses/value.py."""

import numpy as np
import oracles

from vectors.call import scalar
from vectors.objective import Case, Objective

VALUES, OLD, RETURNS = [[0.9, 0.2, 1.5, 0.0]], [[0.5] * 4], [[1.0, 1.0, 0.0, 0.0]]


HOLES = [[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]


UNEVEN = {
    "values": [
        [0.8, None, -0.3, 0.1, None],
        [None, 1.4, None, None, 0.2],
        [None] * 5,
        [0.05, 0.35, -0.6, 0.9, 2.0],
    ],
    "old_values": [
        [0.3, None, -0.25, 0.9, None],
        [None, 0.5, None, None, 0.2],
        [None] * 5,
        [0.5, 0.4, 0.1, 0.9, 1.0],
    ],
    "returns": [
        [1.0, None, 1.0, 0.75, None],
        [None, -1.0, None, None, -1.0],
        [None] * 5,
        [0.0, 0.25, -0.5, 0.9, 3.0],
    ],
    "mask": HOLES,
}


EMPTY = {name: [[None, None]] * 2 for name in ("values", "old_values", "returns")} | {
    "mask": [[0, 0]] * 2
}


def _value_loss(values, old_values, returns, mask, clip=None, aggregation="token-mean", **given):
    distances = () if clip is None else (clip if isinstance(clip, list) else (clip, clip))
    losses, slopes, binds = (np.zeros(np.shape(mask)) for _ in range(3))
    count, total_value = 0, 0.0
    for i, times in enumerate(oracles.rows(mask)):
        for t in times:
            losses[i, t], slopes[i, t], binds[i, t] = oracles.value_token(
                values[i][t], old_values[i][t], returns[i][t], *distances
            )
            count, total_value = count + 1, total_value + values[i][t]
    weights = oracles.token_weights(mask, aggregation, **given)
    return {
        "loss": oracles.aggregate(losses, mask, aggregation, **given),
        "metrics": {
            "vf_clipfrac": binds.sum() / max(count, 1),
            "vpred_mean": total_value / max(count, 1),
            "vf_explained_var": oracles.explained_variance(values, returns, mask),
        },
        "gradients": {"values": weights * slopes},
    }


def _explained_variance(values, returns, mask):
    return {"explained_variance": oracles.explained_variance(values, returns, mask)}


def _bounded_value(x, low, high):
    pairs = [[oracles.bounded_value(entry, low, high) for entry in row] for row in x]
    return {
        "value": [[value for value, _ in row] for row in pairs],
        "gradients": {"x": [[slope for _, slope in row] for row in pairs]},
    }


SQUARE = {"values": VALUES, "old_values": OLD, "returns": RETURNS, "mask": [[1] * 4]}


MODES = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum-norm": {"max_length": 5},
}

ROWS = [
    Objective(
        function="value_loss",
        formula=(
            "With V' = clip(V, V_old - down, V_old + up), clip one distance or the pair "
            "[down, up]: l = max((V - G)^2, (V' - G)^2) / 2, without a clip (V - G)^2 / 2; then "
            "the aggregate of l. The derivative by V is 0 where the clipped square is strictly the "
            "larger one, V - G elsewhere. vf_clipfrac: share of those tokens; vpred_mean: mean V; "
            "vf_explained_var: see explained_variance."
        ),
        source="PPO, arXiv 1707.06347, eq. 9 and its published code",
        outputs=["loss", "metrics"],
        oracle=_value_loss,
        cases=[
            Case("VALUE-1 symmetric", SQUARE, {"clip": 0.2}),
            Case("VALUE-1 asymmetric", SQUARE, {"clip": [0.5, 0.6]}),
            Case("VALUE-1 without a clip", SQUARE),
            Case("clip 0 holds every value", SQUARE, {"clip": 0.0}),
            *(
                Case(
                    f"holes {mode}",
                    UNEVEN,
                    {"clip": [0.1, 0.3], "aggregation": mode, **settings},
                )
                for mode, settings in MODES.items()
            ),
            Case("given denominators", UNEVEN, {"clip": 0.2, "num_tokens": 23, "num_sequences": 7}),
            Case("no token at all", EMPTY, {"clip": 0.2}),
        ],
        defaults={"aggregation": "token-mean"},
        calls={"": scalar(), "clipped": scalar(clip=(0.2, 0.3))},
    ),
    Objective(
        function="explained_variance",
        formula="1 - Var(G - V) / Var(G) over the true tokens; 0 where G does not vary.",
        source="Schulman et al., baselines, explained_variance",
        outputs=["explained_variance"],
        oracle=_explained_variance,
        cases=[
            Case(
                "EV-1",
                {
                    "values": [[0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, None]],
                    "returns": [[1.0] * 4, [0.0, 0.0, 0.0, None]],
                    "mask": [[1] * 4, [1, 1, 1, 0]],
                },
            ),
            Case("holes", {name: UNEVEN[name] for name in ("values", "returns", "mask")}),
            Case(
                "worse than a constant",
                {"values": [[2.0, -2.0]], "returns": [[0.0, 1.0]], "mask": [[1, 1]]},
            ),
            Case(
                "constant returns",
                {"values": [[2.0, -2.0]], "returns": [[0.5, 0.5]], "mask": [[1, 1]]},
            ),
            Case("no token at all", {name: EMPTY[name] for name in ("values", "returns", "mask")}),
        ],
        calls={"": scalar()},
    ),
    Objective(
        function="bounded_value",
        formula="low + (high - low) (1/2 + atan(x) / pi); slope (high - low) / (pi (1 + x^2)).",
        source="BPCO, arXiv 2608.23566",
        outputs=["value"],
        oracle=_bounded_value,
        cases=[
            Case(
                "reward of 0 or 1",
                {"x": [[-30.0, -1.0, 0.0], [0.25, 1.0, 1e4]]},
                {"low": 0.0, "high": 1.0},
            ),
            Case(
                "reward of -1 or 1",
                {"x": [[-30.0, -1.0, 0.0], [0.25, 1.0, 1e4]]},
                {"low": -1.0, "high": 1.0},
            ),
            Case("overlong penalty on top", {"x": [[0.5, -0.5]]}, {"low": -2.0, "high": 1.0}),
        ],
        required={"low": -1.0, "high": 1.0},
    ),
]
