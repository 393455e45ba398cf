"""Sizes at which the kernels are checked: by the tests, interpreted, and by `benchmarks.gpu`."""

from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """Tokens that choose experts.

    Attributes:
      spread: how they choose: "even" (at random), "one" (all take the same first expert), "gaps"
        (only every third expert is taken), "nobody" (some choices are of no expert).
      room: share of the slots that any choices would need.
    """

    tokens: int
    k: int
    experts: int
    width: int
    spread: str = "even"
    room: float = 1.0


CASES = {
    "even": Case(tokens=70, k=3, experts=5, width=128),
    "one choice": Case(tokens=37, k=1, experts=3, width=256),
    "all to one expert": Case(tokens=40, k=2, experts=70, width=128, spread="one"),
    "empty experts": Case(tokens=64, k=2, experts=9, width=384, spread="gaps"),
    "of no expert": Case(tokens=45, k=4, experts=6, width=128, spread="nobody"),
    "empty slots": Case(tokens=33, k=2, experts=4, width=640, spread="nobody", room=2.0),
    "little room": Case(tokens=50, k=2, experts=4, width=128, room=0.5),
    "one token": Case(tokens=1, k=2, experts=2, width=1152),
}


class Product(NamedTuple):
    """A grouped product: rows of each group, and the rows that belong to none after them."""

    sizes: tuple[int, ...]
    inner: int
    outer: int
    rest: int = 0


PRODUCTS = {
    "uneven, some empty": Product((100, 0, 20, 128, 0), inner=128, outer=192, rest=52),
    "fewer rows than a tile": Product((0, 3, 1), inner=64, outer=64),
    "all in one": Product((0, 0, 264, 0), inner=192, outer=128),
    "none at all": Product((0, 0), inner=64, outer=128, rest=130),
    "ends at tiles": Product((128, 128, 64), inner=64, outer=64),
}


class Columns(NamedTuple):
    """Columns of a cache that its rows see: of each the first, and one past the last.

    Attributes:
      length: columns that a program of the kernel reads; None is its own choice.
    """

    first: tuple[int, ...]
    stop: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int = 64
    room: int = 192
    length: int | None = None


COLUMNS = {
    # They end in the first block, in the third and at the end of one.
    "rows of several lengths": Columns((0, 0, 0), (3, 136, 128)),
    "windows": Columns((130, 0, 100), (136, 5, 131)),
    "wide heads": Columns((0, 60, 100), (3, 192, 128), head_dim=256, v_head_dim=256),
    # More blocks than memory has slots; queries of a head that are more than are copied at a time.
    "long rows": Columns((0, 70, 100), (1, 320, 128), heads=18, room=320, length=320),
    # The second is half as long; a row sees one of them, a row both.
    "splits": Columns((0, 130, 100), (128, 192, 129), length=128),
}


class Narrow(NamedTuple):
    """Columns of narrow vectors that rows see, as in `Columns`.

    Attributes:
      width: of a vector, and of its values the first `rank`.
      length: columns that a program of the kernel reads; None is its own choice.
    """

    first: tuple[int, ...]
    stop: tuple[int, ...]
    heads: int = 5
    width: int = 192
    rank: int = 128
    room: int = 192
    length: int | None = None


NARROW = {
    # Of one column and of all: two parts, one of more blocks than memory has slots.
    "rows of several lengths": Narrow((0, 0), (1, 256), room=256, length=192),
    # Of one block and of all three; two tiles of heads.
    "windows": Narrow((130, 3), (136, 190), heads=70),
    # DeepSeek-V3's vectors, whose values one warpgroup sums in two slices.
    "wide": Narrow((5, 70), (190, 71), width=576, rank=512),
}


class Attended(NamedTuple):
    """Rows of keys, and queries in some of their columns.

    Attributes:
      rows: stretches of each row: the segment, 0 for padding, and how many columns.
      columns: of the queries: the first, and one past the last.
      window: how many positions a query looks back.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    columns: tuple[int, int]
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    v_head_dim: int = 64
    window: int | None = None


ATTENDED = {
    # A block of padding in front, tokens between padding, and a row of nothing else.
    "segments": Attended(
        (((0, 135), (1, 75), (0, 20), (1, 20), (3, 50)), ((0, 300),)),
        (180, 300),
        group=2,
        v_head_dim=128,
    ),
    # No query sees the first block of keys, nor those after the second.
    "window": Attended((((1, 140), (2, 250)),), (145, 245), kv_heads=2, head_dim=128, window=20),
    # More blocks than memory has slots, some of them visible whole.
    "long": Attended((((0, 5), (2, 325)),), (0, 330), head_dim=128, v_head_dim=128),
    # Two warpgroups for one block of keys, and one for one of queries.
    "wide": Attended((((1, 130),),), (0, 130), head_dim=256, v_head_dim=256),
    "wide, keys alone": Attended((((1, 130),),), (0, 130), head_dim=192, v_head_dim=128),
}
"""Rows that are attended to in training."""

RULES: dict[str, dict[str, Any]] = {
    "softmax": {"k": 3},
    "softmax as it is": {"k": 2, "renormalise": False, "scaling": 2.5},
    "softmax of the chosen": {"k": 4, "after_topk": True},
    "sigmoid": {"k": 3, "sigmoid": True, "scaling": 1.5},
    "sigmoid as it is": {"k": 1, "sigmoid": True, "renormalise": False},
    # DeepSeek-V3's: the best two of each group judge it.
    "sigmoid in groups": {"k": 4, "sigmoid": True, "scaling": 2.5, "groups": 4, "open_groups": 2},
    "softmax in groups": {"k": 3, "groups": 8, "open_groups": 3, "renormalise": False},
}
"""How tokens choose: fields of `moe.kernels.routing.Rule`."""
ROUTED, ROUTES = 70, (16, 200)
"""Tokens that do, and among how many experts: neither fills whole programs."""


TILINGS: tuple[dict[str, int], ...] = (
    {},
    {"stages": 2},
    {"stages": 4},
    {"columns": 192, "stages": 4},
    {"rows": 64, "stages": 4},
    {"wide": 1},
    {"wide": 16},
)
"""What `moe.kernels.grouped.Tiling` is compared with: its fields that differ."""


def choices(case: Case, seed: int = 0) -> np.ndarray:
    """``[tokens, k]`` expert ids, none twice in a token; past the last for none."""
    draw = np.random.default_rng(seed)
    order = draw.random((case.tokens, case.experts))
    if case.spread == "one":
        order[:, case.experts // 2] = -1
    if case.spread == "gaps":
        order[:, np.arange(case.experts) % 3 > 0] += 1
    ids = np.argsort(order, axis=1)[:, : case.k]
    if case.spread == "nobody":
        ids = np.where(draw.random(ids.shape) < 0.3, case.experts + 2, ids)
    return ids.astype(np.int32)


def marks(case: Attended) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``[row, source]`` each: columns, positions in the own sequence and segments of the keys."""
    segments = np.array([np.repeat(*np.transpose(row)) for row in case.rows])
    column = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
    earlier = np.tri(segments.shape[1], k=-1, dtype=bool)
    position = ((segments[:, :, None] == segments[:, None, :]) & earlier).sum(axis=2)
    column, position, segments = (x.astype(np.int32) for x in (column, position, segments))
    return column, position, segments
