"""Batches on which the rules for arrays are tried: poisoned, padded, in other orders and dtypes."""

import functools

import jax.numpy as jnp
import numpy as np
from batches import BATCH, TIME, batch, numpy_batch

PER_ROW = ("correct", "scores", "groups")
ALIGNED = [name for name in numpy_batch(0) if name not in (*PER_ROW, "mask")]
POISONS = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "1e30": 1e30}
SEEDS = range(20, 25)
# What is in half precision where the rest is in single.
MIXED = ("logprobs", "values", "advantages")


def converted(b, dtype, names):
    return b | {name: b[name].astype(dtype) for name in names}


def under_mask(b, value):
    """The batch with `value` wherever the mask is false."""
    poisoned = dict(b)
    for name in ALIGNED:
        mask = b["mask"][..., None] if b[name].ndim > b["mask"].ndim else b["mask"]
        poisoned[name] = np.where(mask, b[name], np.asarray(value, b[name].dtype))
    return poisoned


def with_a_nan_that_counts(b):
    broken = {name: b[name].copy() for name in ALIGNED}
    for array in broken.values():
        array[1, 4] = np.nan
    return b | broken | {"correct": np.ones_like(b["correct"])}


def order_of_rows(seed):
    return np.random.default_rng(seed).permutation(BATCH)


def compress(array, b):
    """True tokens first, in their order; what was between them goes to the end."""
    if array.ndim < 2:
        return array
    order = np.argsort(~b["mask"], axis=1, stable=True)
    index = order[..., None] if array.ndim > 2 else order
    return np.take_along_axis(array, index, axis=1)


def padded(b):
    """Two more positions before, one behind and one more row, all under the mask."""

    def pad(array):
        width = [(0, 1), (2, 1), (0, 0)][: array.ndim]
        return np.pad(array, width, constant_values=array.dtype != bool)

    wider = {name: pad(array) for name, array in b.items()}
    wider["groups"][BATCH:] = 99
    return wider


@functools.cache
def scenarios():
    """Batches of one shape and dtype by name, of each of which values and gradients are taken."""
    clean = batch(0)
    result = {"zeros": under_mask(clean, 0.0)}
    result |= {poison: under_mask(clean, value) for poison, value in POISONS.items()}
    result["a NaN that counts"] = with_a_nan_that_counts(clean)
    result["no token"] = batch(2, np.zeros((BATCH, TIME), bool))
    result["one token per row"] = batch(3, np.eye(BATCH, TIME, dtype=bool))
    result |= {f"seed {seed}": batch(seed) for seed in (4, 6, 7, 12, *SEEDS)}
    for seed in SEEDS:
        b, order = batch(seed), order_of_rows(seed)
        result[f"seed {seed}, other order"] = {n: array[order] for n, array in b.items()}
        result[f"seed {seed}, compressed"] = {n: compress(array, b) for n, array in b.items()}
        assert not np.any(np.diff(result[f"seed {seed}, compressed"]["mask"].astype(int)) > 0)
    return result


@functools.cache
def plain_scenarios():
    """Batches on which a call is run as it is, without vmap: others are compared with these."""
    half, mixed = batch(9, dtype=jnp.bfloat16), converted(batch(10), jnp.bfloat16, MIXED)
    floats = [name for name, array in half.items() if array.dtype == jnp.bfloat16]
    return {
        "half precision, raised": converted(half, np.float32, floats),
        "mixed precision, raised": converted(mixed, np.float32, MIXED),
        **{f"seed {seed}": batch(seed) for seed in (1, 5, 6, 7, 8)},
    }


def stack(batches):
    return {name: np.stack([b[name] for b in batches]) for name in batches[0]}
