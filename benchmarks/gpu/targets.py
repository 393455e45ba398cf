"""What is promised on a GPU, and whether what was measured keeps it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.gpu.rows import Figures

OURS = "mosaic"
LARGE = ("deepseek-v3", "mixtral", "qwen3-30b-a3b")


class Target(NamedTuple):
    """A promise.

    Attributes:
      title: what is promised, with its goal.
      goal: reached from here on.
      part: of the table, which fills it.
      value: of all rows that were measured; None where those that it is made of are not there.
    """

    title: str
    goal: float
    part: str
    value: Callable[[Sequence[Figures]], float | None]


def of(rows: Sequence[Figures], name: str, figure: str, form: str | None = None) -> float | None:
    """The largest figure of the rows of that name."""
    found = [
        row[figure]
        for row in rows
        if row["row"] == name and figure in row and form in (None, row["form"])
    ]
    return max(found, default=None)


def beside_best(rows: Sequence[Figures], name: str, form: str = OURS) -> float | None:
    """How many times as long as that form the fastest of the others takes; kernels of ours whose
    name begins with that form's are none of them."""
    taken = {
        row["form"]: row["milliseconds"]
        for row in rows
        if row["row"] == name and "milliseconds" in row
    }
    others = [milliseconds for other, milliseconds in taken.items() if not other.startswith(form)]
    if form not in taken or not others:
        return None
    return min(others) / taken[form]


def best_of_ours(rows: Sequence[Figures], name: str) -> float | None:
    """How many times as long as the fastest of our kernels the fastest of all other forms takes."""
    measured = [row for row in rows if row["row"] == name and "milliseconds" in row]
    ours, others = (
        [row["milliseconds"] for row in measured if row["form"].startswith(OURS) == is_ours]
        for is_ours in (True, False)
    )
    return min(others) / min(ours) if ours and others else None


def _of_best(prefix: str, figure: str, rows: Sequence[Figures]) -> float | None:
    found = [row[figure] for row in rows if row["row"].startswith(prefix) and figure in row]
    return max(found, default=None)


def _grouped() -> list[Target]:
    return [
        *(
            Target(
                f"grouped product, {name}, forward: 70 % of the dense rate",
                0.7,
                "grouped",
                lambda rows, name=name: of(rows, f"grouped/{name}/forward", "of_dense", OURS),
            )
            for name in LARGE
        ),
        *(
            Target(
                f"grouped product, {name}, forward: ahead of the best alternative",
                1.0,
                "grouped",
                lambda rows, name=name: beside_best(rows, f"grouped/{name}/forward"),
            )
            for name in LARGE
        ),
    ]


def _moves() -> list[Target]:
    return [
        Target(
            f"{move}, qwen3-30b-a3b: 80 % of the copy bandwidth",
            0.8,
            "dispatch",
            lambda rows, move=move: of(rows, f"dispatch/qwen3-30b-a3b/{move}", "of_copy", OURS),
        )
        for move in ("permute", "unpermute")
    ]


TARGETS = (
    *_grouped(),
    *_moves(),
    Target(
        "layer of experts, forward and backward: 1.5 times as fast as the best plain form",
        1.5,
        "layer",
        lambda rows: best_of_ours(rows, "layer/qwen3-30b-a3b/both"),
    ),
    Target(
        "training step of 2 to 8 billion parameters: 50 % MFU",
        0.5,
        "step",
        lambda rows: _of_best("step/", "mfu", rows),
    ),
    *(
        Target(
            f"decoding at 256 rows, {name}: 60 % of the bandwidth bound",
            0.6,
            "decode",
            lambda rows, name=name: _of_best(f"decode/{name}/256 rows", "of_copy", rows),
        )
        for name in ("0.6b dense", "3b active")
    ),
)


def verdict(target: Target, rows: Sequence[Figures]) -> tuple[str, float | None]:
    """ "reached", "missed" or "open", and the value."""
    value = target.value(rows)
    if value is None:
        return "open", None
    return ("reached" if value >= target.goal else "missed"), value
