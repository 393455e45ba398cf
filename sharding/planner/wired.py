"""What `sharding.activation_wire` sends in place of a collective of tokens."""

import math
from dataclasses import replace

from sharding.activation_wire import GROUP
from sharding.folding import Layout
from sharding.planner.transfer import Transfer

BYTE, SCALE = 1, 4


def in_fp8(
    transfer: Transfer, layout: Layout, d_model: int, is_ragged: bool = False
) -> tuple[list[Transfer], list[Transfer]]:
    """Forward and backward: a byte an element, and float32 scales of tokens or of groups of tokens
    and channels. What sums is an all-to-all of terms.

    Args:
      transfer: as it would be sent without.
      d_model: elements of a token.
      is_ragged: it has slices, of which each may end in a group that is not full.
    """
    n, tokens = transfer.group(layout), transfer.elements // d_model
    there, back = "all_to_all", "all_to_all"
    if transfer.kind == "all_gather":
        there, tokens_back, blocks = "all_gather", n * tokens, n
    elif transfer.kind == "reduce_scatter":
        back, tokens_back, blocks = "all_gather", tokens // n, 1
    else:
        tokens_back, blocks = tokens, n
    groups = blocks * math.ceil(tokens_back / blocks / GROUP)
    if is_ragged:
        groups = tokens_back // GROUP + n
    content = replace(transfer, kind=there, itemsize=BYTE, gradient=0)
    forward = [
        content,
        replace(content, what=f"scales of {transfer.what}", elements=tokens, itemsize=SCALE),
    ]
    gradient = replace(
        content,
        what=f"gradient of {transfer.what}",
        kind=back,
        elements=tokens_back * d_model,
        repeated=False,
    )
    scales = replace(
        gradient, what=f"scales of {gradient.what}", elements=groups * d_model, itemsize=SCALE
    )
    return forward, [gradient, scales]
