"""What is read off chunks of the head's columns against what is read off all logits."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from tiers import full_but

from moe.config import Head, Model, ModelConfig
from moe.execution import Execution
from moe.head import is_argmax, logits_of, logprobs_and_entropy
from moe.ops.precision import MASK_VALUE
from moe.placement import specs
from sharding.collectives import all_sum, vary

TOKENS, D_MODEL = 24, 10
COLLECTIVE = r" (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("


def config_of(vocab_size, chunk=None, head: Head = "untied"):
    """Only the ends of the network matter here."""
    return ModelConfig(
        vocab_size,
        num_layers=2,
        d_model=D_MODEL,
        num_heads=8,
        num_kv_heads=4,
        head_dim=6,
        num_experts=0,
        d_ff=12,
        head=head,
        execution=Execution(vocab_chunk=chunk),
    )


class Given(NamedTuple):
    """States, the tokens that follow them, and what the loss makes of both numbers."""

    x: np.ndarray
    tokens: np.ndarray
    of_logprob: np.ndarray
    of_entropy: np.ndarray


def given(vocab_size, dtype="float32", num_tokens=TOKENS):
    draw = np.random.default_rng(3)
    x = (3 * draw.normal(size=(num_tokens, D_MODEL))).astype(dtype)
    tokens = draw.integers(0, vocab_size, num_tokens)
    tokens[:2] = 0, vocab_size - 1
    coefficients = draw.normal(size=(2, num_tokens)).astype(np.float32)
    return Given(x, tokens.astype(np.int32), *coefficients)


def plain(weights, x, tokens, temperature):
    """Both numbers from all logits, on one device."""
    head = weights.embedding.T if weights.head is None else weights.head
    logits = x.astype(jnp.float32) @ head.astype(x.dtype).astype(jnp.float32) / temperature
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)


@functools.partial(jit, static_argnums=2)
def expected(weights, batch, temperature):
    """Both numbers, and the gradient of a loss of both with respect to weights and states."""

    def loss(weights, x):
        both = plain(weights, x, batch.tokens, temperature)
        return batch.of_logprob @ both[0] + batch.of_entropy @ both[1], both

    (_, both), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, batch.x)
    return both, grads


def chunked(weights, batch, config, layout, temperature):
    """The same on a mesh, tokens over ``dp x cp x tp``, by the function that is tested."""
    mesh = mesh_of(layout)

    model = Model(config, mesh)

    def local(weights, batch):
        def loss(weights, x):
            both = logprobs_and_entropy(weights, x, batch.tokens, model, temperature)
            assert all(number.dtype == jnp.float32 for number in both)
            own = batch.of_logprob @ both[0] + batch.of_entropy @ both[1]
            # Stages hold the same tokens, which count once.
            return all_sum(own, mesh.axes) / mesh.layout.pp, both

        (_, both), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(weights, batch.x)
        others = tuple(axis for axis in mesh.axes if axis not in (*mesh.dp, *mesh.sequence))
        return jax.lax.pmax(both, others), grads

    by_token = P((*mesh.dp, *mesh.sequence))
    spec = specs(model)
    step = on_mesh(local, mesh, (spec, by_token), ((by_token, by_token), (spec, by_token)))
    return step(weights, batch)


def assert_close(out, wanted, rtol, gradient_rtol=None):
    """`rtol` is of the largest number of each array."""
    (both, grads), (both_wanted, grads_wanted) = out, wanted
    for tree, other, bound in (
        (both, both_wanted, rtol),
        (grads, grads_wanted, gradient_rtol or rtol),
    ):
        jax.tree.map(
            lambda a, b, bound=bound: np.testing.assert_allclose(
                np.asarray(a, np.float64),
                np.asarray(b, np.float64),
                atol=bound * max(float(np.max(np.abs(b))), 1e-30),
                rtol=0,
            ),
            tree,
            other,
        )


CASES = [
    # One chunk; then chunks that divide the columns of a rank and chunks that do not.
    ("dp1", 37, None, "untied", 0.7),
    ("dp1", 37, 8192, "tied", 1.0),
    ("cp2 dp2", 37, 11, "tied", 1.3),
    ("tp2", 36, 5, "untied", 0.7),
    ("tp4 cp2", 36, 3, "untied", 1.3),
    ("dp2 tp2 pp2", 36, 7, "untied", 1.0),
    # The rows of an embedding that is spread.
    ("tp2", 36, 5, "tied", 1.3),
    ("tp4 cp2", 36, None, "tied", 0.7),
    ("dp2 tp2 pp2", 36, 7, "tied", 0.7),
    # Columns that tp does not divide, which every rank holds.
    ("tp2", 37, None, "untied", 1.0),
    ("tp4 cp2", 37, 4, "tied", 0.7),
    ("dp2 tp2 pp2", 37, 19, "untied", 0.7),
    # A rank that has no column of its own.
    ("tp4", 5, 1, "untied", 0.7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "vocab_size", "chunk", "head", "temperature"), CASES)
def test_equals_the_plain_twin(layout, vocab_size, chunk, head, temperature):
    config = config_of(vocab_size, chunk, head)
    weights, batch = random_weights(config, 0), given(vocab_size)
    out = chunked(weights, batch, config, layout, temperature)
    wanted = jax.device_get(expected(weights, batch, temperature))
    # float32 sums of a few dozen terms in another order.
    assert_close(out, wanted, 3e-6)
    matrix = wanted[1][0].embedding if head == "tied" else wanted[1][0].head
    assert np.min(np.max(np.abs(matrix), axis=int(head == "tied"))) > 0


TAIL, HOLES, FIRST = ((26, 36),), ((0, 2), (7, 8), (20, 31), (33, 34)), ((0, 19),)


@pytest.mark.parametrize(
    ("layout", "vocab_size", "chunk", "head", "unused"),
    full_but(
        [
            ("dp1", 36, None, "untied", TAIL),
            ("dp1", 36, 11, "tied", HOLES),
            ("tp2", 36, 5, "untied", HOLES),
            # Ranks of unused ids alone, in chunks of unused ids alone.
            ("tp4 cp2", 36, 3, "untied", TAIL),
            ("tp4 cp2", 36, None, "tied", FIRST),
            # Columns that tp does not divide, which every rank holds.
            ("dp2 tp4", 37, 4, "untied", HOLES),
        ],
        ("tp4 cp2", 36, 3, "untied", TAIL),
    ),
)
def test_unused_ids_are_not_in_the_softmax(layout, vocab_size, chunk, head, unused):
    """The reference has the columns of the other ids alone."""
    config = replace(config_of(vocab_size, chunk, head), unused_ids=unused)
    columns = [i for i in range(vocab_size) if not any(a <= i < b for a, b in unused)]
    columns = np.array(columns, np.int32)
    weights, batch = random_weights(config, 0), given(len(columns))
    out = chunked(weights, batch._replace(tokens=columns[batch.tokens]), config, layout, 0.7)
    name = HELD_IN[head]

    def of_used(matrix):
        return matrix[columns] if head == "tied" else matrix[:, columns]

    fewer = weights.replace(**{name: of_used(getattr(weights, name))})
    both, (of_fewer, of_states) = jax.device_get(expected(fewer, batch, 0.7))
    gradient, of_config = getattr(out[1][0], name), getattr(of_fewer, name)
    # float32 sums of a few dozen terms in another order.
    assert_close((out[0], (of_used(gradient), out[1][1])), (both, (of_config, of_states)), 3e-6)
    assert np.count_nonzero(gradient) == np.count_nonzero(of_config) > 0


def test_without_unused_ids_nothing_is_masked():
    """The program equals the program of a network that has no such ids."""
    config, mesh = config_of(36, 5), mesh_of("dp1")
    weights, batch = jax.tree.map(jnp.asarray, (random_weights(config, 0), given(36)))

    def selects(config):
        read = on_mesh(
            lambda weights, x: logits_of(weights, x, Model(config, mesh)),
            mesh,
            (specs(Model(config, mesh)), P()),
            P(mesh.axes),
        )
        return read.lower(weights, batch.x).as_text().count("select")

    assert selects(config) == 0 < selects(replace(config, unused_ids=TAIL))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "vocab_size"), full_but([("tp2", 36), ("tp2 cp2", 37)], ("tp2 cp2", 37))
)
def test_states_of_bfloat16_are_summed_in_float32(layout, vocab_size):
    config = config_of(vocab_size, 5)
    weights, batch = random_weights(config, 0), given(vocab_size, "bfloat16")
    out = chunked(weights, batch, config, layout, 0.7)
    wanted = jax.device_get(expected(weights, batch, 0.7))
    assert out[1][1].dtype == jnp.bfloat16
    # The factors are the same bfloat16 numbers. In a gradient its factor and the states are rounded
    # to its 8 bits; tokens or columns are then summed.
    assert_close(out, wanted, 3e-6, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "vocab_size"),
    full_but([("dp1", 36), ("tp2", 36), ("tp4 cp2", 37)], ("tp4 cp2", 37)),
)
def test_logits_of_ten_thousand(layout, vocab_size):
    """Integers, so that logits are exact and the largest of a row may be several."""
    config = config_of(vocab_size, 4)
    draw = np.random.default_rng(5)
    head = draw.integers(-300, 300, (D_MODEL, vocab_size))
    head[:, -7:] = head[:, :7]  # ties on different ranks
    x = draw.integers(-8, 8, (TOKENS, D_MODEL))
    x[:3] = 0  # uniform
    batch = given(vocab_size)
    tokens = (x @ head).argmax(axis=1).astype(np.int32)
    tokens[::4] = vocab_size - 1
    batch = batch._replace(x=x.astype(np.float32), tokens=tokens)
    weights = random_weights(config, 0).replace(head=head.astype(np.float32))
    out = chunked(weights, batch, config, layout, 0.5)
    logits = (x @ head) / 0.5
    assert logits.max() > 10_000 and logits.min() < -10_000
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    chosen = logprobs[np.arange(TOKENS), tokens]
    np.testing.assert_allclose(out[0][0], chosen, rtol=1e-6, atol=1e-6)
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    np.testing.assert_allclose(out[0][1], entropy, atol=1e-6)
    assert len(np.unique(entropy.round(3))) >= 3
    assert_close(out, jax.device_get(expected(weights, batch, 0.5)), 1e-6)


# Many tokens and few columns at a time: of all arrays the logits would be the largest.
MANY, VOCAB, CHUNK, LAYOUT = 96, 160, 7, "tp4 cp2"


@functools.cache
def compiled(chunk, is_plain=False, head: Head = "untied"):
    """Forward and backward of `MANY` tokens, gradients of each device left apart."""
    config, mesh, name = config_of(VOCAB, chunk, head), mesh_of(LAYOUT), HELD_IN[head]

    model = Model(config, mesh)

    def read(weights, x, tokens):
        if not is_plain:
            return logprobs_and_entropy(weights, x, tokens, model, 0.7)
        logits = logits_of(weights, x, model) / 0.7
        logprobs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)

    def local(weights, batch):
        weights, batch = vary((weights, batch), mesh.axes)
        both, pull = jax.vjp(
            lambda matrix, x: read(weights.replace(**{name: matrix}), x, batch.tokens),
            getattr(weights, name),
            batch.x,
        )
        # As a loss's gradients do, these wait for the values.
        return both, pull((batch.of_logprob * both[0], batch.of_entropy * both[1]))

    by_token = P(mesh.axes)
    step = on_mesh(
        local,
        mesh,
        (specs(model), P(mesh.sequence)),
        ((by_token, by_token), (P(mesh.axes), by_token)),
    )
    return step.lower(random_weights(config, 0), given(VOCAB, num_tokens=MANY)).compile()


HELD_IN = {"tied": "embedding", "untied": "head"}


def largest_array(program):
    """Elements of the largest array of the program of one device."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("head", full_but(["untied", "tied"], "untied"))
def test_there_are_never_all_logits(head):
    """Neither of all columns and a device's tokens nor of its columns and all tokens of its group:
    both are as large."""
    of_group, columns = MANY // 2, VOCAB // 4
    others = max(of_group, columns) * D_MODEL  # states, columns
    assert of_group * CHUNK < others < of_group * columns
    assert largest_array(compiled(CHUNK, head=head)) == others
    for program in (compiled(None, head=head), compiled(None, is_plain=True, head=head)):
        assert largest_array(program) == of_group * columns
    small, large = (
        compiled(c, head=head).memory_analysis().temp_size_in_bytes for c in (CHUNK, None)
    )
    assert small < large / 2


@pytest.mark.slow
def test_collectives_are_those_claimed():
    """Forward a maximum and sums, backward the gradients of what each rank has kept."""
    counts = {"all-gather": 2, "all-reduce": 3, "reduce-scatter": 1}
    assert Counter(re.findall(COLLECTIVE, compiled(CHUNK).as_text())) == counts
    assert Counter(re.findall(COLLECTIVE, compiled(None).as_text())) == counts
    # Whoever asks for all logits trades columns for tokens, and back.
    counts = {"all-gather": 1, "all-to-all": 2, "reduce-scatter": 1}
    assert Counter(re.findall(COLLECTIVE, compiled(None, True).as_text())) == counts


@pytest.mark.parametrize(
    ("vocab_size", "head", "unused"),
    [(36, "untied", ()), (37, "untied", HOLES), (36, "tied", TAIL)],
)
def test_all_logits_are_those_of_one_device(vocab_size, head, unused):
    config, mesh = replace(config_of(vocab_size, head=head), unused_ids=unused), mesh_of("tp2 cp2")
    model = Model(config, mesh)
    weights, x = random_weights(config, 0), given(vocab_size).x
    by_token, spec = P(mesh.sequence), specs(model)

    def local(weights, x):
        return logits_of(weights, vary(x, mesh.axes), model)

    step = on_mesh(local, mesh, (spec, by_token), P(mesh.axes))
    wanted = x @ (weights.embedding.T if head == "tied" else weights.head)
    for first, end in unused:
        wanted[:, first:end] = MASK_VALUE
    np.testing.assert_allclose(step(weights, x), wanted, rtol=1e-7, atol=1e-5)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"vocab_chunk=0 must be at least 1; None"):
        Execution(vocab_chunk=0)
    config, mesh = config_of(36, head="value"), mesh_of("dp1")
    model = Model(config, mesh)
    weights, batch = jax.tree.map(jnp.asarray, (random_weights(config, 0), given(36)))
    with pytest.raises(ValueError, match=r'head="value" has no logits: this is a critic'):
        logprobs_and_entropy(weights, batch.x, batch.tokens, model)
    with pytest.raises(ValueError, match=r'head="value" has no logits: this is a critic'):
        logits_of(weights, batch.x, model)


@pytest.mark.parametrize(
    ("layout", "vocab_size", "chunk", "head", "unused"),
    full_but(
        [
            ("tp4 cp2", 37, 4, "tied", ()),
            ("tp2", 36, None, "untied", HOLES),
            ("dp1", 37, 11, "untied", TAIL),
        ],
        ("tp4 cp2", 37, 4, "tied", ()),
    ),
)
def test_a_token_is_the_likeliest_where_no_logit_is_higher(layout, vocab_size, chunk, head, unused):
    config = replace(config_of(vocab_size, chunk, head), unused_ids=unused)
    mesh, weights, batch = mesh_of(layout), random_weights(config, 0), given(vocab_size)
    model = Model(config, mesh)
    logits = batch.x @ (weights.embedding.T if weights.head is None else weights.head)
    for first, end in unused:
        logits[:, first:end] = MASK_VALUE
    best = logits.argmax(axis=1)
    tokens = np.where(np.arange(TOKENS) % 3, best, batch.tokens).astype(np.int32)
    by_token = P((*mesh.dp, *mesh.sequence))

    def local(weights, x, tokens):
        found = is_argmax(weights, x, tokens, model).astype(jnp.int32)
        return jax.lax.pmax(
            found, tuple(a for a in mesh.axes if a not in (*mesh.dp, *mesh.sequence))
        )

    run = on_mesh(local, mesh, (specs(model), by_token, by_token), by_token)
    found = np.asarray(run(weights, batch.x, tokens)).astype(bool)
    np.testing.assert_array_equal(found, tokens == best)
    assert not found.all() and found.sum() >= 2 * TOKENS // 3
