"""Random batches on which the objectives are tried, with every array that one of them takes."""

import numpy as np

BATCH, TIME, VOCAB = 5, 7, 3

# Right padding, a hole, left padding, no token at all, and a single token.
MASK = np.array(
    [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 1],
        [0, 0, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
    ],
    bool,
)


def numpy_batch(seed: int, mask: np.ndarray = MASK) -> dict[str, np.ndarray]:
    """Arrays in float64 under the names of the arguments, arrays of rows among them."""
    draw = np.random.default_rng(seed)
    shape = mask.shape
    logprobs = -draw.exponential(1.0, shape)
    values = draw.normal(0.3, 0.5, shape)
    return {
        "per_token": draw.normal(1.0, 2.0, shape),
        "logprobs": logprobs,
        "old_logprobs": logprobs + draw.normal(0, 0.6, shape),
        "behaviour_logprobs": logprobs + draw.normal(0, 0.6, shape),
        "entropy": draw.exponential(0.7, shape),
        "reference_logprobs": logprobs + draw.normal(0, 0.6, shape),
        "advantages": draw.normal(0, 1, shape),
        "importance_weights": draw.uniform(0.5, 2, shape),
        "values": values,
        "old_values": values + draw.normal(0, 0.4, shape),
        "returns": draw.normal(0.3, 0.5, shape),
        "rewards": draw.normal(0, 1, shape),
        "gamma": draw.uniform(0.8, 1, shape),
        "lam": draw.uniform(0.3, 1, shape),
        "logits": draw.normal(0, 2, (*shape, VOCAB)),
        "correct": draw.integers(0, 2, shape[0]),
        "scores": draw.normal(0, 1, shape[0]),
        "groups": np.resize([7, 2, 7, 2, 5], shape[0]),
        "mask": mask,
    }


def batch(seed: int, mask: np.ndarray = MASK, dtype=np.float32) -> dict[str, np.ndarray]:
    """`numpy_batch` with its floats in `dtype`, in arrays that no device has seen."""
    return {
        name: array.astype(dtype) if array.dtype == np.float64 else array
        for name, array in numpy_batch(seed, mask).items()
    }
