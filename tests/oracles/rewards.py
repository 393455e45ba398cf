"""Penalties and filters of rewards."""


def overlong_penalty(length, max_length, buffer):
    if length <= max_length - buffer:
        return 0.0
    if length > max_length:
        return -1.0
    return (max_length - buffer - length) / buffer


def informative(scores, groups):
    return [
        len({float(s) for s, g in zip(scores, groups, strict=True) if g == group}) > 1
        for group in groups
    ]
