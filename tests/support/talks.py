"""A small task of conversations: an environment that answers each turn from what was said."""

from concurrent.futures import Future
from dataclasses import replace
from random import Random
from threading import Timer

from small_runs import small_run, small_setup

from jrl.rollout.collection.collect import collect
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.environments.definition import Conversational, EnvironmentPrompts
from jrl.tasks.environments.host import LocalHost, Scoring
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.setup.setup import Setup

RESPONSE = 26
"""Tokens of a conversation at most."""


class Echo:
    """Says how long the policy's turn was, in letters, and ends after so many turns."""

    max_prompt_length = 5
    max_response_length = 12
    characters = "012=>h"

    def prompts(self, random: Random):
        digits = "".join(random.choice("012") for _ in range(random.randint(1, 4)))
        gold = [("assistant", digits[0]), ("user", "h>"), ("assistant", "2")]
        turns = [{"role": role, "content": content} for role, content in gold]
        return {"prompt": digits + "=", "turns": turns, "most": random.randint(2, 4)}

    def environment(self, most):
        return Echoing(most)


class Echoing:
    def __init__(self, most):
        self._most, self._turns = most, 0

    def reset(self):
        return []

    def step(self, message):
        self._turns += 1
        text = message["content"]
        answer = {"role": "user", "content": "h" * (1 + len(text) % 3) + ">"}
        return [answer], 0.25 * text.count("2"), self._turns >= self._most


class LateHost(LocalHost):
    """Answers that come later, the first asked for last."""

    def __init__(self, definition, scoring):
        super().__init__(definition, scoring)
        self.calls = 0

    def say(self, number, example, said):
        self.calls += 1
        future, result = Future(), super().say(number, example, said).result()
        delay = 0.002 * (7 - self.calls % 7)
        Timer(delay, future.set_result, [result]).start()
        return future


def echo(seed: int = 0, host=LocalHost, kind=Echo) -> Conversational:
    definition = kind()
    environments = host(definition, Scoring())
    return Conversational(
        ProceduralTask("echo", seed, EnvironmentPrompts("echo", definition, environments)),
        environments,
    )


def talking_setup(task=None, recipe=None, **changes) -> Setup:
    """The fixed parts of a run of the task, with other settings of `small_run` if given."""
    task = echo() if task is None else task
    tokenizer = Tokenizer.train_characters(task.characters)
    model = replace(small_setup().model, vocab_size=tokenizer.vocab_size)
    return replace(
        small_setup(recipe),
        run=small_run(task=task.name, **changes),
        task=task,
        tokenizer=tokenizer,
        model=model,
        response_length=RESPONSE,
        mesh=small_setup(run=small_run(layout=changes.get("layout", "dp1"))).mesh,
    )


def talked(setup, weights):
    """A batch of conversations, collected with these weights."""
    sampler = setup.sampler()
    sampler.engine.load(weights, 0)
    return collect(sampler, setup.recipe, setup.mesh, 0)


def turns_of(completion):
    """The turns of a completion that is a conversation."""
    turns = completion.trajectory.request.conversation
    assert turns is not None
    return turns
