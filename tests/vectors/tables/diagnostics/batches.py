"""Batches of the diagnostics and of the statistics."""

# Right padding, a hole, an empty row, a single token, a full row.
MASK = [
    [1, 1, 1, 1, 0, 0],
    [1, 0, 1, 1, 0, 1],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0],
    [1, 1, 1, 1, 1, 1],
]


VALUES = [
    [0.5, 0.6, 0.7, 0.8, None, None],
    [0.4, None, 0.3, 0.2, None, 0.1],
    [None] * 6,
    [None, None, 0.45, None, None, None],
    [0.35, 0.5, 0.15, 0.65, 0.9, 1.1],
]


ADVANTAGES = [
    [0.4, 0.3, -0.2, 0.2, None, None],
    [-0.6, None, -0.25, 0.1, None, -0.4],
    [None] * 6,
    [None, None, 0.75, None, None, None],
    [0.5, -0.125, 0.3, -0.35, 0.15, 0.05],
]


SOURCE = "Concerns of arXiv 2505.17997 and 2506.03038; the formulas are this library's"


def _named(names, function):
    """The results of an oracle under their names."""

    def oracle(*args, **settings):
        return dict(zip(names, function(*args, **settings), strict=True))

    return oracle
