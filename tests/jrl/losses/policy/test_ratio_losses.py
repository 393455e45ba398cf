"""Properties of every policy loss: its first step, its limits, pieces of batches, devices."""

import functools

import chex
import jax
import numpy as np
import pytest
from batches import MASK, batch, numpy_batch
from compiled import compiled, with_slope
from contract_calls import UNREDUCED
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from policy_cases import assert_a_cut_sums_to_the_whole
from tiers import full_but

import jrl

# The losses that take no statistics of the batch, and both gradients of GSPO.
LOSSES = {
    name: UNREDUCED[name]
    for name in (
        *(
            "ppo_loss",
            "gspo_loss token",
            "gspo_loss sequence",
            "luspo_loss",
            "gmpo_loss",
            "cispo_loss",
        ),
        *("vespo_loss", "sapo_loss", "dro_loss", "reinforce_loss"),
    )
}
# One of whole responses and one of tokens; all have vectors.
QUICK = ("gspo_loss sequence", "sapo_loss")


def each_of(losses):
    quick = [losses[name] for name in QUICK]
    return pytest.mark.parametrize("loss", full_but(losses.values(), *quick), ids=losses.keys())


every_loss = each_of(LOSSES)
WITH_RATIO = {name: loss for name, loss in LOSSES.items() if name != "reinforce_loss"}
every_ratio = each_of(WITH_RATIO)


MODES = ("token-mean", "seq-mean-token-mean")


@functools.cache
def slopes_on_policy(name):
    """The gradient of the first step by its reduction, with one advantage per row: only then is
    the step of GMPO and of a sequence REINFORCE's."""
    b = batch(0)
    inputs = {**b, "advantages": b["advantages"][:, :1], "old_logprobs": b["logprobs"]}

    @jax.jit
    def slopes(logprobs):
        def value(logprobs, mode):
            return LOSSES[name]({**inputs, "logprobs": logprobs}, aggregation=mode)[0]

        return {mode: jax.grad(value)(logprobs, mode) for mode in MODES}

    return jax.device_get(slopes(b["logprobs"]))


@pytest.mark.parametrize("name", full_but(WITH_RATIO, *QUICK))
@pytest.mark.parametrize("mode", MODES)
def test_ratio_losses_on_policy_are_reinforce(name, mode):
    length = MASK.sum(1, keepdims=True) if name == "luspo_loss" else np.ones(1)
    expected = slopes_on_policy("reinforce_loss")[mode] * length
    np.testing.assert_allclose(slopes_on_policy(name)[mode], expected, rtol=1e-5, atol=1e-7)


LOGPROBS = np.array(
    [[-np.inf, -1.0, -500.0, -0.5, -1.0], [-np.inf] * 5, [-1.0] * 5, [-1.0] * 5], np.float32
)
OLD = np.array(
    [[-1.0, -np.inf, -1.0, -500.0, -1.0], [-1.0] * 5, [-np.inf] * 5, [-80.0] * 5], np.float32
)
ADVANTAGES = (1.0, -1.0, 0.0)


@functools.cache
def far_away(loss):
    """Values, metrics and gradients at ratios of 0 and infinity, one for each advantage."""
    ones = np.ones_like(OLD)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    def step(advantage, logprobs):
        def value(logprobs):
            b = {"old_logprobs": OLD, "advantages": advantage * ones, "mask": ones}
            result, metrics = loss({**b, "logprobs": logprobs})
            values = {name: metric.value() for name, metric in metrics.items()}
            return result, (values, metrics["ratio_clamped"].sum)

        return jax.value_and_grad(value, has_aux=True)(logprobs)

    return jax.device_get(step(np.float32(ADVANTAGES), LOGPROBS))


@every_ratio
@pytest.mark.parametrize("advantage", range(len(ADVANTAGES)))
def test_ratio_losses_of_ratios_zero_and_infinity(loss, advantage):
    actual = jax.tree.map(lambda x: x[advantage], far_away(loss))
    (result, (values, clamped)), slope = actual
    chex.assert_tree_all_finite((result, slope, values))
    assert clamped == 19
    # What has become impossible does not move.
    assert not np.any(np.where(LOGPROBS < -400, slope, 0))


@pytest.mark.slow
@every_loss
def test_policy_losses_of_pieces_add_up(loss):
    def of(b, **denominators):
        weights = b["importance_weights"]
        result = [
            loss(b, aggregation=mode, importance_weights=weights, **denominators)
            for mode in ("token-mean", "seq-mean-token-mean")
        ]
        # Twice as much of one as of the other: an error in both must not cancel.
        return result[0][0] + 2 * result[1][0], result

    assert_a_cut_sums_to_the_whole(of, seeds=range(5))


@every_loss
def test_policy_losses_broadcast_one_value_per_row(loss):
    b = batch(3)
    narrow = {name: b[name][:, :1] for name in ("advantages", "importance_weights")}
    wide = {name: np.broadcast_to(x, MASK.shape) for name, x in narrow.items()}

    @jax.jit
    def of(given):
        return loss({**b, **given}, importance_weights=given["importance_weights"])

    actual, expected = of(narrow), of(wide)
    chex.assert_trees_all_equal(actual, expected)


@every_ratio
def test_ratio_losses_take_max_log_ratio(loss):
    b = batch(4)
    bounded, free = (compiled(loss)(b, max_log_ratio=bound) for bound in (0.3, None))
    beyond = np.abs(b["logprobs"] - b["old_logprobs"])[MASK] > 0.3
    assert 0 < beyond.sum() < beyond.size
    assert int(bounded[1]["ratio_clamped"].sum) == int(beyond.sum())
    assert free[1]["ratio_clamped"].sum == 0
    assert bounded[0] != free[0]


@pytest.mark.slow
@every_loss
def test_policy_losses_on_eight_devices(loss):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    mask[5] = [1, 0, 1, 1, 0, 1]
    with jax.enable_x64(True):
        b = {n: x for n, x in numpy_batch(1, mask).items() if x.ndim == 2}
        b["features"] = b["values"] / 5
        counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(axis=1).sum()}

        def of(theta, logprobs, b, **denominators):
            inputs = {**b, "logprobs": logprobs + theta * b["features"]}
            return loss(inputs, importance_weights=b["importance_weights"], **denominators)

        step = jax.jit(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))

        def local(theta, logprobs, b, counts):
            result, slopes = step(theta, logprobs, b, **counts)
            return jax.lax.psum(result, "data"), slopes

        rows = P("data")
        parallel = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), rows, rows, P()),
            out_specs=(P(), (P(), rows)),
        )
        theta = np.float64(0.7)
        cut = jax.jit(parallel)(theta, b["logprobs"], b, counts)
        full = jax.jit(step)(theta, b["logprobs"], b)
        # Sums of a hundred float64 in another order.
        chex.assert_trees_all_close(cut, full, rtol=1e-11, atol=1e-14)
        assert full[1][0] != 0


BATCH_LOSSES = {
    "hapo_loss": lambda *arrays: jrl.hapo_loss(*arrays, np.ones_like(OLD[:1])),
    "hapo_loss, negative signal": lambda *arrays: jrl.hapo_loss(
        *arrays, -np.ones_like(OLD[:1]) / 2
    ),
    "kl_cov_loss": functools.partial(jrl.kl_cov_loss, fraction=0.5),
    "clip_cov_loss": functools.partial(jrl.clip_cov_loss, fraction=1),
}


@pytest.mark.parametrize("name", BATCH_LOSSES)
def test_batch_losses_of_ratios_zero_and_infinity(name):
    """These take a signal or statistics of the batch, and no batch of `far_away`."""
    step = with_slope(BATCH_LOSSES[name])
    for advantage in ADVANTAGES:
        arrays = LOGPROBS[:1], OLD[:1], advantage * np.ones_like(OLD[:1]), np.ones_like(OLD[:1])
        (loss, metrics), slope = step(*arrays)
        chex.assert_tree_all_finite((loss, slope, [x.value() for x in metrics.values()]))
        assert not np.any(slope[:, :4])
