"""Runs small enough to take seconds: a task of a few digits, a network of one layer, eight
completions.

All tests share these sizes, and so what has been compiled for them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import jax
import numpy as np

from jrl.config.run import RunConfig
from jrl.processes.agreement import to_host
from jrl.recipes import RECIPES, ActorCritic, Batch
from jrl.recipes.base.batch import over_rows
from jrl.report.metrics import without_timings
from jrl.rollout.collection.collect import collect
from jrl.runs.folder import RunFolder
from jrl.runs.records import read, read_metrics
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.task import CORRECT, UNPARSABLE, WRONG, Verdict
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.loop import Outcome, train
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import TrainState, init_state, init_weights
from jrl.trainer.step import RolloutStepResult, train_step
from moe.config import Model, ModelConfig
from moe.weights import Transformer
from sharding.folding import Layout, fold

PROMPT_LENGTH, RESPONSE_LENGTH = 6, 5
PROMPTS, GROUP_SIZE = 4, 2


class Largest:
    """One to four digits; full marks for a completion that begins with the largest of them."""

    max_prompt_length = PROMPT_LENGTH - 1
    max_response_length = 2
    characters = "012="

    def prompts(self, random: Random) -> dict[str, str]:
        digits = [random.choice("012") for _ in range(random.randint(1, 4))]
        return {"prompt": "".join(digits) + "=", "answer": max(digits) + "="}

    def reward(self, prompt: str, completion: str, *, answer: str) -> Verdict:
        if not completion or set(completion) - set("012="):
            return UNPARSABLE
        if completion[0] == answer[0]:
            return CORRECT
        return Verdict(0.5, "partial") if answer[0] in completion else WRONG


def largest(seed: int) -> ProceduralTask:
    return ProceduralTask("largest", seed, Largest())


def small_run(**changes) -> RunConfig:
    """Three steps, with every kind of event on one of the first two. Training and evaluation run
    four prompts, by the same program."""
    settings = {
        "task": "largest",
        "steps": 3,
        "warm_start_steps": 4,
        "warm_start_batch": 8,
        "warm_start_accuracy": 1.0,
        "eval_every": 2,
        "eval_prompts": 4,
        "checkpoint_every": 2,
        "checkpoint_minutes": None,  # a slow machine takes them too
        "samples_every": 2,
        "sample_tokens": 3,
    }
    return RunConfig(**{**settings, **changes})


def small_recipe(name: str = "grpo", **changes):
    """Two mini-batches of four completions."""
    kind = RECIPES[name]
    settings = {
        "prompts": PROMPTS,
        "group_size": GROUP_SIZE,
        "mini_batch": 4,
        "micro_batch": 4,
        "learning_rate": 1e-2,
        "learning_rate_warmup": 3,
        "max_grad_norm": 0.1,
    }
    if issubclass(kind, ActorCritic):
        settings["pretrain_critic"] = 1 if name == "vapo" else 0
    if name == "tppo":
        settings["window"] = 3
    return kind(**{**settings, **changes})


def small_model(vocab_size: int, **changes) -> ModelConfig:
    """One layer of four experts."""
    sizes = {"num_layers": 1, "d_model": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
    return ModelConfig(vocab_size, **{**sizes, "num_experts": 4, "d_expert": 10, **changes})


def small_setup(recipe=None, run: RunConfig | None = None, **changes) -> Setup:
    """The fixed parts of a run.

    Args:
      recipe: `small_recipe` by default.
      run: `small_run` by default.
      changes: other fields of the `Setup`.
    """
    run = small_run() if run is None else run
    layout = Layout.parse(run.layout)
    task = largest(run.seed)
    tokenizer = Tokenizer.train_characters(task.characters)
    setup = Setup(
        run=run,
        recipe=small_recipe() if recipe is None else recipe,
        task=task,
        tokenizer=tokenizer,
        model=small_model(tokenizer.vocab_size),
        mesh=fold(layout, jax.devices()[: layout.num_devices]),
        prompt_length=PROMPT_LENGTH,
        response_length=RESPONSE_LENGTH,
    )
    return replace(setup, **changes)


def fresh_weights(setup: Setup) -> Transformer[jax.Array]:
    """The policy that a run begins with."""
    return init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))


def fresh_state(setup: Setup, weights: Transformer[jax.Array]) -> TrainState[jax.Array]:
    """The state of a run before its first step, with these weights."""
    return init_state(setup.networks, weights, setup.randomness.key("critic"))


def one_step(
    setup: Setup, state: TrainState[jax.Array]
) -> tuple[TrainState[jax.Array], RolloutStepResult]:
    """A training step, as a run takes it."""
    return train_step(setup.sampler(), setup.networks, state, setup.randomness)


def sampled(setup: Setup, weights: Transformer[jax.Array], first: int = 0) -> Batch[np.ndarray]:
    """Completions of a step's prompts as a run samples them, on the host."""
    sampler = setup.sampler()
    sampler.engine.load(weights, 0)
    collected = collect(sampler, setup.recipe, setup.mesh, first)
    return to_host(collected.batch)


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    setup: Setup
    folder: RunFolder
    outcome: Outcome

    @property
    def metrics(self) -> list[dict]:
        return metrics_of(self.folder.path)

    @property
    def samples(self) -> list[dict]:
        return read(self.folder.samples_path)


def metrics_of(path: Path) -> list[dict]:
    """The lines of metrics.jsonl without timings, NaN as text so that it equals itself."""
    lines = read_metrics(path / "metrics.jsonl")
    return [{name: repr(value) for name, value in without_timings(line).items()} for line in lines]


def begin_or_go_on(setup: Setup, path: Path) -> Outcome:
    """Trains in a folder from wherever it stands."""
    try:
        folder = RunFolder.resume(path)
    except ValueError:
        folder = RunFolder.create(path, {"recipe": setup.recipe.name})
    with folder:
        return train(setup, folder)


def finish(name: str, path: Path, **changes) -> Finished:
    """A whole run of a recipe, with other settings of `small_run` if given."""
    setup = small_setup(small_recipe(name), small_run(**changes))
    outcome = begin_or_go_on(setup, path)
    return Finished(setup, RunFolder.read(path), outcome)


def windows_batch(setup: Setup, rows: int = PROMPTS * GROUP_SIZE) -> Batch[jax.Array]:
    """Responses written on for three tokens at most, some unfinished, of prompts that nobody
    shares; as a step has them before its first update."""
    random = np.random.default_rng(7)
    time = np.arange(PROMPT_LENGTH + RESPONSE_LENGTH)[None, :]
    shape = (rows, time.shape[1])
    number = np.arange(rows)
    prompts, lengths = number * 5 % PROMPT_LENGTH + 1, number * 2 % RESPONSE_LENGTH + 1
    valid = (time >= PROMPT_LENGTH - prompts[:, None]) & (time < PROMPT_LENGTH + lengths[:, None])
    earlier = np.where(lengths > 3, 3, 0)
    finished = number % 3 != 1

    def numbers(low, high):
        return random.uniform(low, high, shape).astype(np.float32)

    batch = Batch(
        tokens=random.integers(0, setup.tokenizer.vocab_size, shape).astype(np.int32),
        valid=valid,
        mask=valid & (time >= PROMPT_LENGTH + earlier[:, None]),
        old_logprobs=numbers(-3, -1),
        behaviour_logprobs=numbers(-3, -1),
        finished=finished,
        lengths=lengths.astype(np.int32),
        rewards=np.where(finished, np.where(number % 2, 1.0, -1.0), 0.0).astype(np.float32),
        correct=finished & (number % 2 == 1),
        old_values=numbers(-1, 1),
    )
    return jax.device_put(batch, over_rows(setup.mesh))


def small_batch(setup: Setup, rows: int = 4) -> Batch[jax.Array]:
    """A mini-batch of random tokens: prompts shared by two rows, as many tokens in no two rows."""
    random = np.random.default_rng(5)
    time = np.arange(PROMPT_LENGTH + RESPONSE_LENGTH)[None, :]
    shape = (rows, time.shape[1])
    tokens = random.integers(0, setup.tokenizer.vocab_size, shape).astype(np.int32)
    tokens[1::2, :PROMPT_LENGTH] = tokens[::2, :PROMPT_LENGTH]
    prompts = np.repeat(np.arange(rows // 2) * 3 % PROMPT_LENGTH + 2, 2)[:, None]
    responses = (np.arange(rows) * 2 % RESPONSE_LENGTH + 1)[:, None]
    valid = (time >= PROMPT_LENGTH - prompts) & (time < PROMPT_LENGTH + responses)
    mask = valid & (time >= PROMPT_LENGTH)
    mask[rows - 1] = False  # a row that only fills up the batch

    def numbers(low, high):
        return random.uniform(low, high, shape).astype(np.float32)

    batch = Batch(
        tokens=tokens,
        valid=valid,
        mask=mask,
        old_logprobs=numbers(-3, -1),
        behaviour_logprobs=numbers(-3, -1),
        advantages=numbers(-2, 2),
        correct=np.arange(rows) % 3 == 0,
        returns=numbers(-1, 1) if setup.recipe.uses_critic else None,
        old_values=numbers(-1, 1) if setup.recipe.uses_critic else None,
    )
    return jax.device_put(batch, over_rows(setup.mesh))
