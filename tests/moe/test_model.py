"""The forward pass on one device: what each position may know, and what its outputs speak about."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from hlo_graph import Graph
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.head import logits_of, value_of
from moe.layers.depth import split_layer_groups
from moe.ops.precision import rms_norm
from moe.placement import specs
from moe.router.balance import router_loss
from moe.router.layer import route
from moe.router.statistics import RouterStatistics
from moe.tokens.packing import pack_rows
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=1,
    d_model=10,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=5,
    experts_per_token=3,
    d_expert=7,
    d_ff=3,
)
TWO = replace(CONFIG, num_layers=2)
MESH = mesh_of("dp1")
TIME = 6


@partial(jit, static_argnums=0)
def hidden(config, weights, tokens, valid):
    """Hidden states ``[batch, time, d_model]``."""
    network = Model(config, MESH)
    step = jax.shard_map(
        lambda w, t, v: model.hidden(w, t, v, network)[0],
        mesh=MESH.mesh,
        in_specs=(specs(network), P(), P()),
        out_specs=P(MESH.axes),
    )
    return step(weights, tokens, valid).reshape(*tokens.shape, -1)


def one_sequence(seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, TIME).astype(np.int32)


def hidden_of(config, weights, tokens):
    """Hidden states of one whole sequence; the others of the batch are the same one."""
    tokens = np.tile(tokens, (TIME + 1, 1))
    return np.asarray(hidden(config, weights, tokens, np.ones(tokens.shape, bool)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [5, 0])
def test_a_token_changes_nothing_before_it(num_experts):
    config = replace(CONFIG, num_experts=num_experts)
    base = one_sequence()
    tokens = np.tile(base, (TIME + 1, 1))
    for t in range(TIME):
        tokens[t, t] = (base[t] + 1) % CONFIG.vocab_size
    valid = np.ones(tokens.shape, bool)
    out = np.asarray(hidden(config, random_weights(config, 1), tokens, valid))
    for t in range(TIME):
        # Rows of another grouping are multiplied in other blocks: a few units in the last place.
        np.testing.assert_allclose(out[t, :t], out[TIME, :t], atol=2e-6)
        changes = np.abs(out[t, t:] - out[TIME, t:]).max(axis=1)
        assert np.all(changes > 1e-3), f"token {t} is not seen by all that follow"


@pytest.mark.slow
def test_padding_changes_nothing():
    """The same four tokens after no, one and two columns of different rubbish, and around some."""
    real = one_sequence()[:4]
    draw = np.random.default_rng(5)
    columns = [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [0, 2, 3, 5]]
    tokens = draw.integers(0, CONFIG.vocab_size, (TIME + 1, TIME)).astype(np.int32)
    valid = np.zeros(tokens.shape, bool)
    for row, places in enumerate(columns):
        tokens[row, places] = real
        valid[row, places] = True
    weights = random_weights(CONFIG, 1)
    out = np.asarray(hidden(CONFIG, weights, tokens, valid))
    chex.assert_tree_all_finite(out)
    alone = hidden(CONFIG, weights, real[None], np.ones((1, 4), bool))[0]
    for row, places in enumerate(columns):
        np.testing.assert_allclose(out[row, places], alone, atol=1e-5)


@pytest.mark.slow
def test_hidden_states_are_normalised():
    weights = random_weights(CONFIG, 1)
    weights = replace(weights, norm=np.ones(CONFIG.d_model, np.float32))
    out = hidden_of(CONFIG, weights, one_sequence())
    # The norm divides by the root mean square plus 1e-6.
    np.testing.assert_allclose(np.mean(np.square(out), axis=-1), 1.0, rtol=1e-4)


@pytest.mark.parametrize("head", ["tied", "untied"])
def test_logits_are_products_with_the_head(head):
    config = replace(CONFIG, head=head)
    weights = random_weights(config, 1)
    x = np.random.default_rng(0).normal(size=(3, CONFIG.d_model)).astype(np.float32)
    matrix = weights.embedding.T if head == "tied" else weights.head
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64)
    logits = jit(lambda weights, x: logits_of(weights, x, Model(config, MESH)))
    np.testing.assert_allclose(logits(weights, x), expected, atol=5e-6)
    assert jax.eval_shape(logits, weights, x.astype(jnp.bfloat16)).dtype == jnp.float32


def test_network_is_pre_norm_blocks_between_embedding_and_norm():
    """With the last factor of every term at zero the blocks add nothing."""
    weights = random_weights(CONFIG, 1)
    layers = weights.layers
    assert layers.experts is not None
    assert layers.dense is not None
    silent = replace(
        weights,
        layers=replace(
            layers,
            attention=replace(layers.attention, out=np.zeros_like(layers.attention.out)),
            experts=replace(layers.experts, down=np.zeros_like(layers.experts.down)),
            dense=replace(layers.dense, down=np.zeros_like(layers.dense.down)),
        ),
    )
    tokens = one_sequence()
    out = hidden_of(CONFIG, silent, tokens)
    packed = weights.embedding[tokens] * np.float32(CONFIG.d_model**0.5)
    expected = jit(partial(rms_norm, epsilon=CONFIG.norm_epsilon))(packed, weights.norm)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.slow
def test_half_precision_stays_close():
    config = replace(CONFIG, dtype="bfloat16")
    weights = random_weights(CONFIG, 1)
    # With all experts chosen no near tie can send a token elsewhere.
    config, single = (replace(c, experts_per_token=5) for c in (config, CONFIG))
    out, expected = (hidden_of(one, weights, one_sequence()) for one in (config, single))
    assert out.dtype == jnp.bfloat16
    # Eight bits a rounding, some ten roundings a layer, on values of order one.
    np.testing.assert_allclose(out.astype(np.float32), expected, atol=0.15)


def test_heads_are_not_mistaken_for_each_other():
    network = Model(CONFIG, MESH)
    weights = random_weights(CONFIG, 1)
    x = jnp.zeros((1, CONFIG.d_model), jnp.float32)
    with pytest.raises(ValueError, match=r'head="value" has no logits: this is a critic'):
        logits_of(weights, x, Model(CONFIG.as_critic(), MESH))
    with pytest.raises(ValueError, match=r"head='untied' has no values"):
        on_mesh(
            lambda w, t, v: model.values(w, t, v, network)[0],
            MESH,
            (specs(network), P(), P()),
            P(MESH.axes),
        )(weights, np.zeros((1, 2), np.int32), np.ones((1, 2), bool))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp4", r"10 tokens per data-parallel rank cannot be split over cp x tp = 1 x 4: choose"),
        ("pp2", r"pp2 .* splits the layers into pipeline stages, .* use a layout with pp=1"),
    ],
)
def test_layouts_it_does_not_run_on(layout, message):
    mesh = fold_abstract(Layout.parse(layout))
    tokens, valid = np.zeros((2, 5), np.int32), np.ones((2, 5), bool)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda w, t, v: model.hidden(w, t, v, Model(CONFIG, mesh)),
            *(random_weights(CONFIG, 1), tokens, valid),
        )


def test_router_loss_is_a_mean_over_tokens_and_layers():
    stats = RouterStatistics(
        load=np.zeros((2, 5), np.float32),
        tokens=np.float32(7),
        balance=np.float32(21),
        batch_balance=np.float32(14),
        global_balance=np.float32(28),
        z=np.float32(35),
        entropy=np.float32(1),
        dropped=np.float32(3),
        positions=np.float32(9),
        padded=np.float32(2),
    )
    config = replace(
        TWO,
        load_balance_coef=0.5,
        router_z_coef=0.25,
        batch_balance_coef=2.0,
        global_balance_coef=0.125,
    )

    def loss(num_tokens, stats):
        program = on_mesh(lambda s, n: router_loss(s, Model(config, MESH), n), MESH, P(), P())
        return program(stats, np.int32(num_tokens))

    # 0.5 * 21 + 0.25 * 35 + 2 * 14 + 0.125 * 28, over 7 tokens and 2 layers.
    np.testing.assert_allclose(loss(7, stats), 50.75 / 14, rtol=1e-6)
    # No token at all divides by one.
    np.testing.assert_allclose(loss(0, stats), 50.75 / 2, rtol=1e-6)
    assert float(loss(7, None)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp1", "tp2 dp2 / ep2 etp2"])
def test_replayed_choices_are_used_with_current_scores(layout):
    mesh, config = mesh_of(layout), replace(TWO, num_experts=6, d_expert=8, d_ff=4)
    network = Model(config, mesh)
    tokens = np.stack([one_sequence(seed) for seed in range(4)])
    valid = np.ones((4, TIME), bool)
    valid[1, 0] = False
    rows, by_layer = P(mesh.dp), P(None, mesh.dp)
    rest = tuple(axis for axis in mesh.axes if axis not in (*mesh.dp, *mesh.sequence))

    def choices(weights, tokens, valid):
        return model.routing_choices(weights, tokens, valid, network)[None]

    def output(weights, tokens, valid, replay):
        x, stats = model.hidden(weights, tokens, valid, network, replay)
        return x, all_sum(stats.load, mesh.axes)

    spec = specs(network)
    record = on_mesh(choices, mesh, (spec, rows, rows), P(rest, *by_layer))
    free = on_mesh(
        lambda w, t, v: output(w, t, v, None), mesh, (spec, rows, rows), (P(mesh.axes), P())
    )
    forced = on_mesh(output, mesh, (spec, rows, rows, by_layer), (P(mesh.axes), P()))
    weights = random_weights(config, 1)
    own = np.asarray(record(weights, tokens, valid))[0]
    assert own.shape == (2, 4, TIME, 3)
    np.testing.assert_array_equal(own[:, 1, 0], 6)
    expected = jax.device_get(free(weights, tokens, valid))
    chex.assert_trees_all_equal(forced(weights, tokens, valid, own), expected)
    # Other choices: the experts of the record, and not the router's, get the tokens.
    other = np.where(own < 6, (own + 1) % 6, 6).astype(own.dtype)
    x, load = jax.device_get(forced(weights, tokens, valid, other))
    np.testing.assert_array_equal(load, np.roll(expected[1], 1, axis=1))
    assert np.abs(x - expected[0]).max() > 1e-2


@pytest.mark.slow
def test_dropped_choices_are_counted_and_the_network_goes_on():
    config = replace(TWO, capacity_factor=0.5)
    network = Model(config, MESH)
    tokens = np.stack([one_sequence(seed) for seed in range(2)])
    valid = np.ones((2, TIME), bool)

    def local(weights, tokens, valid):
        x, stats = model.hidden(weights, tokens, valid, network)
        return x, jax.tree.map(jnp.atleast_1d, stats)

    step = on_mesh(local, MESH, (specs(network), P(), P()), P(MESH.axes))
    x, stats = jax.device_get(step(random_weights(config, 1), tokens, valid))
    # Twelve tokens, three choices, five experts, half of it: four rows an expert, in two layers.
    kept = np.minimum(stats.load, 4).sum()
    assert float(stats.load.sum()) == 2 * 12 * 3
    assert float(stats.dropped[0]) == float(stats.load.sum()) - kept > 0
    chex.assert_tree_all_finite(x)


def test_no_router_has_no_choices():
    config = replace(CONFIG, num_experts=0)
    with pytest.raises(ValueError, match="num_experts=0 has no router"):
        model.routing_choices(
            random_weights(config, 1),
            jnp.zeros((2, 4), int),
            jnp.ones((2, 4), bool),
            Model(config, MESH),
        )


@pytest.mark.slow
def test_a_router_that_is_asked_for_by_name_is_a_kernel():
    """Scores, choice and probs of a layer are one."""
    eight = replace(CONFIG, num_experts=8)
    tokens = jax.ShapeDtypeStruct((2, TIME), jnp.int32)
    for router, kernels in ((None, 0), ("mosaic", 1)):
        config = replace(eight, execution=Execution(router=router))
        step = jax.shard_map(
            lambda w, t, config=config: model.hidden(w, t, t < 99, Model(config, MESH))[0],
            mesh=MESH.mesh,
            in_specs=(specs(Model(config, MESH)), P()),
            out_specs=P(MESH.axes),
        )
        exported = jax.export.export(jax.jit(step), platforms=["cuda"])
        text = exported(random_weights(config, 0), tokens).mlir_module()
        assert text.count("call @mosaic_gpu_v2") == kernels


def products(jaxpr):
    """The precision of every matrix product, in inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_and_the_value_head_are_not_rounded_to_a_shorter_float(dtype):
    """Their products ask for all of float32, forward and backward: by default a GPU takes TF32."""
    config = replace(CONFIG.as_critic(), dtype=dtype, capacity_factor=1.0, global_balance_coef=0.1)
    weights = random_weights(config, 0)
    x = np.ones((12, config.d_model), jnp.dtype(config.dtype))

    def routed(experts, x):
        model = Model(config, MESH)
        packed = pack_rows(jnp.zeros((2, 6), int), jnp.ones((2, 6), bool), model)
        routing, stats = route(experts, x, packed, model)
        loss = router_loss(stats, model, jnp.asarray(12))
        return jnp.sum(routing.probs) + loss + stats.entropy

    def valued(weights, x):
        return jnp.sum(value_of(weights, x, config))

    experts = split_layer_groups(weights, config)[0].experts
    for function, given, least in ((routed, experts, 3), (valued, weights, 3)):

        def gradients(given, x, function=function):
            return jax.grad(function, (0, 1))(given, x)

        local = jax.shard_map(gradients, mesh=MESH.mesh, in_specs=P(), out_specs=P())
        found = list(products(jax.make_jaxpr(local)(given, x).jaxpr))
        assert len(found) >= least
        assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("choice", ["attention", "context", "dispatch", "experts"])
@unchecked()
def test_every_choice_of_execution_is_demanded(choice):
    """A name that no implementation has reaches the part that would use it and is refused."""
    config = replace(CONFIG, execution=Execution(**{choice: "abacus"}))
    tokens = one_sequence()[None]
    with pytest.raises(ValueError, match="abacus"):
        jax.eval_shape(
            partial(hidden.__wrapped__, config), random_weights(config, 0), tokens, tokens > -1
        )


@pytest.mark.slow
def test_the_shared_expert_waits_for_no_token_that_travels_nor_these_for_it():
    """So that either may be under way beside the other, forward and backward."""
    execution = Execution(dispatch="all_to_all", experts="plain")
    config = replace(CONFIG, num_experts=8, d_expert=8, d_ff=4, execution=execution)
    mesh = mesh_of("tp2 dp2 / ep4")
    network = Model(config, mesh)
    tokens = np.zeros((2, TIME), np.int32)

    def local(weights, tokens):
        def loss(weights):
            x, _ = model.hidden(weights, tokens, tokens == 0, network)
            return all_sum(jnp.sum(jnp.sin(x)), mesh.axes)

        return jax.grad(loss)(weights)

    spec = specs(network)
    step = on_mesh(local, mesh, (spec, P(mesh.dp)), spec)
    graph = Graph.of(step.lower(random_weights(config, 0), tokens).compile().as_text())
    products = [(x, scope) for x, scope in graph.products() if "dense_expert" in scope]
    travels = [x for x in graph.collectives() if x.kind == "all-to-all"]
    for backward, counts in ((False, (2, 4)), (True, (4, 3))):
        multiplied = [x for x, scope in products if ("transpose(" in scope) is backward]
        sent = [x for x in travels if ("transpose(" in x.scope) is backward]
        assert (len(multiplied), len(sent)) == counts
        assert all(graph.unordered(a, b) for a in multiplied for b in sent)
    # Attention comes before both.
    first = travels[0]
    earlier = [x for x, scope in graph.products() if "dense_expert" not in scope]
    assert any(x.name in graph.before(first.name) for x in earlier)
