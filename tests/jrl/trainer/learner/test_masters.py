"""Weights in bfloat16 beside float32 masters: what is stepped, kept, gathered, saved and read."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from small_runs import (
    begin_or_go_on,
    fresh_state,
    metrics_of,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from three_updates import FAST_COMPILE, gradient_of, random_weights
from tiers import full_but

from jrl.rollout.decoding.mesh_backend import StepLimits, advance, unstack_policy
from jrl.rollout.decoding.slots import SamplerState, abstract_pool
from jrl.rollout.sampling import Sampling
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.trainer.evaluation.saved_policy import load_model, load_networks
from jrl.trainer.learner.learner import copy_arrays
from jrl.trainer.learner.update import count, update
from jrl.trainer.scoring import logprobs_of
from jrl.trainer.setup.memory import memory
from jrl.trainer.state import abstract, restore, save
from moe import model
from moe.config import Model
from moe.execution import Execution
from moe.router.balance import router_loss
from moe.weights import cast_shapes, shapes
from sharding.collectives import all_sum, vary

ROWS = 8
FLOAT32 = {"norm", "query_norm", "key_norm", "down_norm", "router", "bias"}
"""What is computed with in float32, by name."""


@functools.cache
def setup_on(layout="dp1", dtype="bfloat16", fsdp=False, recipe="grpo", **changes):
    setup = small_setup(small_recipe(recipe), small_run(layout=layout, dtype=dtype))
    execution = Execution(remat="full" if fsdp else "none", fsdp=fsdp)
    given = {"dtype": dtype, "execution": execution, "query_key_norm": "head", **changes}
    return replace(setup, model=small_model(setup.tokenizer.vocab_size, **given))


def by_name(weights, function):
    """`function` of each weight and of whether it is one that stays float32."""

    def one(path, leaf):
        return function(leaf, path[-1].name in FLOAT32)

    return jax.tree.map_with_path(one, weights)


def same_bits(a, b):
    """Equal, dtypes too."""
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def held(tree):
    """Bytes on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


@functools.cache
def program_of(setup, num_micro):
    """A learner at its first step, its update compiled, and the batch."""
    network = setup.networks.policy
    learner = network.init(random_weights(setup, setup.model))
    batch = small_batch(setup, ROWS)
    lowered = update.lower(network.objective, network.optimizer, num_micro, learner, batch)
    return learner, lowered.compile(FAST_COMPILE), batch


def three_steps(setup, num_micro=2, weights=None):
    """The learner after each of three steps, on the host but the last, and the metrics."""
    learner, step, batch = program_of(setup, num_micro)
    # A step gives up what it is given.
    learner = copy_arrays(learner)
    if weights is not None:
        learner = setup.networks.policy.init(weights)
    found = []
    for _ in range(3):
        learner, metrics = step(learner, batch)
        found.append(jax.device_get((learner, metrics)))
    return found, learner


def casted(masters):
    """The weights of masters, by the names of those that stay float32."""
    return by_name(masters, lambda x, wide: x if wide else x.astype(jnp.bfloat16))


def gradient_by_hand(setup, batch):
    """(bfloat16 weights, rows of the batch) -> their gradient, on one device."""
    objective, mesh, totals = setup.networks.policy.objective, setup.mesh, count(batch)

    def local(weights, rows):
        def loss(weights):
            some = vary(rows, mesh.axes)
            x, router = model.run(weights, objective.pack(some), Model(setup.model, mesh))
            of_router = router_loss(router, Model(setup.model, mesh), totals.num_valid)
            of_policy, _ = objective.loss(weights, x, some, totals)
            return all_sum(of_policy + of_router, mesh.axes)

        return all_sum(jax.grad(loss)(vary(weights, mesh.axes)), mesh.axes)

    whole = PartitionSpec()
    function = jax.shard_map(local, mesh=mesh.mesh, in_specs=(whole, whole), out_specs=whole)
    return jax.jit(function, compiler_options=FAST_COMPILE)


@pytest.mark.slow
def test_steps_equal_those_written_by_hand():
    """Two micro-batches, three steps: masters cast, gradients of bfloat16 weights summed in
    float32, a bound on their norm, and Adam on the masters."""
    setup = setup_on()
    optimizer, batch = setup.networks.policy.optimizer, small_batch(setup, ROWS)
    gradient = gradient_by_hand(setup, batch)
    halves = [jax.tree.map(lambda x, n=n: np.asarray(x)[n : n + 4], batch) for n in (0, 4)]
    master = jax.device_get(random_weights(setup, setup.model))
    first = second = jax.tree.map(np.zeros_like, master)
    for number, (learner, _) in enumerate(three_steps(setup)[0]):
        one, other = (jax.device_get(gradient(casted(master), rows)) for rows in halves)
        total = jax.tree.map(lambda a, b: a.astype(np.float32) + b.astype(np.float32), one, other)
        norm = np.float32(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(total))))
        assert norm > optimizer.max_grad_norm
        total = jax.tree.map(lambda x, n=norm: x / n * np.float32(0.1), total)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, total)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, total)
        rate, left = float(optimizer.rate_at(number)), (0.9 ** (number + 1), 0.999 ** (number + 1))

        def stepped(w, m, v, rate=rate, left=left):
            return w - np.float32(rate) * (m / (1 - left[0])) / (
                np.sqrt(v / (1 - left[1])) + np.float32(1e-8)
            )

        master = jax.tree.map(stepped, master, first, second)
        # The same numbers but for the last float32 digits: numpy divides and takes roots where the
        # compiled program multiplies by reciprocals. A cast too few or too many is 1e-3.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
            learner.masters,
            master,
        )
        same_bits(learner.weights, casted(learner.masters))


@pytest.mark.slow
def test_steps_below_the_last_digit_add_up():
    """Each step of a weight of 6 is below half of the distance to its neighbours, 2^-5."""
    setup = setup_on()
    weights = random_weights(setup, setup.model)
    weights = replace(weights, head=jnp.full_like(weights.head, 6.0))
    found, _ = three_steps(setup, weights=weights)
    before, alone = np.asarray(weights.head), jnp.asarray(weights.head, jnp.bfloat16)
    for learner, _ in found:
        step = learner.masters.head - before
        assert 0 < np.max(np.abs(step)) < 2.0**-6
        before, alone = learner.masters.head, alone + jnp.asarray(step, jnp.bfloat16)
    np.testing.assert_array_equal(alone, 6)
    assert np.mean(learner.weights.head != 6) > 0.2


@pytest.mark.slow
def test_weights_start_as_masters_cast():
    setup = setup_on("dp2 / ep2")
    weights = random_weights(setup, setup.model)
    learner = setup.networks.policy.init(weights)
    same_bits(learner.masters, weights)
    same_bits(learner.weights, casted(weights))


@pytest.mark.slow
def test_what_is_not_finite_moves_no_master():
    learner, step, batch = program_of(setup_on(), 2)
    before = jax.device_get(learner)
    bad = replace(batch, advantages=jnp.full_like(batch.advantages, jnp.nan))
    after, metrics = step(copy_arrays(learner), bad)
    assert not metrics.finite and int(after.skipped) == 1
    same_bits((after.masters, after.weights), (before.masters, before.weights))


MESHES = [("dp2 / ep2", False), ("dp4", True), ("pp2 dp2", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fsdp"), MESHES)
def test_updates_equal_those_of_one_device(layout, fsdp):
    sizes = {"num_layers": 2}
    (alone, _), (spread, _) = (
        three_steps(setup_on(place, fsdp=parts, **sizes), 1)
        for place, parts in (("dp1", False), (layout, fsdp))
    )
    mesh = setup_on(layout, fsdp=fsdp, **sizes).mesh
    gradients = gradient_of(spread[0][0], mesh), gradient_of(alone[0][0], mesh)

    def close(found, expected):
        # Some fifty roundings to 8 bits one after the other, of 2^-9 each, in no order; the
        # compiler decides at which points each layout's program rounds. A float32 network is as far
        # from either.
        assert np.linalg.norm(found - expected) <= 2.0**-5 * np.linalg.norm(expected)

    jax.tree.map(close, *gradients)
    for (one, metrics), (other, same) in zip(spread, alone, strict=True):
        # Numbers that are sums over all tokens of what has 8 bits.
        np.testing.assert_allclose(metrics.loss, same.loss, rtol=2e-2, atol=2e-3)
        np.testing.assert_allclose(metrics.grad_norm, same.grad_norm, rtol=2e-2)
        same_bits(one.weights, casted(one.masters))
        assert [x.dtype for x in jax.tree.leaves(one)] == [x.dtype for x in jax.tree.leaves(other)]


HELD = [(*where, small) for where in [("dp1", False), *MESHES] for small in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fsdp", "small"), full_but(HELD, HELD[1], HELD[4], HELD[6]))
def test_bytes_on_a_device_are_those_of_a_dry_run(layout, fsdp, small):
    """`test_state.py` holds the description of a state against the state itself."""
    setup = setup_on(layout, fsdp=fsdp, recipe="vapo", num_layers=2)
    run = replace(setup.run, mu_dtype="bfloat16" if small else "float32")
    setup = replace(setup, recipe=replace(setup.recipe, kl_coef=0.1), run=run)
    state, needs = abstract(setup.networks), memory(setup)
    assert needs["weights"] == held(state.policy.weights) == held(state.networks["reference"])
    assert needs["float32 masters"] == held(state.policy.masters)
    assert needs["optimizer state"] == held(state.policy.opt_state)
    assert needs["critic"] == held(state.critic.weights)
    assert needs["critic's float32 masters"] == held(state.critic.masters)
    assert needs["critic's optimizer state"] == held(state.critic.opt_state)
    # Two moments, and two step counters of 4 bytes.
    assert (needs["optimizer state"] - 8) * 2 == needs["float32 masters"] * (3 if small else 4)


def test_bytes_of_a_parameter():
    """``4 + 12 / G`` of a bfloat16 weight with one micro-batch, of which G = 8 devices have the
    same: its gradient is not summed. What stays float32 has 4 more. In float32 ``8 + 8 / G``."""
    sizes = {"d_model": 256, "num_heads": 8, "head_dim": 8, "num_experts": 8, "d_expert": 16}
    recipe = small_recipe(prompts=8, mini_batch=16, micro_batch=16)
    for dtype, of_one, of_wide in (("bfloat16", 4 + 12 / 8, 8 + 12 / 8), ("float32", 9, 9)):
        setup = replace(setup_on("dp8", dtype, query_key_norm=None, **sizes), recipe=recipe)
        needs, counted = memory(setup), by_name(shapes(setup.model), lambda x, wide: (x.size, wide))
        numbers = jax.tree.leaves(counted, is_leaf=lambda x: isinstance(x, tuple))
        wide = sum(size for size, wide in numbers if wide)
        narrow = sum(size for size, wide in numbers if not wide)
        of_parameters = ("weights", "gradients", "float32 masters", "optimizer state")
        found = sum(needs.get(name, 0) for name in of_parameters) - 8  # step counters
        assert found == narrow * of_one + wide * of_wide
        assert ("float32 masters" in needs) == (dtype == "bfloat16")


def equations(jaxpr):
    """All equations of a program, and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fsdp"), [("dp4", False), ("dp4", True)])
def test_weights_are_gathered_in_bfloat16_and_gradients_summed_in_float32(layout, fsdp):
    setup = setup_on(layout, fsdp=fsdp)
    network = setup.networks.policy
    learner = network.init(random_weights(setup, setup.model))
    given = network.objective, network.optimizer, 1, learner, small_batch(setup, ROWS)
    program = list(equations(update.trace(*given).jaxpr.jaxpr))
    # Of FSDP a layer's, of which no stack is cut; by shape: no activation has a matrix's.
    alone = slice(1, None) if fsdp else slice(None)
    layers = jax.tree.map(lambda x: (x.shape[alone], x.dtype), cast_shapes(setup.model).layers)
    places = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, tuple))
    wanted = dict(place for place in places if len(place[0]) > len(("layer",)[alone]) + 1)
    gathers = [e.outvars[0].aval for e in program if e.primitive.name.startswith("all_gather")]
    found = {(x.shape, x.dtype) for x in gathers if x.shape in wanted}
    assert found == set(wanted.items()) and len(wanted) >= 5
    sums = [e.invars[0].aval for e in program if e.primitive.name == "reduce_scatter"]
    assert len(sums) >= 8 and {x.dtype for x in sums} == {jnp.dtype("float32")}


def whole_weights_cast(program, like):
    """Casts, in a program, of arrays with the shape of a weight or of one of a stack."""
    places = {shape for x in jax.tree.leaves(like) for shape in (x.shape, x.shape[1:])}
    places = {shape for shape in places if len(shape) > 1}
    return [
        equation
        for equation in equations(program.jaxpr.jaxpr)
        if equation.primitive.name == "convert_element_type"
        and equation.invars[0].aval.shape in places
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "decoding"])
def test_no_weight_is_cast_where_it_is_used(kind):
    """All sizes are sizes of weights alone."""
    sizes = {"d_model": 38, "num_heads": 4, "head_dim": 26, "num_experts": 12, "d_expert": 46}
    sizes |= {"d_ff": 34, "num_layers": 2, "shared_expert_gate": True}
    setup = setup_on(**sizes)
    setup = replace(setup, model=replace(setup.model, vocab_size=58))
    like = shapes(setup.model)

    def traced(weights):
        if kind == "forward":
            batch = small_batch(setup, ROWS)
            given = setup.networks.policy.objective, weights, batch.tokens, batch.valid
            return logprobs_of.with_overflow.trace(*given)
        decoder = setup.sampler().engine.decoder
        pool = abstract_pool(decoder, ROWS, 16)
        policy = jax.eval_shape(lambda weights: unstack_policy(decoder, weights), weights)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        draws = SamplerState(jax.ShapeDtypeStruct((2,), jnp.uint32), number)
        given = policy, pool, draws, StepLimits(number, number)
        return advance.trace(decoder, Sampling(), 16, *given)

    assert not whole_weights_cast(traced(cast_shapes(setup.model)), like)
    assert len(whole_weights_cast(traced(like), like)) > 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state after three updates, and a checkpoint of it."""
    setup = setup_on()
    state = fresh_state(setup, random_weights(setup, setup.model))
    state = replace(state, policy=three_steps(setup)[1])
    checkpoints = Checkpoints(tmp_path_factory.mktemp("bfloat16"))
    save(checkpoints, setup.networks, state)
    return state, checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "fsdp"), [("dp2 / ep2", False), ("dp4", True)])
def test_a_checkpoint_has_the_masters(saved, layout, fsdp):
    state, checkpoints = saved
    networks = setup_on(layout, fsdp=fsdp).networks
    back, like = restore(checkpoints, networks, 0), abstract(networks)
    same_bits(back, state)
    for real, wanted in zip(*map(jax.tree.leaves, (back, like)), strict=True):
        assert real.dtype == wanted.dtype and real.sharding == wanted.sharding
    assert not np.array_equal(
        state.policy.masters.embedding, state.policy.weights.embedding.astype(jnp.float32)
    )


@pytest.mark.slow
def test_a_checkpoint_without_masters_is_read(tmp_path):
    """Of a network whose weights are float32: they become the masters."""
    plain, setup = setup_on("dp2", "float32"), setup_on("dp2")
    checkpoints = Checkpoints(tmp_path)
    state = fresh_state(plain, random_weights(plain, plain.model))
    save(checkpoints, plain.networks, state)
    back = restore(checkpoints, setup.networks, 0).policy
    same_bits(back.masters, state.policy.weights)
    same_bits(back.weights, casted(state.policy.weights))


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    """On two devices, with a critic; and what evaluation, export and other runs read of it."""

    def run(steps):
        setup = setup_on("dp2 / ep2", recipe="vapo")
        return replace(setup, run=replace(setup.run, steps=steps))

    begin_or_go_on(run(3), tmp_path / "whole")
    begin_or_go_on(run(2), tmp_path / "parts")
    begin_or_go_on(run(3), tmp_path / "parts")
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    whole, parts = (
        restore(Checkpoints(tmp_path / name / "checkpoints"), run(3).networks, 3)
        for name in ("whole", "parts")
    )
    same_bits(parts, whole)
    folder, networks = RunFolder.read(tmp_path / "whole"), run(3).networks
    model, mesh = networks.policy.config, networks.mesh
    for masters, learned in ((False, whole.policy.weights), (True, whole.policy.masters)):
        policy, step = load_model(folder, Model(model, mesh), masters=masters)
        same_bits(policy, learned)
        assert step == 3
    models = {"policy": model, "critic": model.as_critic()}
    loaded, _ = load_networks(folder, models, mesh)
    same_bits(loaded, [whole.policy.weights, whole.critic.weights])
