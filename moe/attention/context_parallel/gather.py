"""Context parallelism by all-gathering keys and values (Llama 3)."""

from moe.attention.context_parallel.mask import Key, Query, Read, Reading, Value, visible_keys
from moe.attention.core import read
from sharding.collectives import gather_tokens, own_shard
from sharding.folding import FoldedMesh


def gather(
    query: Query,
    key: Key,
    value: Value,
    reading: Reading,
    attention: str | None,
    mesh: FoldedMesh,
    scale: float | None = None,
) -> Read:
    """All keys and values on every device, read by the queries of its own tokens.

    Communication per device and layer, forward: two all-gathers that receive ``2 T K D (cp - 1) /
    cp`` elements together; backward as much, by reduce-scatter.

    References:
      Meta, "The Llama 3 Herd of Models", 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    order = reading.order
    keys, values = (reading.sources(order.restore(gather_tokens(x, mesh.cp))) for x in (key, value))
    visible = visible_keys(
        *(order.split(own_shard(x, mesh.cp)) for x in (reading.column, reading.segment)),
        *(reading.sources(order.restore(x)) for x in (reading.column, reading.segment)),
    )
    return order.join(
        *(
            read(*given, scale=scale, implementation=attention)
            for given in zip(order.split(query), keys, values, visible, strict=True)
        )
    )
