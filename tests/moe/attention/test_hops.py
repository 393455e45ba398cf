"""The orders in which shards visit the ranks of ``cp``."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh
from tiers import full_but

from moe.attention.ring_schedule import Exchange, Ring, hops_of

CASES = [(layout, ranks) for layout in ("cp{}", "cp{} pp2") for ranks in (2, 3, 4, 6, 8)]


@pytest.mark.parametrize(("layout", "ranks"), full_but(CASES, ("cp{}", 4), ("cp{} pp2", 6)))
def test_shards_visit_every_rank_and_come_home(layout, ranks):
    """What `source` says is what `send` brings; after `ranks` hops all is in its first place."""
    mesh = mesh_of(layout.format(ranks))
    hops = hops_of(mesh)
    assert isinstance(hops, Ring if mesh.layout.pp == 1 else Exchange)

    def seen(own):
        rank, held, found = jax.lax.axis_index(mesh.cp), own, []
        for hop in range(ranks):
            found.append((held, hops.source(rank, hop)[None]))
            held = hops.send(held, hop)
        return held, found

    spec = P(mesh.cp)
    home, found = on_mesh(seen, mesh, spec, (spec, spec))(np.arange(ranks))
    np.testing.assert_array_equal(home, np.arange(ranks))
    for held, source in found:
        np.testing.assert_array_equal(held, source)
    visits = np.stack([held for held, _ in found], axis=1)
    np.testing.assert_array_equal(np.sort(visits), np.tile(np.arange(ranks), (ranks, 1)))
