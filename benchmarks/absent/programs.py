"""Whole programs for absent devices: the update of a training step, over many of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent import compilers
from benchmarks.absent.rows import Figures, matches, reason
from benchmarks.gpu.shapes import QWEN3_A3B

KERNELS = {
    "experts": "mosaic_gathered",
    "attention": "mosaic",
    "router": "mosaic",
    "remat": "selective",
    "buffer_factor": 1.5,
}
"""Fields of `moe.execution.Execution` that name every kernel for Hopper."""


class Step(NamedTuple):
    """An optimizer step of GRPO.

    Attributes:
      device, shape: of `compilers.devices`.
      layout: of the devices.
      title: of the network and its settings.
      sizes: of the network.
      execution: fields of `moe.execution.Execution`.
      rows: completions of the mini-batch, as many on each device.
      prompt, response: tokens of each.
      quick: it is one of the quick check.
    """

    device: str
    shape: str | None
    layout: str
    title: str
    sizes: dict[str, Any]
    execution: dict[str, Any]
    rows: int = 16
    prompt: int = 512
    response: int = 1536
    quick: bool = False


ONE_LAYER, TWO_LAYERS = QWEN3_A3B | {"num_layers": 1}, QWEN3_A3B | {"num_layers": 2}
STEPS = (
    Step(
        *("h100", "1x1x8", "dp8 / ep8", "Qwen3-30B-A3B, 2 layers, kernels", TWO_LAYERS, KERNELS),
        quick=True,
    ),
    Step(
        *("v5p", None, "dp8 / ep8", "Qwen3-30B-A3B, 1 layer, megablox", ONE_LAYER),
        {"experts": "megablox", "remat": "selective", "buffer_factor": 1.5},
        quick=True,
    ),
    Step("h100", "1x1x8", "dp8 / ep8", "Qwen3-30B-A3B, kernels", QWEN3_A3B, KERNELS),
)


def steps(only: Sequence[str], *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each training step; quick: one on eight GPUs and one on eight TPUs."""
    for step in STEPS:
        label = f"{step.device} {step.title} {step.layout}"
        if (quick and not step.quick) or not matches(label, only):
            continue
        about = {"device": step.device, "layout": step.layout, "program": step.title}
        try:
            program = compile_step(step, keep)
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        yield about | {
            "seconds": program.seconds,
            "arguments": program.arguments,
            "temporaries": program.temporaries,
            "kernels": sorted(kernel.name for kernel in program.kernels),
            "defects": [
                f"{kernel.name} {defect}"
                for kernel in program.kernels
                for defect in kernel.defects()
            ],
        }


def compile_step(step: Step, keep: Path | None = None) -> compilers.Program:
    """Compiles the update of a step for its devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from benchmarks.gpu.networks import network
    from jrl.recipes import RECIPES, Batch
    from jrl.trainer import state
    from jrl.trainer.learner.networks import Network, Networks
    from jrl.trainer.learner.objectives import PolicyObjective
    from jrl.trainer.learner.update import update
    from jrl.trainer.scoring import PromptLayout
    from sharding.folding import Layout, fold

    mesh = fold(Layout.parse(step.layout), compilers.devices(step.device, step.shape))
    recipe = RECIPES["grpo"]()
    config = network(step.sizes, **step.execution)
    objective = PolicyObjective(config, mesh, PromptLayout(step.prompt, 1), recipe, step.response)
    networks = Networks(Network(objective, recipe.optimizer, 1), None)
    learner = state.abstract(networks).policy
    rows = NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))
    time = step.prompt + step.response

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((step.rows, *shape), dtype, sharding=rows)

    batch = Batch(
        tokens=of(jnp.int32, time),
        valid=of(jnp.bool_, time),
        mask=of(jnp.bool_, time),
        behaviour_logprobs=of(jnp.float32, time),
        old_logprobs=of(jnp.float32, time),
        advantages=of(jnp.float32, time),
        correct=of(jnp.bool_),
    )
    given = objective, recipe.optimizer, 1, learner, batch
    return compilers.compile_for(step.device, update, *given, keep=keep)
