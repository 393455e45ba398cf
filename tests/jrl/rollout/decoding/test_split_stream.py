"""Rows of any kind, decoded with attention and experts on devices of their own, equal rows of one
mesh."""

from dataclasses import replace
from functools import cache
from weakref import ref

import jax
import numpy as np
import pytest
from policies import COLUMNS, CONFIG, PAD, STOPS, prompts, weights
from tiers import full_but

from jrl.rollout.adjustments import Adjustments, Constraint
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.expert_balancer import ExpertBalancer
from jrl.rollout.decoding.mesh_backend import MeshBackend
from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.decoding.split_backend import DeviceSplit, SplitBackend
from jrl.rollout.sampling import RequestSampling
from moe.disaggregated.split import Split, fold_split
from sharding.folding import Layout, fold

SLOTS, K, RESPONSE, WINDOW = 4, 3, 7, 3
CLOSE = 1e-6
"""float32: the sums of a token's experts come in another order."""
NAMES = "tokens", "logprobs"
GREEDILY = RequestSampling(temperature=0.0, needs_top_tokens=True)
BY_CHANCE = RequestSampling(0.7, 0.8, seed=2**40 + 5)


class Most(Constraint):
    """Allows all tokens but one."""

    def allowed(self):
        return np.array([(1 << CONFIG.vocab_size) - 1 - (1 << 4)], np.uint32)

    def accept(self, tokens):
        assert 4 not in tokens


ADJUSTED = RequestSampling(
    1.3, 1.0, 9, adjustments=Adjustments(6, frequency_penalty=0.7, constraint=Most())
)
GIVEN = {"slots": SLOTS, "max_length": COLUMNS, "key": jax.random.key(0), "policy": SERVING}


def decoder(mesh):
    return Decoder(CONFIG, mesh, PAD, STOPS, top_logprobs=K)


def asked(number, own, samples=1):
    tokens, valid = prompts()
    ids = np.asarray(tokens[number][valid[number]], np.int32)
    return [Request(number, sample, ids, RESPONSE, sampling=own) for sample in range(samples)]


def scene(engine):
    """Rows of several kinds, more than there are slots: some come while others are written, and
    some are dropped, one that sits and one that waits. What was written of each, and the looks that
    it took."""
    engine.submit(asked(0, GREEDILY))
    engine.submit(asked(1, BY_CHANCE, samples=3))
    rows, looks = {}, 0
    while engine.busy:
        for row in engine.stream(WINDOW):
            parts = rows.setdefault((row.request.prompt, row.request.sample), [])
            parts.append(row)
        looks += 1
        if looks == 1:
            engine.submit([*asked(2, GREEDILY), *asked(3, ADJUSTED, samples=3)])
            engine.cancel(rows={(1, 1), (3, 2)})
    assert engine.num_live == 0 and engine.num_idle == SLOTS
    return rows


@cache
def on_one_mesh():
    mesh = fold(Layout(), jax.devices()[:1])
    engine = Engine(MeshBackend(decoder(mesh), mesh), **GIVEN)
    engine.load(weights(), 5)
    return scene(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "places"),
    full_but(
        [
            ("dp1 / ep1", {"micro_batches": 2}),
            ("tp2 dp2 / ep2", {"micro_batches": 1, "expert_slots": 3, "replan": 2}),
        ],
        ("dp1 / ep1", {"micro_batches": 2}),
    ),
)
def test_the_split_is_invisible(split, places):
    sizes = Split.parse(split)
    mesh = fold_split(sizes, jax.devices()[: sizes.num_devices])
    # Weights come from a device of both sides.
    source = fold(Layout(), jax.devices()[:1])
    backend = SplitBackend(
        decoder(mesh.attention), source, DeviceSplit(mesh, **places), restarts=False
    )
    engine = Engine(backend, **GIVEN)
    engine.load(weights(), 5)
    expected, rows = on_one_mesh(), scene(engine)
    assert rows.keys() == expected.keys() and (3, 2) not in rows
    del rows[1, 1]  # dropped
    for key, parts in rows.items():
        assert all(len(part.tokens) <= WINDOW + 1 for part in parts)
        a, b = (
            [np.concatenate([getattr(part, name) for part in each]) for name in NAMES]
            for each in (expected[key], parts)
        )
        np.testing.assert_array_equal(b[0], a[0])
        np.testing.assert_allclose(b[1], a[1], atol=CLOSE)
        assert parts[-1].finish == expected[key][-1].finish
        assert (parts[0].top_tokens is not None) == (key[0] in (0, 2))
        if parts[0].top_tokens is not None:
            best = np.concatenate([part.top_tokens.logprobs for part in parts])
            of_one = np.concatenate([part.top_tokens.logprobs for part in expected[key]])
            np.testing.assert_allclose(best, of_one, atol=CLOSE)
    if "replan" in places:
        assert backend.expert_balancer.has_moved
        # They keep their places while no request comes.
        placed = backend.expert_balancer.placements
        engine.submit(asked(0, GREEDILY))
        assert backend.expert_balancer.placements == placed
    policy = replace(weights())
    engine.load(policy, 6)
    known = ref(policy)
    del policy
    assert known() is None, "a third copy is kept beside both sides"


def test_what_experts_had_to_do_long_ago_says_little():
    """Where loads fade, one look that finds others busy than for long is enough to part them."""
    mesh = fold_split(Split("dp1", "ep2"), jax.devices()[:3])
    for fades in (True, False):
        places = ExpertBalancer(CONFIG, mesh, None, 1000, decays=fades)
        for _ in range(50):
            places.rebalance(np.array([[100, 100, 0, 0]]))
        (own,) = (d for d in devices(places) if 0 in d)
        (beside,) = own - {0}
        assert beside != 1
        busy = np.zeros((1, 4))
        busy[0, [0, beside]] = 100
        places.rebalance(busy)
        assert ({0, beside} in devices(places)) != fades


def devices(places):
    """The experts of each device."""
    return [set(device) for device in places.placements[0].experts.reshape(2, 2).tolist()]
