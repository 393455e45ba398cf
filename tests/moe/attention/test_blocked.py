"""Reading block by block is reading all at once: values, gradients, and no array of all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of

from moe.attention import blocked, core
from moe.attention.blocked import blocked_attention
from moe.attention.plain import plain_attention

BATCH, KV_HEADS, GROUP, HEAD_DIM, V_HEAD_DIM = 4, 3, 5, 6, 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks to a span and several spans to a row, two rows at a time."""
    monkeypatch.setattr(blocked, "QUERIES", 5)
    monkeypatch.setattr(blocked, "SPANS", 2)
    monkeypatch.setattr(blocked, "SCORES", 2 * KV_HEADS * GROUP * 5 * 19)


def arrays(time, source, dtype=jnp.float32):
    shapes = [
        (BATCH, time, KV_HEADS * GROUP, HEAD_DIM),
        (BATCH, source, KV_HEADS, HEAD_DIM),
        (BATCH, source, KV_HEADS, V_HEAD_DIM),
        (BATCH, time, KV_HEADS * GROUP, V_HEAD_DIM),
    ]
    draw = np.random.default_rng(0)
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def visible_of(time, source, causal):
    """At random; the first row's first query sees nothing."""
    visible = np.random.default_rng(1).random((BATCH, time, source)) < 0.7
    visible[:, np.arange(time), np.minimum(np.arange(time), source - 1)] = True
    if causal:
        visible &= np.tri(time, source, dtype=bool)
    visible[0, 0] = False
    return jnp.asarray(visible)


def outcome(function, given, weight):
    """The result and the gradients of queries, keys and values."""

    def total(*given):
        out = function(*given)
        return jnp.sum(jnp.where(weight != 0, out.astype(jnp.float32) * weight, 0.0)), out

    (_, out), gradients = jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*given)
    return out, gradients


@pytest.mark.parametrize(
    ("time", "source", "causal"),
    [(19, 19, True), (3, 3, True), (18, 8, False)],
)
def test_values_and_gradients_are_those_of_all_scores_at_once(time, source, causal):
    *given, weight = arrays(time, source)
    visible = visible_of(time, source, causal)
    weight = jnp.where(visible.any(axis=-1)[..., None, None], weight, 0.0)

    def in_blocks(query, key, value):
        return blocked_attention(query, key, value, visible, causal, 0.7)

    def at_once(query, key, value):
        return plain_attention(query, key, value, visible, 0.7)

    (out, gradients), (expected, expected_gradients) = (
        outcome(function, given, weight) for function in (in_blocks, at_once)
    )
    assert out.shape == (BATCH, time, KV_HEADS * GROUP, V_HEAD_DIM)
    assert np.all(np.isfinite(out))
    seen = np.asarray(visible.any(axis=-1))
    # float32 sums of at most 19 terms of order one.
    np.testing.assert_allclose(np.asarray(out)[seen], np.asarray(expected)[seen], atol=2e-6)
    for own, other in zip(gradients, expected_gradients, strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_half_precision_sums_in_float32():
    given = arrays(19, 19, jnp.bfloat16)[:3]
    weight, visible = arrays(19, 19)[3], visible_of(19, 19, True).at[0, 0, 0].set(True)
    out, gradients = outcome(lambda *x: blocked_attention(*x, visible, True), given, weight)
    wide = [x.astype(jnp.float32) for x in given]
    expected, expected_gradients = outcome(lambda *x: plain_attention(*x, visible), wide, weight)
    assert out.dtype == jnp.bfloat16
    # A few roundings to 8 bits of numbers of order one; gradients sum 19 x 5 of them.
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)
    for own, other in zip(gradients, expected_gradients, strict=True):
        assert own.dtype == jnp.bfloat16
        np.testing.assert_allclose(own.astype(jnp.float32), other, atol=0.1)


def test_extreme_scores_stay_finite():
    query, key, value, weight = arrays(19, 19)
    visible = visible_of(19, 19, True)
    out, gradients = outcome(
        lambda *x: blocked_attention(*x, visible, True), (query * 1e4, key * 1e4, value), weight
    )
    assert all(np.all(np.isfinite(x)) for x in (out, *gradients))
    # The query that sees nothing.
    assert not np.any(gradients[0][0, 0])


def sizes(jaxpr):
    """The number of elements of every array that is computed, in inner programs too."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes(inner)


def test_no_array_holds_all_scores():
    time = 96
    *given, weight = arrays(time, time)
    visible = jnp.ones((BATCH, time, time), bool)
    scores = BATCH * KV_HEADS * GROUP * time * time

    def largest(function):
        def total(*given):
            return jnp.sum(function(*given) * weight)

        program = jax.make_jaxpr(jax.value_and_grad(total, (0, 1, 2)))(*given)
        return max(sizes(program.jaxpr))

    assert largest(lambda *x: plain_attention(*x, visible)) == scores
    # Queries, values and `visible` are the largest that is left.
    assert largest(lambda *x: blocked_attention(*x, visible, True)) < scores / 10


def test_inside_a_shard_map():
    """Rows over two devices, with the types of varying axes checked."""
    query, key, value, weight = (x[:2] for x in arrays(19, 19))
    visible = visible_of(19, 19, True)[:2].at[0, 0, 0].set(True)
    mesh = mesh_of("dp2")

    def own(query, key, value, visible):
        return core.core_attention(query, key, value, visible, True, implementation="blocked")

    spec = P(mesh.dp)
    over_two = jax.shard_map(own, mesh=mesh.mesh, in_specs=spec, out_specs=spec)
    given = query, key, value
    mine = outcome(lambda *x: over_two(*x, visible), given, weight)
    plain = outcome(lambda *x: plain_attention(*x, visible), given, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), mine, plain)


def test_many_scores_on_a_cpu_are_computed_in_blocks(monkeypatch):
    *given, _ = arrays(19, 19)
    visible = visible_of(19, 19, True)

    def scans():
        return str(jax.make_jaxpr(lambda *x: core.core_attention(*x, visible, True))(*given)).count(
            "scan"
        )

    assert scans() == 0
    monkeypatch.setattr(core, "LARGEST_PLAIN", BATCH * KV_HEADS * GROUP * 19 * 19 - 1)
    assert scans() > 0
