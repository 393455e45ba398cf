"""Context parallelism by all-gathering keys and values (Llama 3)."""

from jax.ad_checkpoint import checkpoint_name

from moe.attention.context_parallel.ring import Key, Output, Query, Sinks, Value
from moe.attention.core import core_attention
from moe.ops.mask import Mask, SegmentMask, TokenIndices, Window
from moe.remat import OPERAND
from sharding.collectives import gather_tokens, local_shard
from sharding.folding import FoldedMesh


def gather(
    query: Query,
    key: Key,
    value: Value,
    mask: SegmentMask,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
    window: Window = None,
    sinks: Sinks = None,
) -> Output:
    """All-gathers keys and values to every device, which computes attention of its own queries.

    Communication per device and layer, forward: two all-gathers that receive ``2 T K D (cp - 1) /
    cp`` elements in total; backward as much, by reduce-scatter.

    References:
      Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    zigzag = mask.zigzag
    query, key, value = (checkpoint_name(x, OPERAND) for x in (query, key, value))
    # Ranks hold zig-zag chunks: `restore` reorders the gathered keys by column.
    keys, values = (
        mask.key_sections(zigzag.restore(gather_tokens(x, mesh.cp))) for x in (key, value)
    )
    query_indices = mask.indices_by_section(
        TokenIndices(*(local_shard(x, mesh.cp) for x in mask.indices))
    )
    masks = (
        Mask(*indices, window, single=mask.single)
        for indices in zip(query_indices, mask.key_indices(mask.full_indices()), strict=True)
    )
    sections = zip(zigzag.split(query), keys, values, masks, strict=True)
    return zigzag.join(*(core_attention(*each, scale, attention, sinks) for each in sections))
