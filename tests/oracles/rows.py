"""True positions of a mask, row by row."""

import numpy as np


def rows(mask):
    """For each row, the positions that are true."""
    return [[t for t, true in enumerate(row) if true] for row in np.asarray(mask)]
