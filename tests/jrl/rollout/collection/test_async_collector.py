"""Whatever verdicts and lengths of responses are: batches in order, none of them too old."""

import itertools
from dataclasses import fields, replace

import numpy as np
import pytest
from small_runs import GROUP_SIZE, PROMPTS, small_recipe, small_run, small_setup
from tiers import full_but

from jrl.rollout.collection.async_collector import AsyncCollector, check_staleness, row_of
from jrl.rollout.decoding.protocol import Usage
from jrl.rollout.decoding.requests import Request, Sampled, Trajectory
from jrl.rollout.sampler import Sampler
from jrl.tasks import Verdict
from jrl.tasks.definition import ProceduralTask

STEPS, ROUNDS = 6, 3


class CountingEngine:
    """An engine that has no network: a poll gives each row in a slot one token, and prompt and
    sample
    decide the length of a response."""

    def __init__(self, setup, lengths, slots=5):
        self.mesh, self.usage, self.version = setup.mesh, Usage(), 0
        self._lengths, self._slots, self._rows = lengths, slots, []

    def submit(self, requests, sampling):
        self._rows += requests

    def poll(self, draining=False):
        done = []
        while self._rows and not done:
            grown = [self._longer(request) for request in self._rows[: self._slots]]
            self._rows[: self._slots] = grown
            done = [request for request in grown if self._is_whole(request)]
            self._rows = [request for request in self._rows if not self._is_whole(request)]
        return [Trajectory(request, request.sampled.tokens, "stop", None, 0) for request in done]

    def suspend(self, keep_pool):
        rows, self._rows = self._rows, []
        return rows

    def load(self, weights, version, entropy=None):
        raise NotImplementedError  # the step does it, not `AsyncCollector`

    num_idle, release, cancel, take_pool, give_pool = 0, load, load, load, load

    def _longer(self, request: Request):
        ids = np.zeros(0, np.int32) if request.sampled is None else request.sampled.tokens
        versions = ids if request.sampled is None else request.sampled.versions
        length = len(ids) + 1
        numbers = np.zeros(length, np.float32)
        own = np.append(versions, np.int32(self.version)).astype(np.int32)
        sampled = Sampled(np.full(length, 3, np.int32), numbers, numbers, own)
        return request._replace(sampled=sampled)

    def _is_whole(self, request):
        wanted = self._lengths[request.prompt % len(self._lengths), request.sample]
        return request.sampled is not None and len(request.sampled.tokens) == wanted


class ScriptedTask(ProceduralTask):
    """Each group has scores that differ or not, as it is written; no response is judged twice."""

    def __init__(self, task, informative):
        super().__init__(**{field.name: getattr(task, field.name) for field in fields(task)})
        pairs = {number: [1.0 if good else 0.0, 0.0] for number, good in enumerate(informative)}
        object.__setattr__(self, "pairs", pairs)

    def train(self, index):
        return replace(super().train(index), answer=str(index))

    def verify(self, examples, completions):
        scores = [self.pairs[int(example.answer)].pop(0) for example in examples]
        return [Verdict(score, "correct" if score else "wrong") for score in scores]


def expected_prompts(informative, first):
    """The prompts of a batch that begins with `first`, and the next prompt."""
    last = first + ROUNDS * PROMPTS
    good = [number for number in range(first, last) if informative[number]]
    if len(good) >= PROMPTS:
        return good[:PROMPTS], good[PROMPTS - 1] + 1
    others = [number for number in range(first, last) if not informative[number]]
    return [*good, *others][:PROMPTS], last


@pytest.mark.parametrize(
    ("bound", "dynamic"),
    full_but(itertools.product([1, 2, 3], [False, True]), (1, True), (2, False)),
)
def test_batches_in_order_and_none_too_old(bound, dynamic):
    random = np.random.default_rng(bound)
    for share in (0.1, 0.5, 0.9):
        informative = random.random(STEPS * ROUNDS * PROMPTS + 99) < share
        recipe = small_recipe(dynamic_sampling=dynamic, max_generation_rounds=ROUNDS)
        setup = small_setup(recipe, small_run(max_staleness=bound))
        engine = CountingEngine(setup, random.integers(1, 6, (17, GROUP_SIZE)))
        task = ScriptedTask(setup.task, informative)
        lengths = setup.prompt_length, setup.response_length
        sampler, spec = Sampler(engine, task, setup.format, *lengths), setup.networks.ahead_spec
        ahead, first = spec.empty(), 0

        def draw(first, pending, sampler=sampler, recipe=recipe):
            given = {"batches": bound, "first": first, "seconds": {}}
            return AsyncCollector(sampler, recipe, **given).collect_batch(pending)

        for step in range(STEPS):
            engine.version = step
            drawn = spec.unpack(ahead, sampler) or draw(first, [])
            check_staleness(drawn.ready, step, bound)
            numbers = [row_of(row).prompt for row in drawn.ready]
            wanted, after = list(range(first, first + PROMPTS)), first + PROMPTS
            if dynamic:
                wanted, after = expected_prompts(informative, first)
                counts = np.repeat(informative[wanted], GROUP_SIZE)
                np.testing.assert_array_equal(drawn.counts, counts)
            assert numbers == list(np.repeat(wanted, GROUP_SIZE))
            assert drawn.prompts_seen == after
            first = after
            ahead = spec.pack(draw(first, drawn.pending))
