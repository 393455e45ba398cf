"""Losses computed on eight devices, each with its own part of the batch, equal the losses of
one."""

import functools
from typing import get_args

import chex
import jax
import numpy as np
import pytest
from batches import numpy_batch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import full_but

import jrl

ROWS, TIME, FEATURES = 16, 6, 3
NAMES = ("logprobs", "old_logprobs", "advantages", "mask", "features")


def batch():
    """Rows of very unequal lengths; the first of the eight devices holds not one true token."""
    mask = np.arange(TIME) < np.random.default_rng(0).integers(0, TIME + 1, (ROWS, 1))
    mask[:2] = False
    mask[5] = [1, 0, 1, 1, 0, 1]
    b = numpy_batch(1, mask)
    b["features"] = np.random.default_rng(2).normal(0, 0.2, (ROWS, TIME, FEATURES))
    b["sequence_lengths"] = np.broadcast_to(mask.sum(1, keepdims=True), mask.shape)
    return b


def ppo(theta, logprobs, b, **settings):
    """The loss of a policy with parameters `theta`, which all devices share."""
    current = logprobs + b["features"] @ theta
    arrays = (b["old_logprobs"], b["advantages"], b["mask"])
    return jrl.ppo_loss(current, *arrays, clip_dual=1.5, max_length=11, **settings)


def value(theta, values, b, **settings):
    """The loss of a critic with parameters `theta`, which all devices share."""
    arrays = (b["old_values"], b["returns"], b["mask"])
    current = values + b["features"] @ theta
    return jrl.value_loss(current, *arrays, clip=0.2, max_length=11, **settings)


QUICK = ("token-mean", "seq-mean-token-mean")
SHAPES = [(4, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((8, 1), (1, 2)))]


@pytest.mark.slow
@pytest.mark.parametrize("mode", full_but(get_args(jrl.Aggregation), *QUICK))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("loss", "argument"), [(ppo, "logprobs"), (value, "values")])
def test_losses_on_a_mesh_equal_one_device(mode, shape, loss, argument):
    # The second mesh axis cuts rows along time, so that no device sees a whole sequence.
    mesh = jax.make_mesh(shape, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    axes = ("data", "context")
    with jax.enable_x64(True):
        b = batch()
        theta = np.array([0.3, -0.5, 0.7])
        counts = {"num_tokens": b["mask"].sum(), "num_sequences": b["mask"].any(axis=1).sum()}
        of_all = functools.partial(loss, aggregation=mode)
        step = jax.jit(jax.value_and_grad(of_all, argnums=(0, 1), has_aux=True))
        full = step(theta, b[argument], b)

        def local(theta, mine, b, counts):
            (part, metrics), (shared, own) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
                theta,
                mine,
                b,
                aggregation=mode,
                sequence_lengths=b["sequence_lengths"],
                **counts,
            )
            # The gradient of the shared parameters is already summed: its type says so.
            return (jax.lax.psum(part, axes), jax.lax.psum(metrics, axes)), (shared, own)

        tokens = P("data", "context")
        per_token = {name: tokens for name in b if b[name].ndim > 1}
        b = {name: b[name] for name in per_token}
        parallel = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P(), tokens, per_token, P()),
                out_specs=((P(), P()), (P(), tokens)),
            )
        )
        cut = parallel(theta, b[argument], b, counts)
        # Sums of a hundred float64 in another order.
        chex.assert_trees_all_close(cut, full, rtol=1e-11)
        assert np.any(full[1][0]) and np.any(full[1][1])


@pytest.mark.parametrize("mode", full_but(get_args(jrl.Aggregation), "token-mean"))
def test_aggregate_inside_and_outside_the_gradient(mode):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.enable_x64(True):
        b = batch()
        counts = (b["mask"].sum(), b["mask"].any(axis=1).sum())

        def local(per_token, mask, num_tokens, num_sequences):
            part = jrl.aggregate(
                per_token**2,
                mask,
                mode,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                max_length=11,
            )
            return jax.lax.psum(part, "data")

        rows = P("data")
        cut = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, P(), P()), out_specs=P())
        full = lambda x: jrl.aggregate(x**2, b["mask"], mode, max_length=11)  # noqa: E731 - a function, as `cut` is
        actual = jax.jit(jax.value_and_grad(cut))(b["per_token"], b["mask"], *counts)
        expected = jax.jit(jax.value_and_grad(full))(b["per_token"])
        chex.assert_trees_all_close(actual, expected, rtol=1e-12)


@pytest.mark.slow
def test_row_estimators_on_parts_of_rows():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    b = {name: x for name, x in batch().items() if x.ndim > 1}
    b["mask"] = b["mask"].astype(np.int32)

    def estimates(b):
        lam = jrl.length_adaptive_lambda(b["mask"].sum(1), alpha=0.5)
        return (
            jrl.gae(
                b["rewards"],
                b["values"],
                b["mask"],
                lam=lam[:, None],
                bootstrap_value=b["old_values"][:, 0],
            ),
            jrl.gae(b["rewards"], b["values"], b["mask"]),
            jrl.kl_estimate(b["logprobs"], b["reference_logprobs"], b["mask"]),
            jrl.entropy_from_logits(b["logits"], b["mask"]),
        )

    cut = jax.shard_map(estimates, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    chex.assert_trees_all_close(jax.jit(cut)(b), jax.jit(estimates)(b), rtol=2e-5, atol=1e-6)
