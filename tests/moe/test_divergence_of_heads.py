"""The divergence from chunks of two heads' columns against the divergence of all logits."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from jax.sharding import PartitionSpec as P
from places import ROOT
from programs import jit, mesh_of, on_mesh, random_weights
from test_head import HELD_IN, HOLES, TAIL, TOKENS, assert_close, config_of, given, largest_array
from tiers import full_but

import jrl
from moe.config import Model
from moe.distillation import divergence
from moe.placement import specs
from sharding.collectives import all_sum, vary

TRL = json.loads((ROOT / "tests/vectors/trl/distillation.json").read_text())
WIDTH = 14  # of the teacher


def teacher_of(vocab_size, head="untied", unused=()):
    config = replace(config_of(vocab_size, head=head), d_model=WIDTH)
    return replace(config, unused_ids=unused)


def teacher_states(num_tokens=TOKENS):
    return np.random.default_rng(8).normal(size=(num_tokens, WIDTH)).astype(np.float32)


def head_of(weights):
    return weights.embedding.T if weights.head is None else weights.head


def expected(configs, weights, batch, teacher, states, beta, temperatures):
    """Divergences of all logits, of the ids that both use, and the gradients of a loss."""
    columns = [
        i
        for i in range(min(config.vocab_size for config in configs))
        if not any(a <= i < b for config in configs for a, b in config.unused_ids)
    ]

    @jit
    def run(weights, x):
        def loss(weights, x):
            logits, others = (
                (y.astype(jnp.float32) @ head_of(w)[:, np.array(columns)]) / t
                for w, y, t in zip((weights, teacher), (x, states), temperatures, strict=True)
            )
            values = jrl.jsd_from_logits(logits, others, beta=beta)
            return batch.of_logprob @ values, values

        (_, values), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, x)
        return values, grads

    return jax.device_get(run(weights, batch.x))


def chunked(configs, weights, batch, teacher, states, layout, **settings):
    """The same on a mesh, tokens over ``dp x cp x tp``, by the function that is tested."""
    mesh = mesh_of(layout)
    model = Model(configs[0], mesh)

    def local(weights, batch, teacher, states):
        def loss(weights, x, teacher, states):
            values = divergence(weights, x, teacher, states, model, configs[1], **settings)
            assert values.dtype == jnp.float32
            used = jnp.where(batch.of_logprob == 0, 0, values)
            return all_sum(batch.of_logprob @ used, mesh.axes) / mesh.layout.pp, values

        (_, values), grads = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(
            weights, batch.x, teacher, states
        )
        others = tuple(axis for axis in mesh.axes if axis not in (*mesh.dp, *mesh.sequence))
        # Equal on all of them. A maximum over devices would lose NaN.
        return all_sum(values, others) / mesh.size(others), grads

    token = P((*mesh.dp, *mesh.sequence))
    inputs = (specs(model), token, specs(Model(configs[1], mesh)), token)
    outputs = (token, (specs(model), token, *inputs[2:]))
    values, grads = on_mesh(local, mesh, inputs, outputs)(weights, batch, teacher, states)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads[2:]))
    return values, grads[:2]


CASES = [
    # Layout, vocabularies, chunk, heads, beta, temperatures.
    ("dp1", (37, 37), None, ("untied", "tied"), 1.0, (0.7, 0.7)),
    ("dp1", (37, 37), 11, ("tied", "untied"), 0.0, (1.3, 0.7)),
    ("cp2 dp2", (37, 37), 8, ("untied", "untied"), 0.5, (1.0, 1.0)),
    ("tp2 dp2", (36, 36), 5, ("untied", "tied"), 1.0, (1.0, 1.3)),
    ("tp4 cp2", (36, 36), 3, ("tied", "untied"), 0.1, (0.7, 0.7)),
    ("dp2 tp2 pp2", (36, 36), 7, ("untied", "untied"), 0.0, (0.7, 0.7)),
    # Columns that tp does not divide, which every rank holds.
    ("tp4 cp2", (37, 37), 4, ("untied", "tied"), 1.0, (0.7, 1.0)),
    ("tp4", (5, 5), 1, ("untied", "untied"), 0.9, (1.0, 1.0)),
    # One tokenizer, padded to other sizes: sharded and whole, more columns and fewer.
    ("tp4 cp2", (37, 40), 4, ("untied", "untied"), 1.0, (0.7, 0.7)),
    ("tp4", (40, 36), 3, ("untied", "tied"), 0.5, (1.0, 1.0)),
    ("tp2", (36, 33), None, ("tied", "untied"), 0.0, (1.0, 1.0)),
]


@pytest.mark.parametrize(
    ("layout", "vocab_sizes", "chunk", "heads", "beta", "temperatures"),
    full_but(CASES, CASES[6]),
)
def test_divergence_equals_all_logits(layout, vocab_sizes, chunk, heads, beta, temperatures):
    configs = config_of(vocab_sizes[0], chunk, heads[0]), teacher_of(vocab_sizes[1], heads[1])
    assert_equals_all_logits(configs, layout, beta, temperatures)


def assert_equals_all_logits(configs, layout, beta, temperatures):
    weights, teacher = random_weights(configs[0], 0), random_weights(configs[1], 1)
    batch, states = given(configs[0].vocab_size), teacher_states()
    settings = dict(zip(("temperature", "teacher_temperature"), temperatures, strict=True))
    out = chunked(configs, weights, batch, teacher, states, layout, beta=beta, **settings)
    wanted = expected(configs, weights, batch, teacher, states, beta, temperatures)
    # float32 sums of a few dozen terms in another order.
    assert_close(out, wanted, 3e-6)
    assert np.min(wanted[0]) > 1e-3
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "vocab_sizes", "unused", "beta"),
    [
        ("dp1", (36, 36), (TAIL, ()), 1.0),
        ("tp4 cp2", (36, 36), (HOLES, TAIL), 0.5),
        ("tp4", (37, 36), ((), HOLES), 0.0),
    ],
)
def test_divergence_of_unused_ids(layout, vocab_sizes, unused, beta):
    config = replace(config_of(vocab_sizes[0], 5), unused_ids=unused[0])
    teacher = teacher_of(vocab_sizes[1], unused=unused[1])
    _, (gradient, _) = assert_equals_all_logits((config, teacher), layout, beta, (0.7, 0.7))
    missing = [i for spans in unused for a, b in spans for i in range(a, b)]
    assert not np.any(np.asarray(gradient.head)[:, missing])


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_divergence_from_an_equal_teacher_is_zero(beta, dtype):
    config = config_of(37, 4)
    weights, batch = random_weights(config, 0), given(37, dtype)
    arguments = (config, config), weights, batch, weights, batch.x, "tp2 cp2"
    values, grads = chunked(*arguments, beta=beta, temperature=0.7)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((values, grads)))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_of_a_broken_teacher_stays_in_its_tokens(beta):
    configs = config_of(37, 4), teacher_of(37)
    weights, teacher = random_weights(configs[0], 0), random_weights(configs[1], 1)
    out = np.arange(TOKENS) % 5 == 2
    batch, states = given(37), teacher_states()
    batch = batch._replace(of_logprob=np.where(out, 0, batch.of_logprob))
    broken = np.where(out[:, None], np.nan, states)
    values, grads = chunked(configs, weights, batch, teacher, broken, "tp2", beta=beta)
    wanted, wanted_grads = chunked(configs, weights, batch, teacher, states, "tp2", beta=beta)
    np.testing.assert_array_equal(np.isnan(values), out)
    np.testing.assert_array_equal(values[~out], wanted[~out])
    jax.tree.map(np.testing.assert_array_equal, grads, wanted_grads)


@pytest.mark.slow
def test_divergence_of_far_logits():
    """Teachers ten thousand nats away, and one that differs by a constant alone."""
    config = config_of(36, 5)
    weights, batch = random_weights(config, 0), given(36)
    draw = np.random.default_rng(5)
    far = weights.replace(head=draw.integers(-900, 900, weights.head.shape).astype(np.float32))
    x = draw.integers(-8, 8, batch.x.shape).astype(np.float32)
    x[:, 0], far.head[0] = 8, 900
    batch = batch._replace(x=x)
    shifted = far.replace(head=far.head + np.where(np.arange(10) == 0, 500, 0)[:, None].astype("f"))
    for teacher, zero in ((weights, False), (shifted, True)):
        for beta in (0.0, 0.5, 1.0):
            rest = far, batch, teacher, x
            values, grads = chunked((config, config), *rest, "tp2", beta=beta)
            wanted = expected((config, config), *rest, beta, (1.0, 1.0))
            np.testing.assert_allclose(values, wanted[0], rtol=1e-5, atol=1e-5)
            # Log-ratios of ten thousand nats have an error of 1e-3; the weights reach 900, and most
            # probabilities are 0 or 1.
            for actual, other in zip(
                jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True
            ):
                np.testing.assert_allclose(actual, other, rtol=1e-5, atol=2e-2)
            assert not np.any(values) if zero else np.max(values) > 0.5


# Many tokens and few columns at a time: of all arrays the logits would be the largest.
MANY, CHUNK, LAYOUT = 96, 7, "tp4 cp2"


@functools.cache
def compiled(vocab_size, beta):
    """Forward and backward of `MANY` tokens, gradients of each device left apart."""
    config, teacher_config, mesh = (
        config_of(vocab_size, CHUNK),
        teacher_of(vocab_size),
        mesh_of(LAYOUT),
    )
    model, name = Model(config, mesh), HELD_IN["untied"]

    def local(weights, batch, teacher, states):
        weights, batch = vary((weights, batch), mesh.axes)
        values, pull = jax.vjp(
            lambda matrix, x: divergence(
                weights.replace(**{name: matrix}),
                x,
                teacher,
                states,
                model,
                teacher_config,
                beta=beta,
            ),
            getattr(weights, name),
            batch.x,
        )
        return values, pull(batch.of_logprob * values)

    token, shard = P(mesh.axes), P(mesh.sequence)
    teacher_specs = specs(Model(teacher_config, mesh))
    inputs = (specs(model), shard, teacher_specs, shard)
    step = on_mesh(local, mesh, inputs, (token, (token, token)))
    arrays = given(vocab_size, num_tokens=MANY), random_weights(teacher_config, 1)
    return step.lower(random_weights(config, 0), *arrays, teacher_states(MANY)).compile()


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergence_memory_does_not_grow_with_the_vocabulary(beta):
    few, many = (compiled(vocab_size, beta) for vocab_size in (160, 640))
    of_group = MANY // 2
    for program, columns in ((few, 40), (many, 160)):
        # States of a tp group, or the teacher's columns of a rank.
        assert largest_array(program) == max(of_group, columns) * WIDTH < of_group * columns
    peaks = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
    # Beside copies of the columns themselves, of both heads and the gradient.
    assert peaks[1] - peaks[0] < 4 * (160 - 40) * (2 * WIDTH + 2 * 10)


@unchecked()
def test_divergence_refuses_bad_input():
    config, mesh = config_of(36), mesh_of("dp1")
    weights, batch = random_weights(config, 0), given(36)
    arguments = weights, batch.x, weights, batch.x, Model(config, mesh)
    with pytest.raises(ValueError, match=r"beta=1\.5 is the teacher's weight in the mixture"):
        divergence(*arguments, config, beta=1.5)
    with pytest.raises(ValueError, match=r'head="value" has no logits: this is a critic'):
        divergence(*arguments, config_of(36, head="value"))


@pytest.mark.parametrize("beta", full_but([0.0, 0.1, 0.5, 1.0], 0.1))
def test_divergence_equals_trl(beta):
    """TRL's own function of two heads in chunks, recorded."""
    arrays = {name: np.float32(values) for name, values in TRL["arrays"].items()}
    configs = [
        replace(config_of(7, 3), d_model=arrays[name].shape[1]) for name in ("x", "teacher_x")
    ]
    weights, teacher = (
        random_weights(config, 0).replace(head=arrays[name])
        for config, name in zip(configs, ("head", "teacher_head"), strict=True)
    )
    batch = given(7, num_tokens=4)._replace(x=arrays["x"], of_logprob=arrays["weights"])
    settings = {"beta": beta, "temperature": TRL["temperature"]}
    rest = batch, teacher, arrays["teacher_x"]
    values, (gradient, of_x) = chunked(configs, weights, *rest, "tp2", **settings)
    recorded = TRL["heads"][str(beta)]
    for actual, wanted in (
        (values, recorded["values"]),
        (of_x, recorded["gradients"]["x"]),
        (gradient.head.T, recorded["gradients"]["head"]),
    ):
        # TRL computes in float32 too.
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=3e-6)
