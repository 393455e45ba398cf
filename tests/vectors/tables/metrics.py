"""Vectors of jrl/losses/metrics.py."""

import oracles

from vectors.vector import Case, Vector


def _pass_at_k(num_samples, num_correct, k):
    pairs = zip(num_samples, num_correct, strict=True)
    return {"chance": [oracles.share_of_draws(n, c, k) for n, c in pairs]}


COUNTS = {"num_samples": [4, 4, 4, 4, 4, 9, 12], "num_correct": [0, 1, 2, 3, 4, 2, 1]}

VECTORS = [
    Vector(
        function="pass_at_k",
        formula="1 - C(n - c, k) / C(n, k), n samples of which c are correct",
        source="Chen et al., arXiv 2107.03374, eq. 1",
        outputs=["chance"],
        oracle=_pass_at_k,
        cases=[Case(f"k {k}", COUNTS, {"k": k}) for k in (1, 2, 4)],
    )
]
