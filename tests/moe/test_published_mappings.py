"""The mappings of Liu et al., "MoE Parallel Folding", 2025 (tables 1, 3 and 5) on absent devices.

Models have their real widths. What lies on a device, and over which axes it is sent, is read off
the traced program; nothing is compiled and nothing is run.
https://arxiv.org/abs/2504.14960
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.sharding import NamedSharding
from whole_network import loss_and_gradient

from moe.config import Model, ModelConfig
from moe.placement import in_chunks, specs
from moe.weights import num_parameters, shapes
from sharding.folding import Layout, fold_abstract

MIXTRAL = ModelConfig(
    vocab_size=32768,
    num_layers=56,
    d_model=6144,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    experts_per_token=2,
    d_expert=16384,
    capacity_factor=1.0,  # as the paper measures
    dtype="bfloat16",
)
MODELS = {
    "Mixtral-8x22B": MIXTRAL,
    "Mixtral-8x22B-G8T8": replace(MIXTRAL, num_experts=64, experts_per_token=8, d_expert=2048),
    "Llama3-8x70B": replace(
        MIXTRAL,
        vocab_size=128256,
        num_layers=80,
        d_model=8192,
        num_heads=64,
        d_expert=28672,
    ),
    "Qwen2-57B-A14B": replace(
        MIXTRAL,
        vocab_size=151936,
        num_layers=28,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        num_experts=64,
        experts_per_token=8,
        d_expert=2560,
        d_ff=20480,
        qkv_bias=True,
        shared_expert_gate=True,
    ),
}
# Model, devices, layout, and how tokens travel if that is traced: over links that are all alike,
# bfloat16 rows that are sent back are less than the float32 sums of a gather.
MAPPINGS = [
    ("Mixtral-8x22B", 128, "tp2 dp8 pp8 / ep8", "all_to_all"),
    ("Qwen2-57B-A14B", 64, "tp2 dp8 pp4 / ep4", "all_to_all"),
    ("Mixtral-8x22B-G8T8", 128, "tp4 dp4 pp8 / ep8", "all_to_all"),
    ("Llama3-8x70B", 256, "tp8 dp2 pp16 / ep8", "all_to_all"),
    # Without folding, the experts are cut as attention is.
    ("Mixtral-8x22B", 128, "tp2 dp8 pp8 / ep4 etp2", "all_to_all"),
    ("Qwen2-57B-A14B", 64, "tp2 dp8 pp4 / ep4 etp2", None),
    ("Mixtral-8x22B-G8T8", 128, "tp2 dp8 pp8 / ep8 etp2", None),
    ("Llama3-8x70B", 256, "tp8 dp4 pp8 / ep4 etp8", "all_to_all"),
    # No pipeline.
    ("Mixtral-8x22B", 128, "tp4 dp32 / ep8", None),
    ("Qwen2-57B-A14B", 64, "tp4 dp16 / ep4", None),
    ("Mixtral-8x22B-G8T8", 128, "tp8 dp16 / ep8", "all_to_all"),
    ("Llama3-8x70B", 256, "tp8 dp32 / ep8", None),
    # Table 5: a context of 16384 tokens.
    ("Mixtral-8x22B", 128, "tp2 cp4 dp2 pp8 / ep8", "all_to_all"),
]
TRACED = [(model, layout, how) for model, _, layout, how in MAPPINGS if how]
TIME = 4096


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Mixtral-8x22B", 140.6),
        ("Mixtral-8x22B-G8T8", 140.6),
        ("Llama3-8x70B", 465),
        ("Qwen2-57B-A14B", 57.4),
    ],
)
def test_the_models_are_as_large_as_their_names_say(model, billions):
    assert num_parameters(MODELS[model]) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(("model", "devices", "layout"), [case[:3] for case in MAPPINGS])
def test_published_weights_per_device(model, devices, layout):
    config, sizes = MODELS[model], Layout.parse(layout)
    assert sizes.num_devices == devices
    mesh = fold_abstract(sizes)
    local = jax.tree.map(
        lambda whole, spec: NamedSharding(mesh.mesh, spec).shard_shape(whole.shape),
        shapes(config),
        specs(Model(config, mesh)),
    )
    layers, d_model = config.num_layers // sizes.pp, config.d_model
    heads, kv_heads = config.num_heads // sizes.tp, config.num_kv_heads // sizes.tp
    experts, d_expert = config.num_experts // sizes.ep, config.d_expert // sizes.etp
    attention, routed = local.layers.attention, local.layers.experts
    assert local.embedding == (config.vocab_size // sizes.tp, d_model)
    assert local.head == (d_model, config.vocab_size // sizes.tp)
    assert attention.query == (layers, d_model, heads, 128)
    assert attention.key == attention.value == (layers, d_model, kv_heads, 128)
    assert attention.out == (layers, heads, 128, d_model)
    assert routed.router == (layers, d_model, config.num_experts)
    assert routed.gate_up == (layers, experts, d_model, 2, d_expert)
    assert routed.down == (layers, experts, d_expert, d_model)
    if config.d_ff:
        assert local.layers.dense.gate_up == (layers, d_model, 2, config.d_ff // sizes.tp)


def equations(jaxpr):
    """Every equation of a traced program and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr),
        ):
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                yield from equations(getattr(inner, "jaxpr", inner))


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute", "psum")


@functools.cache
def sent(model, layout):
    """{(collective, the mesh axes of more than one device): shapes of what is sent}.

    A layer of the model on each stage: the others are like it.
    """
    mesh = fold_abstract(Layout.parse(layout))
    config = replace(MODELS[model], num_layers=mesh.layout.pp)
    batch = 2 * mesh.layout.dp, TIME
    piece = jax.ShapeDtypeStruct(batch, jnp.int32), jax.ShapeDtypeStruct(batch, jnp.bool_)
    weights = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    traced = jax.make_jaxpr(loss_and_gradient(config, mesh))(weights, piece)
    found = {}
    for equation in equations(traced.jaxpr):
        name = equation.primitive.name.removesuffix("_invariant")
        if name not in COLLECTIVES:
            continue
        named = equation.params.get("axes") or equation.params["axis_name"]
        axes = frozenset(axis for axis in named if mesh.size((axis,)) > 1)
        if axes:
            shapes_sent = [tuple(operand.aval.shape) for operand in equation.invars]
            found.setdefault((name, axes), []).extend(shapes_sent)
    return mesh, config, found


def atoms(mesh, *logical):
    """The atoms of these logical axes that have more than one device."""
    owned = {atom for axis in logical for atom in getattr(mesh, axis)}
    return frozenset(atom for atom in owned if mesh.size((atom,)) > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "how"), TRACED)
def test_published_transfers_by_axis(model, layout, how):
    mesh, config, found = sent(model, layout)
    expected = {
        ("all_gather", ("tp",)),
        ("reduce_scatter", ("tp",)),
        # The next stage's input, and back its gradient.
        ("ppermute", ("pp",)),
    }
    assert how == "all_to_all"
    expected |= {("all_to_all", ("ep",)), ("all_gather", ("etp",)), ("reduce_scatter", ("etp",))}
    if mesh.layout.cp > 1:
        # Six query heads share a key/value head: gathering keys sends less than trading heads.
        expected |= {("all_gather", ("cp",)), ("reduce_scatter", ("cp",))}
    moved = {key for key in found if key[0] != "psum"}
    assert moved == {(name, at) for name, axes in expected if (at := atoms(mesh, *axes))}
    # A row per micro-batch, in a pipeline; else both rows of a data-parallel rank at once.
    rows_at_once = 1 if mesh.layout.pp > 1 else 2
    # What tokens chose the devices of a sequence tell each other as sums of a row and an expert.
    of_sequence = atoms(mesh, "cp", "tp")
    assert (rows_at_once, config.num_experts) in found["psum", of_sequence]
    widths = {shape[-1] for shape in found.get(("all_gather", of_sequence), [])}
    assert config.num_experts not in widths
    # If these are the devices of the experts too, choices go with the tokens.
    if of_sequence not in (atoms(mesh, "ep", "etp"), atoms(mesh, "etp")):
        assert config.experts_per_token not in widths
    tokens = rows_at_once * TIME // (mesh.layout.cp * mesh.layout.tp)
    capacity = math.ceil(tokens * config.experts_per_token / config.num_experts)
    room = min(tokens, capacity * config.num_experts // mesh.layout.ep)
    rows = (mesh.layout.ep, room, config.d_model)
    assert rows in found["all_to_all", atoms(mesh, "ep")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [case[:2] for case in TRACED if Layout.parse(case[1]).pp > 1],
)
def test_gradients_are_summed_over_the_groups_of_the_reference(model, layout):
    """Dense weights over DP x CP, those that see parts of sequences over TP too, experts over EDP;
    what several stages use over them all."""
    mesh, config, found = sent(model, layout)
    local = jax.tree.map(
        lambda whole, spec: NamedSharding(mesh.mesh, spec).shard_shape(whole.shape),
        shapes(config),
        specs(Model(config, mesh)),
    )
    attention, experts = local.layers.attention, local.layers.experts

    def summed(shape):
        return {axes for (name, axes), sizes in found.items() if name == "psum" and shape in sizes}

    assert summed(attention.query) == summed(attention.out) == {atoms(mesh, "dp", "cp")}
    assert summed(attention.key) == {atoms(mesh, "dp", "cp")}
    assert summed(experts.router) == {atoms(mesh, "dp", "cp", "tp")}
    assert summed(experts.gate_up) == summed(experts.down) == ({atoms(mesh, "edp")} - {frozenset()})
    assert summed(local.head) == {atoms(mesh, "pp", "dp", "cp")}
    assert summed(local.embedding) == {atoms(mesh, "pp", "dp", "cp")}
