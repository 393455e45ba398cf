"""Every message arrives where it is meant for, by either way, and nothing else is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.disaggregated.m2n import Message, exchange_of, spread_over
from moe.disaggregated.split import Split, fold_split


def sides(sources, targets):
    split = Split(f"dp{sources}", f"ep{targets}")
    return fold_split(split, jax.devices()[: sources + targets])


@pytest.mark.parametrize("name", ["device_put", "collective"])
@pytest.mark.parametrize(("sources", "targets"), [(2, 3), (3, 2), (1, 1)])
def test_messages_arrive(name, sources, targets):
    mesh, message = sides(sources, targets), Message(2, 5, jnp.dtype("uint32"))
    draw = np.random.default_rng(0)
    sent = draw.integers(0, 2**32, (sources, targets, 2, 5), np.uint32)
    place = spread_over(mesh.attention)
    parts = tuple(jax.device_put(sent[:, j].reshape(-1, 5), place) for j in range(targets))
    came = exchange_of(name, mesh.attention, mesh.experts)(parts, message)
    assert len(came) == sources
    for i, array in enumerate(came):
        assert array.sharding == spread_over(mesh.experts)
        np.testing.assert_array_equal(np.asarray(array).reshape(targets, 2, 5), sent[i])
