"""What every loss with a ratio has in common: its first step, its limits, its cuts, its devices."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import MASK, batch, numpy_batch
from contract_calls import UNREDUCED
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from policy_cases import assert_any_cut_sums_to_the_whole

import jrl

few = settings(max_examples=5, deadline=None, derandomize=True, database=None)
# The losses beside that of PPO, and the forms of GSPO, whose gradients differ.
LOSSES = {
    name: UNREDUCED[name]
    for name in (
        *("gspo_loss token", "gspo_loss sequence", "luspo_loss", "gmpo_loss", "cispo_loss"),
        *("vespo_loss", "sapo_loss", "dro_loss", "reinforce_loss"),
    )
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
WITH_RATIO = {name: loss for name, loss in LOSSES.items() if name != "reinforce_loss"}
every_ratio = pytest.mark.parametrize("loss", WITH_RATIO.values(), ids=WITH_RATIO.keys())


@every_ratio
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_first_on_policy_step_is_reinforce(loss, mode):
    b = batch(0)
    # One advantage per row: only then is the step of GMPO and of a sequence that of REINFORCE.
    b["advantages"] = b["advantages"][:, :1]
    b["old_logprobs"] = b["logprobs"]
    length = MASK.sum(1, keepdims=True) if loss is LOSSES["luspo_loss"] else np.ones(1)

    def slope(of):
        def value(logprobs):
            return of({**b, "logprobs": logprobs}, aggregation=mode, max_length=11)[0]

        return jax.grad(value)(b["logprobs"])

    expected = np.asarray(slope(LOSSES["reinforce_loss"])) * length
    np.testing.assert_allclose(slope(loss), expected, rtol=1e-5, atol=1e-7)


@every_ratio
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratios_of_zero_and_infinity_are_finite_and_counted(loss, advantage):
    logprobs = jnp.array(
        [[-jnp.inf, -1.0, -500.0, -0.5, -1.0], [-jnp.inf] * 5, [-1.0] * 5, [-1.0] * 5]
    )
    old = jnp.array([[-1.0, -jnp.inf, -1.0, -500.0, -1.0], [-1.0] * 5, [-jnp.inf] * 5, [-80.0] * 5])
    ones = jnp.ones_like(old)
    b = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "advantages": advantage * ones,
        "mask": ones,
    }

    def value(logprobs):
        return loss({**b, "logprobs": logprobs})

    (result, metrics), slope = jax.value_and_grad(value, has_aux=True)(logprobs)
    assert np.isfinite(result) and np.all(np.isfinite(slope))
    assert metrics["ratio_clamped"].sum == 19
    assert all(np.isfinite(metric.value()) for metric in metrics.values())
    # What has become impossible does not move.
    assert not np.any(np.where(logprobs < -400, slope, 0))


@pytest.mark.parametrize(
    "name",
    ["gspo_loss sequence", "gmpo_loss", "sapo_loss", "dro_loss", "reinforce_loss"],
)
def test_gradients_by_finite_differences(name):
    with jax.enable_x64(True):
        b = batch(1, dtype=jnp.float64)

        def value(logprobs):
            return LOSSES[name]({**b, "logprobs": logprobs})[0]

        check_grads(value, (b["logprobs"],), 1)


@pytest.mark.parametrize("name", ["cispo_loss", "vespo_loss", "reinforce_loss"])
def test_losses_with_a_stopped_weight_are_linear_in_the_logprobs(name):
    # Finite differences would see the weight move; its loss is its gradient times the argument.
    b = batch(1)
    (loss, _), slope = jax.value_and_grad(
        lambda logprobs: LOSSES[name]({**b, "logprobs": logprobs}), has_aux=True
    )(b["logprobs"])
    np.testing.assert_allclose(jnp.sum(slope * b["logprobs"]), loss, rtol=1e-5)


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 4)))
@few
def test_any_cut_by_rows_sums_to_the_whole(loss, mode, seed, cuts):
    def of(b, **denominators):
        weights = b["importance_weights"]
        return loss(b, aggregation=mode, importance_weights=weights, **denominators)

    assert_any_cut_sums_to_the_whole(of, seed, cuts)


@every_loss
def test_weights_and_advantages_of_rows_spread_over_tokens(loss):
    b = batch(3)
    narrow = {name: b[name][:, :1] for name in ("advantages", "importance_weights")}
    wide = {name: jnp.broadcast_to(x, MASK.shape) for name, x in narrow.items()}
    actual, expected = (
        loss({**b, **given}, importance_weights=given["importance_weights"])
        for given in (narrow, wide)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@every_ratio
def test_the_clamp_of_the_log_ratio_is_an_argument(loss):
    b = batch(4)
    _, metrics = loss(b, max_log_ratio=0.3)
    beyond = np.abs(b["logprobs"] - b["old_logprobs"])[MASK] > 0.3
    assert 0 < beyond.sum() < beyond.size
    assert int(metrics["ratio_clamped"].sum) == int(beyond.sum())
    assert loss(b, max_log_ratio=None)[1]["ratio_clamped"].sum == 0
    assert loss(b, max_log_ratio=0.3)[0] != loss(b, max_log_ratio=None)[0]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("ppo_loss", "token-mean"),
        ("reinforce_loss", "token-mean"),
        ("cispo_loss", "token-mean"),
        ("vespo_loss", "token-mean"),
        ("dro_loss", "token-mean"),
        ("gspo_loss token", "seq-mean-token-mean"),
        ("luspo_loss", "seq-mean-token-mean"),
        ("gmpo_loss", "seq-mean-token-mean"),
        ("sapo_loss", "seq-mean-token-mean"),
    ],
)
def test_the_aggregation_that_is_the_default(name, mode):
    b = batch(5)
    loss = LOSSES.get(name, lambda b, **k: jrl.ppo_loss(*_arrays(b), **k))
    assert loss(b)[0] == loss(b, aggregation=mode)[0]
    other = "token-mean" if mode != "token-mean" else "seq-mean-token-mean"
    assert loss(b)[0] != loss(b, aggregation=other)[0]


def _arrays(b):
    return b["logprobs"], b["old_logprobs"], b["advantages"], b["mask"]


@pytest.mark.slow
@every_loss
def test_eight_devices_with_rows_of_their_own_equal_one(loss):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    mask[5] = [1, 0, 1, 1, 0, 1]
    with jax.enable_x64(True):
        b = {n: jnp.asarray(x) for n, x in numpy_batch(1, mask).items() if x.ndim == 2}
        b["features"] = b["values"] / 5
        counts = {
            "num_tokens": jnp.sum(b["mask"]),
            "num_sequences": jnp.sum(jnp.any(b["mask"], axis=1)),
        }

        def of(theta, logprobs, b, **denominators):
            given = {**b, "logprobs": logprobs + theta * b["features"]}
            return loss(given, importance_weights=b["importance_weights"], **denominators)

        step = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)

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
        theta = jnp.asarray(0.7)
        cut = jax.jit(parallel)(theta, b["logprobs"], b, counts)
        whole = jax.jit(step)(theta, b["logprobs"], b)
        # Sums of a hundred float64 in another order.
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-11, atol=1e-14), cut, whole
        )
        assert whole[1][0] != 0


@pytest.mark.slow
def test_errors_name_what_is_wrong_without_the_help_of_run_time_types():
    program = """
import jax.numpy as jnp, jrl
full, short = jnp.ones((2, 3)), jnp.ones((2, 1))
for call in (
    lambda: jrl.gspo_loss(full, full, full, full, gradient="row"),
    lambda: jrl.luspo_loss(full, full, full, full, gradient="tokens"),
    lambda: jrl.reinforce_loss(full, full, short),
    lambda: jrl.cispo_loss(full, short, full, full),
    lambda: jrl.gmpo_loss(full, full, full[0], full),
    lambda: jrl.sapo_loss(full, full, full, full, aggregation="mean"),
):
    try:
        call()
    except ValueError as error:
        print(error)
    else:
        print("accepted")
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    expected = [
        "gradient='row' is neither 'token' nor 'sequence'.",
        "gradient='tokens' is neither 'token' nor 'sequence'.",
        "aligned to the same tokens: logprobs (2, 3), mask (2, 1).",
        "logprobs (2, 3), old_logprobs (2, 1), mask (2, 3)",
        "advantages has shape (3,), which does not spread over (2, 3)",
        "mode='mean' is not a way to aggregate",
    ]
    messages = finished.stdout.splitlines()
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message
