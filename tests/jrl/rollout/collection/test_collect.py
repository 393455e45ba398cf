"""A step's completions: prompts in, text out, verdicts counted, groups filtered."""

import time
from dataclasses import fields, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_checkpoint import START, TURN, chat_tokenizer
from small_runs import (
    GROUP_SIZE,
    PROMPT_LENGTH,
    PROMPTS,
    RESPONSE_LENGTH,
    fresh_weights,
    small_recipe,
    small_setup,
)
from tiers import full_but

from jrl.recipes import RECIPES
from jrl.recipes.base.batch import over_rows
from jrl.rollout.collection.collect import collect, groups_of, shown_rows
from jrl.rollout.decoding.protocol import Usage
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.decoding.slots import OutputBuffer, TokenRows
from jrl.rollout.sampler import Completion, Sampler, lengths_of, scores_of
from jrl.tasks import REASONS, Example, Verdict
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.task import CORRECT
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

TIME = PROMPT_LENGTH + RESPONSE_LENGTH
WHOLE_GROUPS = [name for name in RECIPES if RECIPES[name]().has_complete_groups]
TIMES = {"timing_s/gen", "timing_s/reward", *Usage().metrics()}


def collected_by(setup, sampler, prompts_seen):
    return collect(sampler, setup.recipe, setup.mesh, prompts_seen)


@pytest.mark.slow
def test_samples_of_the_policy():
    """One real call: what the arrays, the texts and the verdicts say is one thing."""
    setup = small_setup()
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), version=3)
    collected = collected_by(setup, sampler, 8)
    kept, batch = collected.completions, jax.device_get(collected.batch)
    assert collected.prompts_seen == 8 + PROMPTS
    assert groups_of(kept).tolist() == [8, 8, 9, 9, 10, 10, 11, 11]
    expected = [setup.task.train(8 + i // GROUP_SIZE) for i in range(PROMPTS * GROUP_SIZE)]
    assert [completion.example for completion in kept] == expected
    assert batch.tokens.shape == (8, TIME)
    assert lengths_of(kept).tolist() == batch.mask.sum(axis=1).tolist()
    for row, completion in enumerate(kept):
        trajectory = completion.trajectory
        prompt = batch.tokens[row, :PROMPT_LENGTH][batch.valid[row, :PROMPT_LENGTH]]
        np.testing.assert_array_equal(trajectory.request.tokens, prompt)
        ids = batch.tokens[row][batch.mask[row]]
        np.testing.assert_array_equal(trajectory.tokens, ids)
        for name in ("behaviour_logprobs", "old_logprobs"):
            found = getattr(trajectory, name)
            np.testing.assert_array_equal(found, getattr(batch, name)[row][batch.mask[row]])
        ended = ids[-1] == setup.tokenizer.eos_id
        assert ended != batch.truncated[row] == completion.truncated
        assert len(completion.text) == len(ids) - int(ended)
        np.testing.assert_array_equal(trajectory.versions, np.full(len(ids), 3))
        assert trajectory.request.sample == row % GROUP_SIZE
    verdicts = setup.task.verify(expected, [completion.text for completion in kept])
    assert [completion.verdict for completion in kept] == verdicts
    assert sum(collected.metrics[f"verifier/{reason}"] for reason in REASONS) == 8
    assert collected.seconds.keys() == TIMES
    again = collected_by(setup, sampler, 8)
    chex.assert_trees_all_equal(again.batch, collected.batch)
    elsewhere = setup.sampler(seed=1)
    elsewhere.engine.load(fresh_weights(setup), version=3)
    other = collected_by(setup, elsewhere, 8)
    assert [c.text for c in other.completions] != [c.text for c in kept]


class ScriptedEngine:
    """An engine that has no network: three tokens to every request; a row begins with the number of
    its prompt. Requests end in an order of their own, a few at a time."""

    def __init__(self, setup, order):
        self.mesh, self.prompts, self.usage = setup.mesh, [], Usage()
        self.cancelled, self.num_idle, self._asked, self._order = [], 0, [], order
        self.calls = []
        self._decoder = setup.sampler().engine.decoder

    def load(self, weights, version):
        pass

    def release(self):
        pass

    def submit(self, requests, sampling):
        self.calls.append(len(requests))
        self.prompts += [request.prompt for request in requests if request.sample == 0]
        self._asked += requests

    def suspend(self, keep_pool=False):
        raise NotImplementedError  # rows are taken back by `AsyncCollector` alone

    take_pool = give_pool = suspend

    def cancel(self, prompts):
        self.cancelled += prompts
        self._asked = [request for request in self._asked if request.prompt not in prompts]

    def poll(self, draining=False):
        self.calls.append("poll")
        self._order.shuffle(self._asked)
        ended, self._asked = self._asked[:3], self._asked[3:]
        if not ended:
            return []
        size = len(ended)
        tokens = jnp.zeros((size, TIME), jnp.int32)
        tokens = tokens.at[:, 0].set(jnp.array([request.prompt for request in ended]))
        begins = jnp.array([len(request.tokens) for request in ended])
        numbers = jnp.zeros((size, TIME), jnp.float32)
        rows = TokenRows(begins + 3, begins, tokens, numbers, numbers, tokens, None)
        shelf = OutputBuffer(self._decoder, jax.device_put(rows, over_rows(self.mesh)))
        ids = np.zeros(3, np.int32)
        return [Trajectory(request, ids, "stop", shelf, row) for row, request in enumerate(ended)]


class ScriptedTask(ProceduralTask):
    """A task of which the n-th prompt from the hundredth on gets the n-th pair of scores; which of
    its samples gets which is left to the order in which they are verified."""

    def __init__(self, task, scores):
        super().__init__(**{field.name: getattr(task, field.name) for field in fields(task)})
        pairs = {100 + number: list(pair) for number, pair in enumerate(scores)}
        object.__setattr__(self, "pairs", pairs)

    def train(self, index):
        return replace(super().train(index), answer=str(index))

    def verify(self, examples, completions):
        reasons = {1.0: "correct", 0.5: "partial", 0.0: "wrong"}
        scores = [self.pairs[int(example.answer)].pop(0) for example in examples]
        return [Verdict(score, reasons[score]) for score in scores]


GOOD, PARTIAL, ALL, NONE = (1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (0.0, 0.0)


class SlowTask(ScriptedTask):
    def verify(self, examples, completions):
        time.sleep(0.02)  # many polls of the scripted engine
        return super().verify(examples, completions)


def scripted(scores, recipe, idle=0, task=ScriptedTask):
    setup = small_setup(recipe)
    engine = ScriptedEngine(setup, np.random.default_rng(len(scores)))
    engine.num_idle = idle
    task = task(setup.task, scores)
    sampler = Sampler(engine, task, setup.format, setup.prompt_length, setup.response_length)
    return setup, engine, collected_by(setup, sampler, 100)


def first_tokens(batch):
    """What the scripted engine wrote into the first column of each row."""
    begins = np.argmax(np.asarray(batch.valid), axis=1)
    return np.asarray(batch.tokens)[np.arange(len(begins)), begins].tolist()


@pytest.mark.parametrize("idle", [0, 6])
def test_what_is_begun_in_advance_has_no_say(idle):
    """With idle slots, prompts are asked for that may turn out to be too many, and are dropped."""
    scores = [NONE, GOOD, ALL, PARTIAL, NONE, NONE, GOOD, ALL, GOOD, GOOD, GOOD, NONE]
    _, engine, collected = scripted(scores, small_recipe("dapo"), idle)
    assert collected.prompts_seen == 109
    assert groups_of(collected.completions[::2]).tolist() == [101, 103, 106, 108]
    assert len(engine.prompts) == len(set(engine.prompts))
    assert engine.cancelled == [number for number in engine.prompts if number >= 109]
    assert bool(engine.cancelled) == bool(idle)


def test_requests_do_not_depend_on_the_speed_of_the_verifier():
    """Prompts that run together are one function's rows: others round otherwise."""
    scores = [NONE, GOOD, ALL, PARTIAL, NONE, NONE, GOOD, ALL, GOOD, GOOD, GOOD, NONE]
    fast, slow = (
        scripted(scores, small_recipe("dapo"), 6, task)[1].calls
        for task in (ScriptedTask, SlowTask)
    )
    assert slow == fast


@pytest.mark.parametrize("name", full_but(WHOLE_GROUPS, "dapo", "vapo"))
def test_dynamic_sampling_refills(name):
    scores = [NONE, GOOD, ALL, PARTIAL, NONE, NONE, GOOD, ALL, GOOD, GOOD, GOOD, NONE]
    recipe = small_recipe(name, dynamic_sampling=True)
    _, engine, collected = scripted(scores, recipe)
    # The fourth informative one is the ninth: no prompt after it is asked for.
    assert collected.prompts_seen == 100 + 9
    assert engine.prompts == [*range(100, 109)]
    kept = collected.completions
    assert [c.example.answer for c in kept[::2]] == ["101", "103", "106", "108"]
    assert np.sort(scores_of(kept).reshape(4, 2)).tolist() == [[0, 1], [0, 0.5], [0, 1], [0, 1]]
    assert groups_of(kept).tolist() == [101, 101, 103, 103, 106, 106, 108, 108]
    # The rows on the mesh equal the list: each has the number of its prompt in it.
    assert first_tokens(collected.batch) == groups_of(kept).tolist()
    assert collected.batch.mask.sum() == 8 * 3
    expected = {
        "train/num_gen_batches": 9 / 4,
        "dynamic_sampling/prompts_generated": 9,
        "dynamic_sampling/prompts_kept": 4,
        "dynamic_sampling/filtered": 5 / 9,
        "dynamic_sampling/gave_up": 0,
        # Of everything that was generated, not of what was kept.
        "verifier/correct": 3 + 2 * 2,
        "verifier/partial": 1,
        "verifier/wrong": 10,
        "verifier/unevaluated": 0,
        "verifier/unparsable": 0,
        "verifier/timeout": 0,
        "verifier/error": 0,
        "verifier/not_finite": 0,
        "verifier/invalid": 0,
    }
    assert collected.metrics == expected
    assert collected.seconds.keys() == TIMES


def test_dynamic_sampling_stops_when_it_has_enough():
    _, _, collected = scripted([GOOD, GOOD, PARTIAL, GOOD], small_recipe("dapo"))
    assert collected.prompts_seen == 104
    assert collected.metrics["train/num_gen_batches"] == 1
    assert collected.metrics["dynamic_sampling/filtered"] == 0


def test_dynamic_sampling_gives_up():
    scores = [NONE, GOOD, ALL, NONE, NONE, NONE, ALL, PARTIAL]
    recipe = small_recipe("dapo", max_generation_rounds=2)
    _, _, collected = scripted(scores, recipe)
    assert collected.prompts_seen == 108
    assert collected.metrics["train/num_gen_batches"] == 2
    assert collected.metrics["dynamic_sampling/gave_up"] == 1
    assert collected.metrics["dynamic_sampling/prompts_kept"] == 2
    assert collected.metrics["dynamic_sampling/filtered"] == 0.75
    kept, batch = collected.completions, collected.batch
    assert groups_of(kept).tolist() == [101, 101, 107, 107, 100, 100, 102, 102]
    assert first_tokens(batch) == groups_of(kept).tolist()
    # What fills up the batch does not count, though it has been written and scored.
    assert batch.mask.any(axis=1).tolist() == [True] * 4 + [False] * 4
    assert lengths_of(kept).tolist() == [3] * 8
    assert sum(collected.metrics[f"verifier/{reason}"] for reason in REASONS) == 16


def test_nothing_informative_at_all():
    recipe = small_recipe("dapo", max_generation_rounds=1)
    _, _, collected = scripted([NONE, ALL, NONE, NONE], recipe)
    assert not collected.batch.mask.any()
    assert collected.metrics["dynamic_sampling/prompts_kept"] == 0
    assert collected.metrics["dynamic_sampling/gave_up"] == 1


@pytest.mark.parametrize("name", WHOLE_GROUPS)
def test_without_it_recipes_take_what_comes(name):
    recipe = small_recipe(name, dynamic_sampling=False)
    _, _, collected = scripted([NONE, ALL, GOOD, NONE], recipe)
    assert collected.prompts_seen == 104
    assert collected.batch.mask.all(axis=1).sum() == 0
    assert collected.batch.mask.any(axis=1).all()
    assert collected.metrics.keys() == {f"verifier/{reason}" for reason in REASONS}


def completion(prompt, sample=0, text="1"):
    request = Request(prompt, sample, np.zeros(1, np.int32), RESPONSE_LENGTH)
    trajectory = Trajectory(request, np.zeros(2, np.int32), "stop", None, sample)
    return Completion(trajectory, Example(f"{prompt}=", "1"), text, CORRECT)


def test_rows_to_look_at_are_of_more_than_one_prompt():
    def rows(prompts, number):
        given = [completion(prompt, row) for row, prompt in enumerate(prompts)]
        return [given[row].trajectory.request.sample for row in shown_rows(given, number)]

    assert rows([0, 0, 1, 1, 2, 2, 3, 3], 4) == [0, 1, 2, 3]
    assert rows([5, 5, 5, 5, 2, 2, 2, 2], 4) == [0, 1, 4, 5]  # as filled up they may fall
    assert rows([5, 5, 5, 5, 2, 2, 2, 2], 6) == [0, 1, 2, 3, 4, 5]
    assert rows([0] * 8, 3) == [0, 1, 2]
    assert rows([0, 0, 1, 1, 2, 2, 3, 3], 99) == list(range(8))


def test_a_sample_keeps_its_gold_answer():
    record = completion(7, text="1").record(small_setup().format)
    assert (record["prompt"], record["answer"], record["completion"]) == ("7=", "1", "1")
    assert (record["score"], record["length"], record["truncated"]) == (1.0, 2, False)


def test_a_sample_of_a_chat_checkpoint_reads_as_a_conversation(tmp_path):
    tokenizer = chat_tokenizer(tmp_path)
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer), "Add.")
    written = [*tokenizer.encode("It is 2."), tokenizer.eos_id]
    given = completion(0)
    request = given.trajectory.request._replace(tokens=format.encode(Example("1+1?", "2")))
    trajectory = replace(given.trajectory, request=request, tokens=np.array(written))
    record = replace(given, trajectory=trajectory).record(format)
    assert record["conversation"] == (
        f"{START}system\nAdd.{TURN}\n{START}user\n1+1?{TURN}\n{START}assistant\nIt is 2.{TURN}"
    )
