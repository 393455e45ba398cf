"""Other layouts of a case's arrays: rows and columns in another order, padded, left out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case
from .frameworks import Call

PER_TOKEN = ("importance_weights",)
"""Settings that are laid out as the inputs are."""
NEW_GROUP = 987


@dataclass(frozen=True)
class View:
    """Rows and columns of a batch by their old places; -1 is a new one under the mask.

    Attributes:
      rows: the old row of each new one.
      columns: the old column of each new position, ``[old row, new column]``; None keeps them.
      shape: of the batch before.
      by_row: whether arrays of one axis have an entry per row.
    """

    rows: np.ndarray
    columns: np.ndarray | None
    shape: tuple[int, ...]
    by_row: bool

    def __call__(self, x: np.ndarray, fill: float | int) -> np.ndarray:
        """The array in this layout; what is about no row stays as it is."""
        wide = x.ndim >= 2 and x.shape[0] == self.shape[0]
        if not wide and not (self.by_row and x.shape == self.shape[:1]):
            return x
        if self.columns is not None and len(self.shape) > 1 and x.shape[1:2] == self.shape[1:2]:
            index = self.columns.reshape(*self.columns.shape, *[1] * (x.ndim - 2))
            selected = np.take_along_axis(x, np.maximum(index, 0), axis=1)
            x = np.where(index < 0, np.asarray(fill, x.dtype), selected)
        new = self.rows.reshape(-1, *[1] * (x.ndim - 1))
        return np.where(new < 0, np.asarray(fill, x.dtype), x[np.maximum(self.rows, 0)])

    def call(self, case: Case, by: tuple[str, ...], **settings: object) -> Call:
        """The call of a case in this layout, with garbage under the new mask."""
        fills = {"mask": 0, "groups": NEW_GROUP}
        inputs = {name: self(x, fills.get(name, 1)) for name, x in case.inputs.items()}
        laid = {name: self(case.settings[name], 1) for name in PER_TOKEN if name in case.settings}
        return Call(inputs, {**case.settings, **laid, **settings}, by)


def shape_of(case: Case) -> tuple[int, ...]:
    """The rows and columns of a case, or its rows."""
    if "mask" in case.inputs:
        return case.inputs["mask"].shape
    return next((x.shape[:1] for x in case.inputs.values() if x.ndim), ())


def view(case: Case, rows: Iterable[Any] | None = None, columns: np.ndarray | None = None) -> View:
    shape = shape_of(case)
    remaining = np.arange(shape[0]) if rows is None else np.asarray([*rows])
    return View(remaining, columns, shape, any(x.ndim == 1 for x in case.inputs.values()))


def padded(case: Case) -> View:
    """One column before, two behind."""
    rows, time = shape_of(case)
    return view(case, columns=np.tile(np.r_[-1, np.arange(time), -1, -1], (rows, 1)))


def compressed(case: Case) -> View:
    """The true tokens of each row first, in their order."""
    return view(case, columns=np.argsort(~case.inputs["mask"].astype(bool), axis=1, kind="stable"))
