"""In which order the host enqueues: layer by layer, and in a layer micro-batch by micro-batch.

While one micro-batch is with the experts, attention works on another: they play ping-pong. Devices
run what they are given in the order in which it was enqueued, beside each other; no program waits
on the host. What is enqueued for one side stands in the order of (token, layer, micro-batch). Of
the two sides together, the next layer's attention follows its experts at once, so that where an
exchange occupies both sides (`moe.disaggregated.m2n.Collective`), attention of the other
micro-batches lies before the messages that one of them waits for.

References:
  Zhu et al., "MegaScale-Infer", 2025, section 4.1, figure 4. https://arxiv.org/abs/2504.02263
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

Role = Literal["begin", "attention", "experts", "end"]


class Enqueued(NamedTuple):
    """A program, with the exchange of what it gives.

    Attributes:
      role: "begin" embeds a token of each row and runs dense first layers; "attention" is the half
        of a layer before its experts, whose rows go out after it; "experts" computes them, whose
        sums come back after it; "end" makes logits and the next token.
      token: of each row, since this decoding began.
      layer: among those with experts; 0 in "begin", the last in "end".
      micro_batch: its number.
    """

    role: Role
    token: int
    layer: int
    micro_batch: int


def order(
    num_layers: int, micro_batches: int, goes_on: Callable[[int], bool]
) -> Iterator[Enqueued]:
    """What to enqueue, in turn.

    Args:
      num_layers: with experts.
      micro_batches: of which each has a part of the rows.
      goes_on: whether a token of that number is begun; asked once for each in turn, before anything
        of it is enqueued.
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
