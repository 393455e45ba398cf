"""Attention and experts on devices of their own sample what one mesh samples."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from policies import CONFIG, Asked, answers, weights

from jrl.rollout import resharding as pushing
from jrl.rollout.decoding import split_backend
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.requests import read_sampled
from jrl.rollout.decoding.split_backend import DeviceSplit, SplitBackend
from jrl.rollout.sampling import Sampling
from moe.adapters import is_adapted
from moe.architecture.lora import TARGETS, Lora
from moe.disaggregated.split import Split, fold_split
from sharding.folding import Layout, fold

CLOSE = 1e-6
"""float32: the sums of a token's experts come in another order."""


def engine(asked, split, micro_batches=1, **places):
    """With the weights on one device, which is none of the split's."""
    training = fold(Layout(), jax.devices()[15:])
    mesh = fold_split(Split.parse(split), jax.devices()[: Split.parse(split).num_devices])
    decoder = asked.decoder(mesh.attention)
    backend = SplitBackend(decoder, training, DeviceSplit(mesh, micro_batches, **places))
    key = jax.random.key(asked.seed)
    engine = Engine(backend, slots=asked.slots, max_length=asked.columns, key=key)
    engine.load(weights(asked.config), 5)
    return engine


def rows_of(trajectories):
    rows = {}
    for t in trajectories:
        if id(t.buffer) not in rows:
            rows[id(t.buffer)] = jax.tree.map(np.asarray, t.buffer.rows)
    return [read_sampled(rows[id(t.buffer)], t.row, t.request) for t in trajectories]


@pytest.mark.parametrize(
    ("split", "tokens"),
    # A device has messages from or to every device of the other group.
    [("tp2 dp2 / ep2", 64 * 2 // 4), ("dp1 / ep4", 64 // 4), ("dp4 / ep1 etp2", 64 // 4)],
)
def test_a_prefill_is_bounded_by_the_messages_of_a_device(split, tokens, monkeypatch):
    monkeypatch.setattr(split_backend, "MAX_EXCHANGED_TOKENS", 64)
    asked = Asked(slots=8)
    training = fold(Layout(), jax.devices()[15:])
    mesh = fold_split(Split.parse(split), jax.devices()[: Split.parse(split).num_devices])
    backend = SplitBackend(asked.decoder(mesh.attention), training, DeviceSplit(mesh, 1))
    given = {"slots": 8, "key": jax.random.key(0)}
    sizes = Engine(backend, max_length=tokens // 2, **given).prefill_sizes
    assert max(width * rows for width, rows in sizes) == tokens
    # A longer prompt is run by itself.
    assert Engine(backend, max_length=2 * tokens, **given).prefill_sizes[-1] == (2 * tokens, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "finishes"),
    [(Sampling(top_p=0.9), {"stop", "length"}), (Sampling(temperature=0.0), {"length"})],
    ids=["sampled", "greedy"],
)
def test_the_split_is_invisible(sampling, finishes):
    # Fewer slots than rows: rows come where others end.
    asked = Asked(sampling, slots=8, response=6, records_choices=True)
    one, two = (
        answers(each, asked.requests, asked.sampling)
        for each in (asked.engine(), engine(asked, "tp2 dp2 / ep2", micro_batches=2))
    )
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        np.testing.assert_array_equal(b.tokens, a.tokens)
        np.testing.assert_array_equal(b.versions, a.versions)
        np.testing.assert_array_equal(b.choices, a.choices)
        np.testing.assert_allclose(b.behaviour_logprobs, a.behaviour_logprobs, atol=CLOSE)
        np.testing.assert_allclose(b.old_logprobs, a.old_logprobs, atol=CLOSE)
    assert [t.finish for t in two] == [t.finish for t in one]
    assert {t.finish for t in one} == finishes


@pytest.mark.slow
def test_an_update_of_adapters_reaches_both_sides():
    """Only they change, and every weight that decodes with them."""
    config = replace(CONFIG, d_ff=5, lora=Lora(rank=2, alpha=3.0, targets=TARGETS))
    asked = Asked(Sampling(), response=4, config=config, records_choices=True)

    def adapted(factor):
        """With what adapters add times a factor, small enough that logits stay of their size."""
        return jax.tree.map(
            lambda leaf: replace(leaf, b=factor * leaf.b) if is_adapted(leaf) else leaf,
            weights(config),
            is_leaf=is_adapted,
        )

    before, after = adapted(0.25), adapted(-0.25)
    tokens, engines = [], (asked.engine(), engine(asked, "dp1 / ep1"))
    for version, policy in ((6, before), (7, after)):
        for each in engines:
            each.load(policy, version)
        given = [answers(each, asked.requests, asked.sampling) for each in engines]
        for a, b in zip(*map(rows_of, given), strict=True):
            np.testing.assert_array_equal(b.tokens, a.tokens)
            np.testing.assert_array_equal(b.choices, a.choices)
            np.testing.assert_array_equal(b.versions, version)
            np.testing.assert_allclose(b.old_logprobs, a.old_logprobs, rtol=CLOSE, atol=CLOSE)
        tokens.append(np.concatenate([row.tokens for row in rows_of(given[1])]))
    assert not np.array_equal(*tokens)


@pytest.mark.slow
def test_experts_move_while_rows_decode():
    """Experts get equally much to do, hot ones on several devices; rows do not change."""
    asked = Asked(Sampling(), slots=8, response=9)
    one, two = asked.engine(), engine(asked, "dp1 / ep2", expert_slots=3, replan=2)
    first = two.backend.expert_balancer.placements
    given = [answers(each, asked.requests, asked.sampling) for each in (one, two)]
    assert two.backend.expert_balancer.moves and two.backend.expert_balancer.has_moved
    for a, b in zip(*map(rows_of, given), strict=True):
        np.testing.assert_array_equal(b.tokens, a.tokens)
        np.testing.assert_allclose(b.old_logprobs, a.old_logprobs, atol=CLOSE)
    # The next rollout begins with the same state: its bits are the same.
    again = answers(two, asked.requests, asked.sampling)
    for a, b in zip(rows_of(given[1]), rows_of(again), strict=True):
        np.testing.assert_array_equal(b.tokens, a.tokens)
        np.testing.assert_array_equal(b.old_logprobs, a.old_logprobs)
    two.release()
    two.load(weights(asked.config), 6)
    two.submit(asked.requests, asked.sampling)
    assert two.backend.expert_balancer.placements == first


@pytest.mark.slow
def test_the_loads_are_the_tokens_that_experts_had():
    """All of a rollout's but for each row's last token, which is not run; rows come from one
    side."""
    asked = Asked()
    one, two = asked.engine(), engine(asked, "dp1 / ep2", expert_slots=3, replan=1000)
    expected, rows = (rows_of(answers(each, asked.requests, asked.sampling)) for each in (one, two))
    for a, b in zip(expected, rows, strict=True):
        np.testing.assert_array_equal(b.tokens, a.tokens)
        np.testing.assert_allclose(b.old_logprobs, a.old_logprobs, atol=CLOSE)
    wanted = np.zeros((CONFIG.num_expert_layers, CONFIG.num_experts), int)
    for row in rows:
        # The prompt's tokens were run before.
        run = row.choices[-len(row.tokens) : -1]
        for layer in range(len(wanted)):
            np.add.at(wanted[layer], run[:, layer], 1)
    assert wanted.any()
    np.testing.assert_array_equal(np.asarray(two.backend.loads), wanted)


@pytest.mark.slow
def test_weights_are_pushed_once_and_experts_looked_at_as_often_as_said(monkeypatch):
    """Once for each policy that is loaded, whatever is admitted and decoded; after each two tokens
    of the rows, however many the host has decoded at once."""
    pushes, looks, run = [], [], pushing.split_weights
    monkeypatch.setattr(pushing, "split_weights", lambda *given: pushes.append(0) or run(*given))
    asked = Asked()
    two = engine(asked, "dp1 / ep2", expert_slots=3, replan=2)
    look = two.backend.expert_balancer.rebalance
    monkeypatch.setattr(
        two.backend.expert_balancer, "rebalance", lambda loads: looks.append(0) or look(loads)
    )
    for version in (6, 7):
        before, policy = two.usage.steps, replace(weights(asked.config))
        two.load(policy, version)
        looks.clear()
        answers(two, asked.requests, asked.sampling)
        assert len(looks) == (two.usage.steps - before) // 2 > 1
        answers(two, asked.requests, asked.sampling)
        # Those that came with the engine were loaded first.
        assert len(pushes) == version - 4
