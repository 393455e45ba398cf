"""The load of each sequence on any mesh, however sequences are packed, and what is sent for it."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh
from small_networks import ROUTED
from tiers import full_but

from moe.config import Model
from moe.execution import Execution
from moe.tokens.packing import PackedBatch, pack_rows, pack_segments, pack_shared_prompts
from moe.tokens.sequences import load_fraction, sequence_load_fractions
from sharding.collectives import local_shard

# Lengths that 4 does not divide: over cp rows are padded inside the batch.
ROWS, PROMPT, RESPONSE, COPIES, EXPERTS = 6, 7, 11, 3, 5
TIME = PROMPT + RESPONSE


def valid_rows():
    """Prompts padded on the left, equal in their group, responses on the right; a row has no
    response, and a group no token."""
    valid = np.zeros((ROWS, TIME), bool)
    for row in range(ROWS // 2):
        valid[row, 2 : PROMPT + 4 * row] = True
    return valid


def segments():
    """Sequences of the batch, up to three in a row, ids in no order."""
    ids = np.zeros((ROWS, TIME), np.int32)
    ids[0, :5], ids[0, 5:9], ids[0, 9:] = 4, 1, 7
    ids[2, 3:], ids[3, 1:8], ids[3, 8:17] = 2, 6, 5
    return ids


def packed_as(kind: str, mesh) -> PackedBatch:
    tokens, valid = jnp.zeros((ROWS, TIME), int), jnp.asarray(valid_rows())
    model = Model(replace(ROUTED, execution=Execution(context="gather")), mesh)
    if kind == "rows":
        return pack_rows(tokens, valid, model)
    if kind == "segments":
        return pack_segments(tokens, jnp.asarray(segments()), 8, model)
    return pack_shared_prompts(tokens, valid, PROMPT, COPIES, model)


def num_packed(kind: str, mesh) -> int:
    """Tokens of the packed batch, padding included, by tracing."""
    found = []
    jax.eval_shape(lambda: found.append(packed_as(kind, mesh).zigzag.num_tokens))
    return found[0]


def sections(kind: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    return (x[::COPIES, :PROMPT], x[:, PROMPT:]) if kind == "shared" else (x,)


def assignments(kind: str) -> np.ndarray:
    """``[row, column, route]``, for a prompt equal in its group; none for padding."""
    counts = np.random.default_rng(0).integers(0, 3, (ROWS, TIME, EXPERTS)).astype(np.float32)
    if kind == "shared":
        counts[:, :PROMPT] = np.repeat(counts[::COPIES, :PROMPT], COPIES, axis=0)
    return counts * (segments() > 0 if kind == "segments" else valid_rows())[..., None]


def expected(kind: str) -> np.ndarray:
    """Fractions at every place, by loops over sequences."""
    counts, out = assignments(kind), np.zeros((ROWS, TIME, EXPERTS))
    ids = segments() if kind == "segments" else np.ones((ROWS, TIME), int)
    for row in range(ROWS):
        for number in range(1, 9):
            sent = counts[row][ids[row] == number].sum(axis=0)
            out[row][ids[row] == number] = sent / max(sent.sum(), 1)
    if kind == "shared":
        for first in range(0, ROWS, COPIES):
            group = slice(first, first + COPIES)
            out[group, :PROMPT] = out[group, :PROMPT].mean(axis=0)
    return out


@functools.cache
def program(kind: str, layout: str) -> Any:
    mesh = mesh_of(layout)

    def local(counts):
        own = local_shard(counts, mesh.sequence)
        packed = packed_as(kind, mesh)
        assert packed.sequences is not None
        return sequence_load_fractions(own, packed.sequences, mesh)

    return on_mesh(local, mesh, (P(),), P(mesh.sequence))


KINDS = ["rows", "shared", "segments"]
# Shards over tp end within rows.
CASES = [(kind, layout) for kind in KINDS for layout in ("dp1", "tp2", "cp2", "tp4 cp2")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), full_but(CASES, *((kind, "tp4 cp2") for kind in KINDS))
)
def test_fractions_are_those_of_each_sequence(kind, layout):
    run, mesh = program(kind, layout).__wrapped__, mesh_of(layout)

    def there_and_back(*sections):
        zigzag = packed_as(kind, mesh).zigzag
        counts = zigzag.flatten(*sections)
        assert counts.shape[0] % mesh.layout.num_devices == 0
        return zigzag.restore(run(counts))

    found = jit(there_and_back)(*sections(kind, assignments(kind)))
    wanted = sections(kind, expected(kind))
    for part, other in zip(found, wanted, strict=True):
        assert 0 < np.count_nonzero(other) < other.size
        # One division, and a mean of three.
        np.testing.assert_allclose(part, other, rtol=1e-6)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute", "psum")


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("kind", "pieces"), [("rows", ROWS), ("shared", ROWS // COPIES + ROWS), ("segments", 9)]
)
def test_load_fractions_send_sums_per_sequence_and_expert(kind, pieces):
    num_tokens = num_packed(kind, mesh_of("tp4 cp2"))
    counts = jax.ShapeDtypeStruct((num_tokens, EXPERTS), jnp.float32)
    traced = program(kind, "tp4 cp2").trace(counts)
    sent = [
        (name, equation.invars[0].aval.shape)
        for equation in equations(traced.jaxpr.jaxpr)
        if (name := equation.primitive.name.removesuffix("_invariant")) in COLLECTIVES
    ]
    assert sent == [("psum", (pieces, EXPERTS))]
    assert pieces < num_tokens / 8


def test_a_set_without_assignments_has_fractions_of_zero():
    sent = jnp.asarray([[1.0, 3.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(load_fraction(sent), [[0.25, 0.75, 0.0], [0.0, 0.0, 0.0]])
