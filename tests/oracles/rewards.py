"""Penalties and filters of rewards."""


def overlong_penalty(length, max_length, buffer, floor=-1.0):
    if length <= max_length - buffer:
        return 0.0
    if buffer == 0:
        penalty = -float(length - max_length)
    else:
        penalty = (max_length - buffer - length) / buffer
    return penalty if floor is None else max(penalty, floor)


def overlong_filter(mask, truncated):
    return [
        [bool(true) and not cut for true in row] for row, cut in zip(mask, truncated, strict=True)
    ]


def informative(scores, groups):
    return [
        len({float(s) for s, g in zip(scores, groups, strict=True) if g == group}) > 1
        for group in groups
    ]
