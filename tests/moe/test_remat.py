"""What is computed again changes what is kept, and neither gradients nor communication."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_graph import Graph
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from programs import jit, mesh_of, on_mesh, random_weights
from whole_network import loss_and_gradient

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.placement import in_chunks, specs
from moe.remat import POLICIES, SAVED_BEFORE_NORMS, rematerialise, save_only_named
from moe.router.balance import router_loss
from moe.tokens.packing import pack_rows
from sharding.collectives import all_sum, vary

COLLECTIVE = r" (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("
CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=8,
    experts_per_token=2,
    d_expert=14,
    d_ff=12,
    query_key_norm="projection",
    global_balance_coef=0.02,
)
BATCH, TIME = 4, 48
LAYOUT = "tp2 cp2 dp2 / ep4 etp2"
"""Every axis but the pipeline's, which computes its chunks again by itself."""


def loss(weights, tokens, config, mesh):
    """A scalar that every weight reaches."""
    network = Model(config, mesh)
    valid = jnp.ones(tokens.shape, bool)
    logits, stats = model.next_token_logits(weights, tokens, valid, network)
    router = router_loss(stats, network, jnp.asarray(BATCH * TIME))
    own = all_sum(jnp.sum(jax.nn.log_softmax(logits)[:, 0]), mesh.sequence)
    return all_sum(own / (BATCH * TIME) + router, mesh.except_sequence)


def configured(remat):
    return replace(CONFIG, execution=Execution(remat=remat, dispatch="all_to_all", context="ring"))


def given(config):
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (BATCH, TIME))
    return random_weights(config, 0), tokens.astype(np.int32)


@functools.cache
def lowered(remat):
    mesh, config = mesh_of(LAYOUT), configured(remat)
    spec = specs(Model(config, mesh))
    step = on_mesh(
        lambda weights, tokens: jax.value_and_grad(loss)(weights, tokens, config, mesh),
        mesh,
        (spec, P(mesh.dp)),
        (P(), spec),
    )
    return step.lower(*given(config))


@functools.cache
def compiled(remat):
    return lowered(remat).compile()


@functools.cache
def gradient(remat):
    return jax.device_get(compiled(remat)(*given(CONFIG)))


# The quick tier has a whole update with and without, in
# `tests/jrl/trainer/test_fully_sharded.py`.
@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES[1:])
def test_values_and_gradients_are_the_same(remat):
    (value, grads), (expected, expected_grads) = gradient(remat), gradient("none")
    # The same sums, which the compiler may fuse in another way; float32.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-5, of_largest=1e-6)
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))


KINDS = {"all-gather", "reduce-scatter", "all-to-all", "collective-permute", "all-reduce"}


@pytest.mark.slow
def test_no_collective_is_repeated():
    none, selective, projections, full = (
        Counter(re.findall(COLLECTIVE, compiled(remat).as_text())) for remat in POLICIES
    )
    assert none == full
    assert none.keys() == KINDS
    again = {kind.replace("_", "-"): number for kind, number in TWICE["selective"].items()}
    assert selective - none == again
    assert not none - selective
    # Heads and hidden units take the same tokens; a ring's keys are sent in its own gradient.
    assert projections == selective


AGAIN = {"all_to_all": 3, "all_gather": 5}
"""What a layer's backward pass repeats: tokens, ids and probs go to the experts, over ep and over
etp, and tokens are gathered over tp for heads and for the shared expert's hidden units."""
TWICE = {
    remat: {kind: number * CONFIG.num_layers for kind, number in AGAIN.items()}
    for remat in ("selective", "projections")
}


@pytest.mark.slow
@pytest.mark.parametrize("remat", POLICIES[1:])
def test_no_collective_is_written_twice(remat):
    """In what programs are compiled from, which has no doubles merged."""
    written = r"stablehlo\.(all_gather|reduce_scatter|all_to_all|collective_permute|all_reduce)\b"
    once, again = (Counter(re.findall(written, lowered(r).as_text())) for r in ("none", remat))
    assert again - once == TWICE.get(remat, {})
    assert not once - again
    assert len(once) == len(KINDS)


def kept_bytes(remat):
    """What one device keeps between the forward and the backward pass, by tracing them.

    The temporary memory of a program compiled for CPUs does not follow it.
    """
    mesh, sizes = mesh_of(LAYOUT), []
    config = configured(remat)

    def local(weights, tokens):
        value, pull = jax.vjp(lambda weights: loss(weights, tokens, config, mesh), weights)
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull)))
        return value

    in_specs = specs(Model(config, mesh)), P(mesh.dp)
    on_device = jax.shard_map(local, mesh=mesh.mesh, in_specs=in_specs, out_specs=P())
    jax.eval_shape(on_device, *given(config))
    return sizes[-1]


@pytest.mark.slow
def test_less_is_kept():
    none, selective, projections, full = (kept_bytes(remat) for remat in POLICIES)
    assert 0.8 * none > selective
    assert 0.9 * selective > projections
    assert 0.9 * projections > full


COUNTED = [
    # Of rows there and back, and the same of their gradients; and of two numbers per choice there,
    # one of which has a gradient. Selective, all three there again.
    ("dp2 / ep2", "all_to_all", "selective", 10),
    ("dp2 / ep2", "all_to_all", "none", 7),
    ("dp2 / ep2", "all_to_all", "full", 7),
    ("tp2", "all_gather", "full", 4),
]
PIPED = [
    *(("pp2", *case) for case in COUNTED),
    # Two chunks on a stage, and no pipeline.
    *((pipeline, *COUNTED[0]) for pipeline in ("pp2 vpp2", "")),
    ("", *COUNTED[2]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "axes", "collective", "remat", "number"), PIPED)
def test_a_pipeline_communicates_as_often_as_one_device(pipeline, axes, collective, remat, number):
    """Collectives of a layer, by tracing."""
    mesh = mesh_of(f"{pipeline} {axes}")

    def found(num_layers):
        config = replace(CONFIG, num_layers=num_layers, query_key_norm=None)
        if "ep" not in axes:
            config = replace(config, num_experts=0)
        config = replace(config, execution=Execution(remat=remat, dispatch="all_to_all"))
        tokens = np.zeros((BATCH, 4), np.int32)
        weights = in_chunks(random_weights(config, 0), mesh)
        program = jax.make_jaxpr(loss_and_gradient(config, mesh))(weights, (tokens, tokens == 0))
        return len(re.findall(rf"= {collective}\[", str(program)))

    # One layer more in each chunk.
    more = mesh.size(mesh.pp) * mesh.layout.vpp
    last = found(2 * more)
    assert last - found(more) == number
    # A stage that has a layer less runs the same program.
    if more > 1:
        assert found(2 * more - 1) == last


def of_one_block(wrapped):
    """The backward pass of a block of `LAYOUT`, traced with its forward pass, and the place of the
    gradient that comes in among its inputs."""
    mesh, config = mesh_of(LAYOUT), replace(configured("none"), num_layers=1)

    network = Model(config, mesh)

    def local(weights, x, slope):
        tokens = jnp.zeros((BATCH // mesh.layout.dp, TIME), int)
        packed = pack_rows(tokens, tokens == 0, network)

        def run(layer, x):
            core = packed.core_attention_of_layer(0)
            return model.block(layer, x, packed, core, config, mesh, 0)[0]

        layer = jax.tree.map(lambda leaf: vary(leaf[0], mesh.axes), weights.layers)
        out, pull = jax.vjp(wrapped(run), layer, vary(x, mesh.axes))
        return out, pull(vary(slope, mesh.axes))[1]

    given = P(mesh.axes)
    sharded = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(network), given, given),
        out_specs=(given, given),
    )
    rows = np.zeros((BATCH * TIME, CONFIG.d_model), np.float32)
    return sharded, (random_weights(config, 0), rows, rows)


def waiting(jaxpr, place):
    """Collectives of a traced program that wait for one of its inputs, and those that do not."""
    (body,) = [e.params["jaxpr"] for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    reached, found = {id(body.invars[place])}, (Counter(), Counter())
    for equation in body.eqns:
        waits = any(id(variable) in reached for variable in equation.invars)
        if waits:
            reached |= {id(variable) for variable in equation.outvars}
        kinds = [equation.primitive.name]
        for inner in jaxprs_in_params(equation.params):
            kinds += [e.primitive.name for e in inner.eqns]
        found[0 if waits else 1].update(kind for kind in kinds if kind in AGAIN)
    return found


@pytest.mark.slow
def test_nothing_that_is_repeated_waits_for_the_gradient():
    """Where `jax.checkpoint` keeps the same, all of it does."""

    def traced(wrapped):
        function, given = of_one_block(wrapped)
        return waiting(jax.make_jaxpr(function)(*given).jaxpr, -1)

    once, ours, theirs = (
        traced(wrapped)
        for wrapped in (
            lambda run: run,
            lambda run: save_only_named(run, SAVED_BEFORE_NORMS),
            lambda run: jax.checkpoint(
                run, policy=jax.checkpoint_policies.save_only_these_names(*SAVED_BEFORE_NORMS)
            ),
        )
    )
    assert ours[0] == once[0] == theirs[0] - Counter(AGAIN)
    assert ours[1] - once[1] == AGAIN
    assert theirs[1] == once[1]


@pytest.mark.slow
def test_nothing_that_is_repeated_waits_for_the_gradient_when_compiled():
    """Some of it at least is computed again, as this compiler merges what it finds to be equal."""

    def found(wrapped):
        function, given = of_one_block(wrapped)
        graph = Graph.of(jit(function).lower(*given).compile().as_text())
        # Tokens and their gradient are of one shape, the second one last.
        (slope,) = [x.name for x in graph.entry.values() if "slope" in x.scope]
        waits = [slope in graph.before(x.name) for x in graph.collectives()]
        kinds = [x.kind.removesuffix("-start").replace("-", "_") for x in graph.collectives()]
        return [
            Counter(kind for kind, one in zip(kinds, waits, strict=True) if one == which)
            for which in (True, False)
        ]

    once, ours = found(lambda run: run), found(lambda run: save_only_named(run, SAVED_BEFORE_NORMS))
    assert ours[0] == once[0]
    assert Counter() < ours[1] - once[1] <= Counter(AGAIN)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match=r"execution.remat='some' is not known: use none, sel"):
        rematerialise(loss, "some")
