"""A step's completions: prompts in, text out, verdicts counted, groups filtered."""

from dataclasses import fields, replace

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

from jrl.recipes import RECIPES, Batch
from jrl.rollout.collect import collect, groups_of, shown
from jrl.rollout.requests import Request, Trajectory
from jrl.rollout.sampler import Completion, Sampler, lengths_of, scores_of
from jrl.tasks import REASONS, Example, Verdict
from jrl.tasks.procedural import ProceduralTask
from jrl.tasks.task import CORRECT
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat

TIME = PROMPT_LENGTH + RESPONSE_LENGTH


def collected_by(setup, sampler, step, prompts_seen):
    def key(round):
        return setup.randomness.key("rollout", step, round)

    return collect(sampler, setup.recipe, setup.mesh, prompts_seen, key)


def test_samples_of_the_policy():
    """One real call: what the arrays, the texts and the verdicts say is one thing."""
    setup = small_setup()
    sampler = setup.sampler()
    sampler.engine.load(fresh_weights(setup), version=3)
    collected = collected_by(setup, sampler, 3, 8)
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
        assert (trajectory.version, trajectory.request.sample) == (3, row % GROUP_SIZE)
    verdicts = setup.task.verify(expected, [completion.text for completion in kept])
    assert [completion.verdict for completion in kept] == verdicts
    assert sum(collected.metrics[f"verifier/{reason}"] for reason in REASONS) == 8
    assert collected.seconds.keys() == {"timing_s/gen", "timing_s/reward"}
    again = collected_by(setup, sampler, 3, 8)
    jax.tree.map(np.testing.assert_array_equal, again.batch, collected.batch)
    other = collected_by(setup, sampler, 4, 8)
    assert [c.text for c in other.completions] != [c.text for c in kept]


class ScriptedEngine:
    """An engine without a network: three tokens to every request; a row begins with the number of
    its prompt."""

    def __init__(self, mesh):
        self.mesh, self.prompts, self.keys, self._asked = mesh, [], [], []

    def load(self, weights, version):
        pass

    def release(self):
        pass

    def pending(self):
        return ()

    def restore(self, pending):
        pass

    def submit(self, requests, sampling, key, entropy=None):
        self.prompts += [request.prompt for request in requests if request.sample == 0]
        self.keys.append(np.asarray(jax.random.key_data(key)).tobytes())
        self._asked = list(requests)

    def poll(self):
        rows = len(self._asked)
        tokens = jnp.zeros((rows, TIME), jnp.int32)
        tokens = tokens.at[:, 0].set(jnp.array([request.prompt for request in self._asked]))
        mask = jnp.zeros((rows, TIME), bool).at[:, PROMPT_LENGTH : PROMPT_LENGTH + 3].set(True)
        numbers = jnp.zeros((rows, TIME), jnp.float32)
        batch = Batch(tokens, mask, mask, numbers, numbers, jnp.zeros(rows, bool))
        ids = np.zeros(3, np.int32)
        return [
            Trajectory(request, ids, 0, "stop", batch, row)
            for row, request in enumerate(self._asked)
        ]


class ScriptedTask(ProceduralTask):
    """A task of which the n-th prompt that is verified gets the n-th pair of scores."""

    def __init__(self, task, scores):
        super().__init__(**{field.name: getattr(task, field.name) for field in fields(task)})
        given = iter([score for pair in scores for score in pair])
        object.__setattr__(self, "given", given)

    def verify(self, examples, completions):
        reasons = {1.0: "correct", 0.5: "partial", 0.0: "wrong"}
        scores = [next(self.given) for _ in completions]
        return [Verdict(score, reasons[score]) for score in scores]


GOOD, PARTIAL, ALL, NONE = (1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (0.0, 0.0)


def scripted(scores, recipe):
    setup = small_setup(recipe)
    engine = ScriptedEngine(setup.mesh)
    task = ScriptedTask(setup.task, scores)
    sampler = Sampler(engine, task, setup.format, setup.prompt_length, setup.response_length)
    return setup, engine, collected_by(setup, sampler, 2, 100)


@pytest.mark.parametrize("name", RECIPES)
def test_dynamic_sampling_refills(name):
    scores = [NONE, GOOD, ALL, PARTIAL, NONE, NONE, GOOD, ALL, GOOD, GOOD, GOOD, NONE]
    recipe = small_recipe(name, dynamic_sampling=True)
    setup, engine, collected = scripted(scores, recipe)
    # Three rounds of four prompts, of which the informative ones come first, in order.
    assert collected.prompts_seen == 100 + 12
    assert engine.prompts == [*range(100, 112)]
    assert len(set(engine.keys)) == 3
    kept = collected.completions
    assert [c.example for c in kept[::2]] == [setup.task.train(100 + i) for i in (1, 3, 6, 8)]
    assert scores_of(kept).tolist() == [1, 0, 0, 0.5, 1, 0, 1, 0]
    assert groups_of(kept).tolist() == [101, 101, 103, 103, 106, 106, 108, 108]
    # The rows on the mesh are those of the list: each has the number of its prompt in it.
    assert collected.batch.tokens[:, 0].tolist() == groups_of(kept).tolist()
    assert collected.batch.mask.sum() == 8 * 3
    # Each points at its row of this batch, and keeps none of the rounds alive.
    assert all(c.trajectory.batch is collected.batch for c in kept)
    assert [c.trajectory.row for c in kept] == list(range(8))
    expected = {
        "train/num_gen_batches": 3,
        "dynamic_sampling/prompts_generated": 12,
        "dynamic_sampling/prompts_kept": 4,
        "dynamic_sampling/filtered": 0.5,
        "dynamic_sampling/gave_up": 0,
        # Of everything that was generated, not of what was kept.
        "verifier/correct": 5 + 2 * 2,
        "verifier/partial": 1,
        "verifier/wrong": 14,
        "verifier/unparsable": 0,
        "verifier/timeout": 0,
        "verifier/error": 0,
    }
    assert collected.metrics == expected
    assert collected.seconds.keys() == {"timing_s/gen", "timing_s/reward"}


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
    assert batch.tokens[:, 0].tolist() == groups_of(kept).tolist()
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


@pytest.mark.parametrize("name", RECIPES)
def test_without_it_recipes_take_what_comes(name):
    recipe = small_recipe(name, dynamic_sampling=False)
    _, _, collected = scripted([NONE, ALL, GOOD, NONE], recipe)
    assert collected.prompts_seen == 104
    assert collected.batch.mask.all(axis=1).sum() == 0
    assert collected.batch.mask.any(axis=1).all()
    assert collected.metrics.keys() == {f"verifier/{reason}" for reason in REASONS}


def completion(prompt, sample=0, text="1"):
    request = Request(prompt, sample, np.zeros(1, np.int32), RESPONSE_LENGTH)
    trajectory = Trajectory(request, np.zeros(2, np.int32), 0, "stop", Batch(0, 0, 0), sample)
    return Completion(trajectory, Example(f"{prompt}=", "1"), text, CORRECT)


def test_rows_to_look_at_are_of_more_than_one_prompt():
    def rows(prompts, number):
        given = [completion(prompt, row) for row, prompt in enumerate(prompts)]
        return [c.trajectory.request.sample for c in shown(given, number)]

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
