"""Decoding and training say the same about the same tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from policies import CONFIG, FAST_COMPILE, PROMPT, SAMPLING, Asked, decode, scored, scores, weights
from tiers import full_but

from jrl.rollout.sampling import GREEDY, Sampling
from moe import model
from moe.config import Model
from moe.placement import specs

# float32: the same sums, in blocks of other sizes.
CLOSE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SAMPLING, id="temperature and top-p"),
        pytest.param(Sampling(temperature=1.3, top_k=3), id="top-k", marks=pytest.mark.slow),
        pytest.param(Sampling(top_p=0.8), id="top-p", marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0.7), id="temperature", marks=pytest.mark.slow),
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow),
    ],
)
def test_decoding_and_scoring_agree(sampling):
    decoder = Asked(sampling)
    rollout = decode(decoder)
    logprobs, behaviour, entropy = scored(decoder, rollout)
    drawn = rollout.mask
    np.testing.assert_allclose(logprobs[drawn], rollout.old_logprobs[drawn], atol=CLOSE)
    np.testing.assert_allclose(behaviour[drawn], rollout.behaviour_logprobs[drawn], atol=CLOSE)
    assert np.all(entropy[drawn] > 0)
    assert np.all(entropy[drawn] <= np.log(CONFIG.vocab_size) + CLOSE)
    differ = np.abs(rollout.behaviour_logprobs - rollout.old_logprobs)[drawn].max()
    assert (differ > 0.01) == sampling.truncates


UNUSED = replace(CONFIG, vocab_size=12).with_unused_ids([1, 4, 9, 10, 11])


@pytest.mark.parametrize(
    ("sampling", "layout"),
    full_but(
        [
            (SAMPLING, "dp1"),
            (SAMPLING, "tp2 dp2 / ep4"),
            (Sampling(top_k=10), "dp1"),
            (GREEDY, "dp1"),
        ],
        (SAMPLING, "tp2 dp2 / ep4"),
    ),
)
def test_unused_ids_are_not_sampled_and_scoring_agrees(sampling, layout):
    unused = [1, 4, 9, 10, 11]
    padded = Asked(sampling, layout, config=replace(UNUSED, unused_ids=()))
    rollout = decode(padded)
    assert np.isin(rollout.tokens[rollout.mask], unused).any(), "the seed shows nothing"
    decoder = Asked(sampling, layout, config=UNUSED)
    rollout = decode(decoder)
    drawn = rollout.mask
    assert not np.isin(rollout.tokens[drawn], unused).any()
    logprobs, behaviour, entropy = scored(decoder, rollout)
    np.testing.assert_allclose(logprobs[drawn], rollout.old_logprobs[drawn], atol=CLOSE)
    np.testing.assert_allclose(behaviour[drawn], rollout.behaviour_logprobs[drawn], atol=CLOSE)
    assert np.all(entropy[drawn] <= np.log(UNUSED.num_used_ids) + CLOSE)


@pytest.mark.slow
def test_agreement_is_the_layout_s_too():
    """Here each ``tp`` rank has its columns of the head."""
    config = replace(CONFIG, vocab_size=12)
    decoder = Asked(Sampling(top_k=5), "tp2 dp2 / ep4", config=config)
    rollout = decode(decoder)
    logprobs, behaviour, _ = scored(decoder, rollout)
    drawn = rollout.mask
    np.testing.assert_allclose(logprobs[drawn], rollout.old_logprobs[drawn], atol=CLOSE)
    np.testing.assert_allclose(behaviour[drawn], rollout.behaviour_logprobs[drawn], atol=CLOSE)


@pytest.mark.slow
def test_scores_are_those_of_the_token_they_stand_at():
    decoder = Asked()
    rollout, mesh = decode(decoder), decoder.mesh
    network = Model(CONFIG, mesh)
    logprobs, _, entropy = scored(decoder, rollout)
    step = jax.jit(
        jax.shard_map(
            lambda w, t, v: model.next_token_logits(w, t, v, network)[0],
            mesh=mesh.mesh,
            in_specs=(specs(network), P(), P()),
            out_specs=P(mesh.axes),
        ),
        compiler_options=FAST_COMPILE,
    )
    logits = step(weights(), jnp.asarray(rollout.tokens), jnp.asarray(rollout.valid))
    logits = (
        np.asarray(logits, np.float64).reshape(*rollout.tokens.shape, -1) / SAMPLING.temperature
    )
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_array_equal(logprobs[:, 0], 0)
    np.testing.assert_array_equal(entropy[:, 0], 0)
    for row in range(rollout.tokens.shape[0]):
        for t in range(PROMPT, rollout.tokens.shape[1]):
            before = logits[row, t - 1]
            np.testing.assert_allclose(logprobs[row, t], before[rollout.tokens[row, t]], atol=CLOSE)
            np.testing.assert_allclose(entropy[row, t], -np.exp(before) @ before, atol=CLOSE)


@pytest.mark.slow
def test_the_sampler_s_logprobs_carry_no_gradient():
    decoder = Asked(Sampling(top_k=3))
    mesh, rollout = decoder.mesh, decode(Asked())

    network = Model(CONFIG, mesh)

    def local(weights, tokens, valid):
        def totals(weights):
            given = scores(decoder, weights, tokens, valid)
            whole = jnp.where(given.logprobs < 0, given.logprobs, 0.0)
            of_sampler = given.behaviour_logprobs
            of_sampler = jnp.where(jnp.isfinite(of_sampler), of_sampler, 0.0)
            return jax.lax.psum((jnp.sum(whole), jnp.sum(of_sampler)), mesh.except_sequence)

        (_, of_sampler), back = jax.vjp(totals, weights)
        one, zero = jnp.ones_like(of_sampler), jnp.zeros_like(of_sampler)
        return back((one, zero))[0].head, back((zero, one))[0].head, of_sampler

    head = specs(network).head
    step = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(network), P(), P()),
        out_specs=(head, head, P()),
    )
    given = weights(), rollout.tokens, rollout.valid
    of_policy, of_sampler, total = jax.jit(step, compiler_options=FAST_COMPILE)(*given)
    assert np.max(np.abs(of_policy)) > 0.1 and float(total) < -0.1
    np.testing.assert_array_equal(of_sampler, 0)
