"""One token at a time with a cache gives what the whole sequence at once gives."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh, random_weights, with_room
from small_networks import ROUTED
from tiers import full_but

from moe import model
from moe.architecture.rope import YarnScaling
from moe.attention.latent import caches_latent
from moe.cache import KEY_COLUMN, StepTokens
from moe.config import GatedDeltaNet, Model, MultiHeadLatentAttention
from moe.decoding import decode_step
from moe.execution import Execution
from moe.experts.dispatch.choice import dispatch
from moe.kernels import decode_attention as kernels
from moe.layers import block
from moe.layers.depth import split_layer_groups
from moe.model import prefill
from moe.placement import specs
from moe.weights import shapes
from sharding.collectives import vary
from sharding.folding import Layout, fold_abstract

LATENT = replace(
    ROUTED,
    num_experts=0,
    d_ff=12,
    num_kv_heads=8,
    head_dim=9,
    mla=MultiHeadLatentAttention(kv_lora_rank=5, q_lora_rank=7, qk_rope_head_dim=4, v_head_dim=3),
    rope_scaling=YarnScaling(4.0, 2, score_temperature=1.0),
)
SCANNED = replace(ROUTED, execution=Execution(scan_layers=True))
# Dense ones look back no further than two tokens, but in the first layer.
DENSE = replace(ROUTED, num_experts=0, d_ff=12, head="tied")
DENSE = replace(DENSE, sliding_window=3, full_attention_layers=(0,))
CONFIGS = {
    "routed": ROUTED,
    "dense": DENSE,
    "latent": LATENT,
    "expanded": replace(LATENT, execution=Execution(latent="expanded")),
    "scanned": SCANNED,
    "scanned windows": replace(DENSE, execution=Execution(scan_layers=True)),
    "scanned latent": replace(LATENT, execution=Execution(scan_layers=True)),
    # Prompts are as long as the filters, longer and shorter.
    "delta": replace(
        ROUTED,
        num_layers=3,
        num_experts=0,
        d_ff=12,
        delta=GatedDeltaNet((0, 2), 2, 4, key_head_dim=5, value_head_dim=3, conv_width=4),
        attention_gate=True,
    ),
    # Layers of two kinds in turn, two of each: a stack of every kind.
    "periods of windows": replace(
        DENSE, num_layers=4, full_attention_layers=(1, 3), execution=Execution(scan_layers=True)
    ),
    "periods of delta": replace(
        ROUTED,
        num_layers=4,
        delta=GatedDeltaNet((0, 2), 2, 4, key_head_dim=5, value_head_dim=3, conv_width=4),
        execution=Execution(scan_layers=True),
    ),
    # A stack of one layer and one of two.
    "dense first": replace(SCANNED, num_layers=3, num_dense_layers=1, dense_d_ff=12),
}
ROWS, PROMPT, RESPONSE, STEPS = 4, 4, 3, 3


def batch():
    """Rows of prompts of two lengths, which end at lengths of their own."""
    tokens = np.random.default_rng(3).integers(0, ROUTED.vocab_size, (ROWS, PROMPT + RESPONSE))
    prompts = np.array([PROMPT, PROMPT - 2, PROMPT, PROMPT - 1], np.int32)
    ends = np.array([PROMPT + RESPONSE, PROMPT, PROMPT + 1, PROMPT + 2], np.int32)
    return tokens.astype(np.int32), prompts, ends


def stepwise(config, mesh, room=RESPONSE):
    """Logits ``[step, row, vocab]`` of rows that go on one token a step, each from its prompt's
    end, and the cache's keys of the last layer before and after."""

    network = Model(config, mesh)

    def of_last_layer(cache):
        return cache.keys[-1][-1] if cache.keys[-1].ndim > 4 else cache.keys[-1]

    def local(weights, tokens, prompts, ends):
        weights = vary(weights, mesh.axes)
        tokens, prompts, ends = vary((tokens, prompts, ends), mesh.except_sequence)
        ran = prefill(weights, tokens[:, :PROMPT], prompts, network)
        cache = with_room(ran.cache, room)
        layers = split_layer_groups(weights, config)
        rows = jnp.arange(tokens.shape[0])

        def step(cache, number):
            place = prompts + number
            token = tokens[rows, jnp.minimum(place, tokens.shape[1] - 1)]
            inputs = StepTokens(token, place, place < ends)
            logits, cache, _ = decode_step(layers, weights, cache, inputs, network)
            return cache, logits

        after, logits = jax.lax.scan(step, cache, jnp.arange(STEPS))
        return logits, of_last_layer(cache), of_last_layer(after)

    rows = P(mesh.dp)
    others = tuple(axis for axis in mesh.axes if axis not in mesh.dp + mesh.tp)
    heads = P(others, mesh.dp, mesh.tp)
    return on_mesh(
        lambda *given: jax.tree.map(lambda x: x[None], local(*given)),
        mesh,
        (specs(network), rows, rows, rows),
        (P(others, None, mesh.dp + mesh.tp), heads, heads),
    )


# Sizes that the kernel takes, of heads and, with the response, of columns.
HALF = replace(DENSE, d_model=16, num_heads=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_decode_step_passes_visible_range_to_kernel(scan_layers, monkeypatch):
    """Its twin in its place: which layer, which columns, which window, bit for bit."""
    plain = replace(HALF, execution=Execution(scan_layers=scan_layers))
    kernel = replace(plain, execution=replace(plain.execution, decode_attention="mosaic"))
    calls = []

    def twin(query, keys, values, first, stop, layer, *, scale):
        calls.append(keys.shape)
        return kernels.plain_decode_attention(query, keys, values, first, stop, layer, scale=scale)

    monkeypatch.setattr(kernels, "split_attention", twin)
    weights, one = random_weights(plain, 0), mesh_of("dp1")
    found, expected = (
        np.asarray(stepwise(config, one, room=64 - PROMPT)(weights, *batch())[0], np.float32)[0]
        for config in (kernel, plain)
    )
    assert set(calls) == {(2 if scan_layers else 1, ROWS, 2, 64, 64)}
    _, prompts, ends = batch()
    for step in range(STEPS):
        live = prompts + step < ends
        np.testing.assert_array_equal(found[step][live], expected[step][live])


@pytest.mark.slow
def test_a_step_with_the_kernel_is_lowered_for_cuda():
    config = replace(HALF, execution=Execution(decode_attention="mosaic"))
    step = stepwise(config, mesh_of("dp1"), room=64 - PROMPT)
    exported = jax.export.export(step, platforms=["cuda"])
    text = exported(random_weights(config, 0), *batch()).mlir_module()
    # Of both layers, in one loop over steps.
    assert text.count("call @mosaic_gpu_v2") == 2


def test_a_kernel_is_refused_by_vectors_that_it_cannot_read():
    config = replace(LATENT, execution=Execution(decode_attention="mosaic"))
    with pytest.raises(ValueError, match=r"decode_attention='mosaic' .* use None\."):
        stepwise(config, mesh_of("dp1"))(random_weights(config, 0), *batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    full_but(
        [
            ("routed", "dp1"),
            ("routed", "tp2 dp2 / ep2 etp2"),
            ("dense", "tp2"),
            ("latent", "tp2"),
            ("expanded", "tp2"),
            ("scanned", "dp1"),
            ("scanned", "tp2 dp2 / ep2 etp2"),
            ("scanned windows", "tp2"),
            ("scanned latent", "tp2"),
            ("dense first", "tp2 dp2 / ep2 etp2"),
            ("delta", "tp2"),
            ("periods of windows", "tp2"),
            ("periods of delta", "tp2"),
        ],
        ("latent", "tp2"),
        ("periods of delta", "tp2"),
    ),
)
def test_steps_equal_the_whole_sequence(kind, layout):
    config = CONFIGS[kind]
    one, weights = mesh_of("dp1"), random_weights(config, 0)
    network = Model(config, one)
    tokens, prompts, ends = batch()
    whole = on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, network)[0],
        one,
        (specs(network), P(), P()),
        P(one.axes),
    )(weights, tokens, np.ones(tokens.shape, bool))
    whole = np.reshape(whole, (ROWS, PROMPT + RESPONSE, -1))
    steps, *keys = (np.asarray(x)[0] for x in stepwise(config, mesh_of(layout))(weights, *batch()))
    before, after = (np.moveaxis(each, KEY_COLUMN, 2) for each in keys)
    assert steps.shape == (STEPS, ROWS, ROUTED.vocab_size)
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        going = end - prompt
        assert 0 < going <= STEPS
        # float32: the same sums, in blocks of other sizes.
        np.testing.assert_allclose(steps[:going, row], whole[row, prompt:end], atol=1e-5)
        # Its own columns are written, one a step, and none when it has ended.
        np.testing.assert_array_equal(after[row][:, :prompt], before[row][:, :prompt])
        assert np.all(np.any(after[row][:, prompt:end] != before[row][:, prompt:end], axis=(0, 2)))
        np.testing.assert_array_equal(after[row][:, end:], before[row][:, end:])
    chex.assert_tree_all_finite(steps)


@pytest.mark.slow
def test_prefill_equals_the_forward_pass_and_keeps_every_column():
    mesh, weights = mesh_of("dp1"), random_weights(ROUTED, 0)
    network = Model(ROUTED, mesh)
    tokens, lengths, _ = batch()
    tokens = tokens[:, :PROMPT]

    def local(weights, tokens, lengths):
        ran = prefill(weights, tokens, lengths, network)
        valid = jnp.arange(PROMPT)[None] < lengths[:, None]
        expected, _ = model.hidden(weights, tokens, valid, network)
        sizes = [buffer.size for buffer in (*ran.cache.keys, *ran.cache.values)]
        assert sizes == [ROWS * PROMPT * 4 * 6] * 4
        return ran.states, expected

    states, expected = on_mesh(local, mesh, (specs(network), P(), P()), P(mesh.axes))(
        weights, tokens, lengths
    )
    last = np.asarray(expected).reshape(ROWS, PROMPT, -1)[np.arange(ROWS), lengths - 1]
    np.testing.assert_allclose(states, last, rtol=1e-6)


@pytest.mark.parametrize(
    ("latent", "keys", "values"),
    [(None, [5 + 4] * 2, []), ("absorbed", [5 + 4] * 2, []), ("expanded", [72] * 2, [24] * 2)],
)
def test_a_latent_cache_holds_narrow_vectors(latent, keys, values):
    """Numbers per token and layer: of DeepSeek-V3 they would be 512 + 64, and 128 (192 + 128)."""
    config, mesh = replace(LATENT, execution=Execution(latent=latent)), mesh_of("dp1")

    def local(weights, tokens, lengths):
        cache = prefill(weights, tokens, lengths, Model(config, mesh)).cache
        found = ([x.size // (ROWS * PROMPT) for x in each] for each in (cache.keys, cache.values))
        assert list(found) == [keys, values]
        return lengths

    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(step, shapes(config), jnp.zeros((ROWS, PROMPT), int), jnp.ones(ROWS, int))


@unchecked()
def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"execution.latent='wide' is not known: choose among abs"):
        caches_latent(replace(ROUTED, execution=Execution(latent="wide")))


def test_a_cache_holds_whole_rows():
    mesh = fold_abstract(Layout(cp=2))
    tokens, lengths, _ = map(jnp.asarray, batch())
    with pytest.raises(
        ValueError, match=r"decoding does not support context parallelism, .* use cp=1"
    ):
        prefill(random_weights(ROUTED, 0), tokens, lengths, Model(ROUTED, mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "of_steps"), [("expert_chunks", 2, 1), ("buffer_factor", 0.1, None)]
)
def test_a_step_sends_its_few_tokens_at_once_with_room_for_any_routing(
    option, value, of_steps, monkeypatch
):
    """And the prompts before it in chunks and in buffers that can hold too little: they may run
    again, and nobody would run a step again."""
    given_to = []

    def noting(weights, x, routing, mesh, execution, **options):
        given_to.append(getattr(execution, option))
        return dispatch(weights, x, routing, mesh, execution, **options)

    monkeypatch.setattr(block, "dispatch", noting)
    config, mesh = replace(ROUTED, execution=Execution(**{option: value})), mesh_of("dp1")
    jax.eval_shape(stepwise(config, mesh), random_weights(config, 0), *batch())
    layers = config.num_expert_layers
    assert layers > 0 and given_to[:layers] == [value] * layers
    assert set(given_to[layers:]) == {of_steps}
