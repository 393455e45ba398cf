"""One whole GRPO step as a run takes it: sampling, verdicts, scores, the update.

The network has the layers of Qwen3-0.6B. Its weights are random, so its responses end where one
token of a large vocabulary is drawn: nearly all reach the limit of their length.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.networks import network, peak_gibibytes
from benchmarks.gpu.rows import Figures, Row, Settings
from benchmarks.gpu.shapes import QWEN3_06B, SMALL_DENSE
from moe.config import Model

# Prompts, completions of each, tokens of a response, rows of a micro-batch, tokens of the
# vocabulary.
STEP = (16, 16, 1024, 16, 20000)
SMALL_STEP = (2, 4, 16, 8, 100)


def rows(settings: Settings) -> Iterator[Row]:
    """The second step: the first one compiles."""
    sizes = SMALL_STEP if settings.small else STEP
    name = f"{sizes[0]} x {sizes[1]} responses of {sizes[2]}"
    yield Row(f"grpo/0.6b dense/{name}", "jrl", partial(_step, settings, *sizes))


def _step(
    settings: Settings, prompts: int, group: int, response: int, micro_batch: int, characters: int
) -> Figures:
    import jax

    from jrl.rollout.sampler import lengths_of
    from jrl.trainer.state import init_state, init_weights
    from jrl.trainer.step import train_step

    setup = _setup(settings, prompts, group, response, micro_batch, characters)
    try:
        weights = init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))
        state = init_state(setup.networks, weights, setup.randomness.key("critic"))
        del weights
        sampler, seconds, done = setup.sampler(), [], None
        for _ in range(2):
            began = time.perf_counter()
            state, done = train_step(sampler, setup.networks, state, setup.randomness)
            jax.block_until_ready(state)
            seconds.append(time.perf_counter() - began)
    finally:
        setup.task.close()
    assert done is not None
    if done.nonfinite:
        raise ValueError("the update was skipped: its loss or gradient is not finite")
    sampled = float(lengths_of(done.collected.completions).sum())
    metrics = done.metrics
    return {
        "milliseconds": 1e3 * seconds[1],
        "compile_s": seconds[0] - seconds[1],
        "tokens_per_s": sampled / seconds[1],
        "sampling_s": metrics["timing_s/gen"],
        "update_s": metrics["timing_s/update_actor"],
        "sampled_tokens": sampled,
        "updated_tokens_per_s": metrics["training/tokens"] / metrics["timing_s/update_actor"],
        **peak_gibibytes(),
    }


def _setup(
    settings: Settings, prompts: int, group: int, response: int, micro_batch: int, characters: int
) -> Any:
    from jrl.config.run import RunConfig
    from jrl.recipes import Grpo
    from jrl.tasks import load_task
    from jrl.text.tokenizer import Tokenizer
    from jrl.trainer.setup.setup import build_setup

    own = load_task("sort", settings.seed).characters
    others = "".join(chr(0x4E00 + number) for number in range(characters))
    tokenizer = Tokenizer.train_characters(own + others)
    sizes = SMALL_DENSE if settings.small else QWEN3_06B
    recipe = Grpo(
        prompts=prompts,
        group_size=group,
        mini_batch=prompts * group,
        micro_batch=micro_batch,
        learning_rate=1e-6,
    )
    run = RunConfig(
        task="sort", response_length=response, remat="selective", seed=settings.seed % 2**31
    )
    model = network(sizes | {"vocab_size": tokenizer.vocab_size})
    return build_setup(run, recipe, tokenizer, model)
