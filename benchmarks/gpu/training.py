"""The trainer's update on as many sequences as fill the device: its tokens per second and model
FLOPs utilisation.

It is `jrl.trainer.learner.update.update` as a run compiles it: weights in bfloat16 with masters and
moments in float32, clipping and AdamW. Sequences are a prompt, whose logits no loss needs, and a
response.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.networks import halved_to_fit, network, one_device, peak_gibibytes, weights_of
from benchmarks.gpu.rows import Figures, Row, Settings, Work, needs_gpu
from benchmarks.gpu.shapes import LLAMA_3B, MOE_4B, SMALL_DENSE, SMALL_MOE

PEAKS = {"B200": 2250e12, "H200": 989.5e12, "H100": 989.5e12, "A100": 312e12, "T4": 65e12}
"""Dense bfloat16 operations per second, by datasheet, of chips with the key in their name."""
STEPS = 5
"""That are timed."""
SELECTIVE = {"remat": "selective"}


class Trained(NamedTuple):
    """A row.

    Attributes:
      name: of the network.
      sizes: of it; `small` on a CPU.
      form: name of `execution`, besides selective rematerialisation.
      execution: fields of `moe.execution.Execution`; what is not given is selected as in a run.
      rows: sequences that fill the 139 GiB of an H200, as its compiler counts them.
    """

    name: str
    sizes: dict[str, Any]
    small: dict[str, Any]
    form: str
    execution: dict[str, Any]
    rows: int


DENSE = "3.2b dense", LLAMA_3B, SMALL_DENSE
MOE = "3.6b moe", MOE_4B, SMALL_MOE
TRAINED = (
    Trained(*DENSE, "as it is", {}, 8),
    Trained(*MOE, "as it is", {}, 24),
    # XLA computes values again beyond 76 % of the memory: of 8 rows it does all logits four times.
    Trained(*DENSE, "half the rows", {}, 4),
    Trained(*DENSE, "half the rows, all logits", {"vocab_chunk": None}, 4),
    Trained(*DENSE, "mosaic", {"attention": "mosaic"}, 8),
    Trained(*MOE, "mosaic", {"experts": "mosaic"}, 24),
    Trained(*MOE, "batched", {"experts": "batched"}, 24),
)


def rows(settings: Settings) -> Iterator[Row]:
    """Sequences of 4096 tokens; half as many as often as the device has no memory for all."""
    for name, sizes, small, form, execution, batch in TRAINED:
        needs = needs_gpu() if "mosaic" in execution.values() else None
        config = network(small if settings.small else sizes, **SELECTIVE, **execution)
        length, prompt, most = (16, 4, 2) if settings.small else (4096, 128, batch)
        run = partial(halved_to_fit, partial(_step, settings, config, length, prompt), most)
        yield Row(f"step/{'small ' + name if settings.small else name}", form, run, needs)


def updated(config: Any, length: int, prompt: int) -> Any:
    """The policy of GRPO as a run trains it, in one micro-batch of sequences with a prompt each."""
    from jrl.recipes import Grpo
    from jrl.trainer.learner.update import Network, PolicyObjective
    from jrl.trainer.scoring import PromptLayout

    recipe, layout = Grpo(), PromptLayout(prompt, group_size=1)
    objective = PolicyObjective(config, one_device(), layout, recipe, length - prompt)
    return Network(objective, recipe.policy_optimizer, num_micro_batches=1)


def batch_of(tokens: Any, prompt: int) -> Any:
    """Sequences of full length, each with an advantage of one."""
    import jax.numpy as jnp

    from jrl.recipes import Batch

    nothing = jnp.zeros(tokens.shape)
    return Batch(
        tokens=tokens,
        valid=jnp.ones(tokens.shape, bool),
        mask=jnp.ones(tokens.shape, bool).at[:, :prompt].set(False),
        behaviour_logprobs=nothing,
        old_logprobs=nothing,
        advantages=nothing + 1,
        correct=jnp.ones(tokens.shape[0], bool),
    )


def _step(settings: Settings, config: Any, length: int, prompt: int, batch: int) -> Figures:
    import jax

    from moe.config import training_flops
    from moe.weights import num_parameters

    trained = updated(config, length, prompt)
    weights = weights_of(config, settings.seed)
    # An update gives its learner up: two would not fit, nor would the weights that it begins with.
    state = [trained.init(weights)]
    del weights
    keys = jax.random.split(jax.random.key(settings.seed), STEPS + 2)

    def timed(key: Any) -> float:
        tokens = jax.random.randint(key, (batch, length), 0, config.vocab_size)
        given = batch_of(tokens, prompt)
        jax.block_until_ready((state, given))
        began = time.perf_counter()
        learner, outcome = trained.update(state.pop(), given)
        jax.block_until_ready((learner, outcome))
        seconds = time.perf_counter() - began
        state.append(learner)
        if int(learner.skipped) or not int(learner.updates):
            raise ValueError("the update was skipped: its loss or gradient is not finite")
        return seconds

    compiling = timed(keys[0])
    steps = sorted(timed(key) for key in (keys[1:2] if settings.small else keys[2:]))
    seconds = steps[len(steps) // 2]
    of_row = length * training_flops(config, length)
    of_row -= prompt * 6 * config.d_model * config.vocab_size
    work = Work(batch * of_row, "operations")
    figures = {
        "milliseconds": 1e3 * seconds,
        **work.rate(seconds, settings),
        "compile_s": compiling,
        "tokens_per_s": batch * length / seconds,
        "parameters": num_parameters(config),
        **peak_gibibytes(),
    }
    peak = peak_of(jax.devices()[0].device_kind)
    return figures if peak is None else figures | {"mfu": work.amount / seconds / peak}


def peak_of(kind: str) -> float | None:
    """The datasheet's rate of a device of that name, None for one that is not listed."""
    return next((peak for name, peak in PEAKS.items() if name in kind), None)
