"""Rows of jrl/losses/policy/selection.py, and imitation."""

import oracles

from vectors.call import batch, scalar, token
from vectors.objective import Case, Objective
from vectors.tables.policy.batches import HOLES, UNEVEN
from vectors.tables.policy.other_batches import ALL, H_HOLES, H_MASK, NOTHING, H

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


OFF_POLICY = {
    "logprobs": [[-2.0, -1.2, None], [-2.0, -1.2, -1.0], [-0.1, -0.1, -0.1], [-9.0, -9.0, -9.0]],
    "behaviour_logprobs": [[-1.0, -1.0, None], *[[-1.0, -1.0, -1.0]] * 3],
    "advantages": [[-1.0], [-1.0], [-1.0], [0.5]],
    "mask": [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 1]],
}

ROWS = [
    Objective(
        function="top_entropy_mask",
        formula=(
            "The floor(fraction (N - 1)) + 1 highest of the N true entropies, and what is equal to "
            "the least of them; or those that are at least threshold."
        ),
        source="80/20 rule, arXiv 2506.01939; count as in TRL",
        outputs=["mask"],
        oracle=lambda *a, **k: {"mask": oracles.top_entropy_mask(*a, **k)},
        cases=[
            Case("a fifth of eight", {"entropy": H, "mask": ALL}),
            Case("all", {"entropy": H, "mask": ALL}, {"fraction": 1}),
            Case(
                "ties",
                {"entropy": [[1.0, 2.0, 2.0, 0.5, 3.0]], "mask": [[1] * 5]},
                {"fraction": 0.25},
            ),
            Case("holes", {"entropy": H_HOLES, "mask": H_MASK}, {"fraction": 0.5}),
            Case("threshold", {"entropy": H_HOLES, "mask": H_MASK}, {"threshold": 0.6}),
            Case("no token at all", {"entropy": H_HOLES, "mask": NOTHING}),
        ],
        defaults={"fraction": 0.2},
        calls={"": batch(fraction=0.4)},
    ),
    Objective(
        function="off_policy_sequence_mask",
        formula=(
            "A sequence goes if A < 0 and mean_t(behaviour_logprobs - logprobs) > max_divergence."
        ),
        source="DeepSeek-V3.2, arXiv 2512.02556; 0.5 of TRL",
        outputs=["mask"],
        oracle=lambda *a, **k: {"mask": oracles.off_policy_sequence_mask(*a, **k)},
        cases=[
            Case("first goes", OFF_POLICY, {"max_divergence": 0.5}),
            Case("two go", OFF_POLICY, {"max_divergence": 0.3}),
            Case("all that are negative go", OFF_POLICY, {"max_divergence": -1.0}),
            Case(
                "one per token",
                {**OFF_POLICY, "advantages": [[-1.0, 2.0, None], *[[-1.0, 1.0, 0.0]] * 3]},
                {"max_divergence": 0.5},
            ),
        ],
        required={"max_divergence": 0.5},
        calls={"": token({"behaviour_logprobs": "behaviour_logprobs"}, max_divergence=0.1)},
    ),
    Objective(
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
        calls={"": scalar()},
    ),
]
