"""Calls of the reductions and of the terms around them, for the contract of arrays."""

from typing import get_args

import jrl

MODES = get_args(jrl.Aggregation)

# One result per batch.
SCALAR = {
    **{
        mode: lambda b, mode=mode: jrl.aggregate(b["per_token"], b["mask"], mode, max_length=9)
        for mode in MODES
    },
    "masked_mean": lambda b: jrl.masked_mean(b["per_token"], b["mask"]),
}
