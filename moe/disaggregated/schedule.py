"""Ping-pong pipeline schedule: the order in which the host enqueues programs, layer by layer, and
within a layer micro-batch by micro-batch.

While one micro-batch is with the experts, attention computes another. Each device runs its programs
in the order in which they were enqueued, concurrently with other devices; no program waits for the
host. The programs of one side are in the order of (token, layer, micro-batch). Over both sides, the
attention of the next layer directly follows the experts. So if an exchange occupies both sides
(`moe.disaggregated.m2n.Collective`), attention of the other micro-batches is enqueued before the
messages that one of them waits for.

References:
  Zhu et al., "MegaScale-Infer", 2025, section 4.1, figure 4. https://arxiv.org/abs/2504.02263
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Role = Literal["begin", "attention", "experts", "end"]


class Enqueued(NamedTuple):
    """Schedule entry: a program, with the exchange of its results.

    Attributes:
      role: "begin" embeds a token of each row and runs dense first layers; "attention" is the half
        of a layer before its experts, followed by the exchange of its rows; "experts" computes
        these, followed by the exchange of the sums; "end" computes logits and the next token.
      token: index of the token in each row, from the start of this decoding.
      layer: index among the layers with experts; 0 in "begin", the last in "end".
      micro_batch: index of the micro-batch.
    """

    role: Role
    token: int
    layer: int
    micro_batch: int


def order(
    num_layers: int, micro_batches: int, goes_on: Callable[[int], bool]
) -> Iterator[Enqueued]:
    """Yields the schedule entries in order.

    Args:
      num_layers: number of layers with experts.
      micro_batches: number of micro-batches, each a part of the rows.
      goes_on: true if a token of that index is to be decoded; called once for each in order, before
        any of its programs is enqueued.
    """
    numbers, token, last = range(micro_batches), 0, num_layers - 1
    if not goes_on(0):
        return
    for number in numbers:
        yield Enqueued("begin", 0, 0, number)
        yield Enqueued("attention", 0, 0, number)
    going = True
    while going:
        for layer in range(num_layers):
            going = goes_on(token + 1) if layer == last else going
            for number in numbers:
                yield Enqueued("experts", token, layer, number)
                if layer < last:
                    yield Enqueued("attention", token, layer + 1, number)
                    continue
                yield Enqueued("end", token, layer, number)
                if going:
                    yield Enqueued("begin", token + 1, 0, number)
                    yield Enqueued("attention", token + 1, 0, number)
        token += 1
