"""DeepSpeed Ulysses: all-to-alls trade tokens for heads, and back."""

from moe.attention.context_parallel.mask import Key, Output, Query, SegmentMask, Value
from moe.attention.core import core_attention
from moe.attention.mask import Mask, Window
from sharding.collectives import swap_shards
from sharding.folding import FoldedMesh


def ulysses(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
    window: Window = None,
) -> Output:
    """Heads for tokens and back: each device has whole sequences, for its part of the heads.

    Communication per device and layer, forward: four all-to-alls that send ``2 T (H + K) D (cp - 1)
    / cp^2`` elements together; backward as much.

    Raises:
      ValueError: when the key/value heads of a ``tp`` rank do not divide by ``cp``.

    References:
      Jacobs et al., "DeepSpeed Ulysses", 2023. https://arxiv.org/abs/2309.14509
    """
    ranks = mesh.size(mesh.cp)
    if key.shape[1] % ranks:
        raise ValueError(
            f'execution.context="ulysses" splits the {key.shape[1]} key/value heads of a tp rank '
            f"over cp={ranks}, which must divide them: choose a smaller tp or cp, or "
            'context="gather".'
        )
    zigzag = mask.zigzag
    # Split over heads (dimension 1), joined over tokens (dimension 0).
    queries, keys, values = (
        zigzag.restore(swap_shards(x, mesh.cp, split=1, join=0)) for x in (query, key, value)
    )
    marks = mask.whole_marks()
    # Whole rows, and a section's own come last among its keys: what kernels call causal.
    masks = (
        Mask(*own, window, causal=True, single=mask.single)
        for own in zip(marks, mask.key_marks(marks), strict=True)
    )
    given = zip(queries, mask.key_sections(keys), mask.key_sections(values), masks, strict=True)
    out = zigzag.flatten(*(core_attention(*each, scale, attention) for each in given))
    return swap_shards(out, mesh.cp, split=0, join=1)
