"""Whole programs for absent devices: updates, scoring passes and decoding steps of published
networks, over one device and over hundreds."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent import compilers
from benchmarks.absent.rows import Figures, folder_of, matches, reason
from benchmarks.absent.work import PROMPT, RESPONSE
from benchmarks.gpu.networks import network
from benchmarks.gpu.shapes import (
    DEEPSEEK_V3,
    MIXTRAL_8X22B,
    QWEN3_06B,
    QWEN3_235B,
    QWEN3_A3B,
)

KERNELS = {
    "experts": "mosaic_gathered",
    "attention": "mosaic",
    "router": "mosaic",
    "remat": "selective",
    "buffer_factor": 1.5,
}
"""Fields of `moe.execution.Execution` that name every kernel for Hopper."""
UPDATE, SCORING, DECODING = "update", "scoring", "decoding"


class Step(NamedTuple):
    """A program of GRPO.

    Attributes:
      device, shape: of `compilers.devices`.
      layout: of the devices.
      title: of the network and its settings.
      sizes: of the network.
      execution: fields of `moe.execution.Execution`; what is not given is selected as in a run.
      kind: the update of an optimizer step, a scoring pass, or decoding steps in their loop.
      rows: completions of the mini-batch, as many on each device; slots in decoding.
      micro_batches: of the mini-batch.
      prompt, response: tokens of each.
      run: fields of `jrl.config.run.RunConfig` besides: dispatch, and dtypes of gradients and
        moments.
      quick: it is one of the quick check.
    """

    device: str
    shape: str | None
    layout: str
    title: str
    sizes: dict[str, Any]
    execution: dict[str, Any]
    kind: str = UPDATE
    rows: int = 16
    micro_batches: int = 1
    prompt: int = PROMPT
    response: int = RESPONSE
    run: dict[str, Any] | None = None
    quick: bool = False

    @property
    def label(self) -> str:
        """Device, program and layout."""
        return f"{self.device} {self.title} {self.layout}"


ONE_LAYER, TWO_LAYERS = QWEN3_A3B | {"num_layers": 1}, QWEN3_A3B | {"num_layers": 2}
SELECTIVE, FULL = {"remat": "selective"}, {"remat": "full"}
EIGHT = "h100", "1x1x8", "dp8 / ep8"
SELECTED = Step(*EIGHT, "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE)
"""Implementations are those that None selects."""
STEPS = (
    Step(*EIGHT, "Qwen3-30B-A3B, 2 layers, kernels", TWO_LAYERS, KERNELS, quick=True),
    Step(
        *("v5p", None, "dp8 / ep8", "Qwen3-30B-A3B, 1 layer, megablox", ONE_LAYER),
        {"experts": "megablox", "remat": "selective", "buffer_factor": 1.5},
        quick=True,
    ),
    SELECTED,
    Step(*("h100", "1x1x1", "dp1"), "Qwen3-0.6B", QWEN3_06B, SELECTIVE, rows=32, micro_batches=8),
    Step(*EIGHT, "Qwen3-30B-A3B, scoring", QWEN3_A3B, SELECTIVE, SCORING, rows=64),
    Step(*EIGHT, "Qwen3-30B-A3B, decoding", QWEN3_A3B, {}, DECODING, rows=256),
    Step(
        *("h100", "1x8x8", "tp4 dp16 / ep64", "Qwen3-235B-A22B", QWEN3_235B),
        FULL | {"fsdp": True},
    ),
    Step(
        *("h100", "1x1x8", "tp4 pp2 vpp12 / ep4", "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE),
        micro_batches=16,
        run={"mu_dtype": "bfloat16"},
    ),
    # The planner's first layouts for 2 and 4 x 2^20 tokens a step on 128 and on 512; on 1,024 that
    # of 128 with more dp, the planner's third.
    Step(
        *("h100", "1x16x8", "cp2 dp8 pp8 / ep8", "Mixtral-8x22B", MIXTRAL_8X22B),
        SELECTIVE | {"scan_layers": True},
        rows=1024,
        micro_batches=128,
    ),
    Step(
        *("h100", "1x128x8", "cp2 dp64 pp8 / ep8", "Mixtral-8x22B", MIXTRAL_8X22B),
        SELECTIVE | {"scan_layers": True},
        rows=8192,
        micro_batches=128,
    ),
    Step(
        *("h100", "1x64x8", "tp4 dp4 pp32 / ep8", "DeepSeek-V3", DEEPSEEK_V3, SELECTIVE),
        rows=2048,
        micro_batches=512,
    ),
    Step(*("b200", "1x1x8", "dp8 / ep8", "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE)),
)


def steps(only: Sequence[str], *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each program; quick: an update on eight GPUs and one on eight TPUs."""
    for step in STEPS:
        if (quick and not step.quick) or not matches(step.label, only):
            continue
        about = {"device": step.device, "layout": step.layout, "program": step.title}
        try:
            program = compile_step(step, folder_of(keep, step.label))
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        predicted = predicted_bytes(step)
        total, asynchronous = collectives_of(program.text)
        yield about | {
            "seconds": program.seconds,
            "arguments": program.arguments,
            "temporaries": program.temporaries,
            **({} if predicted is None else {"predicted": predicted}),
            "collectives": total,
            "asynchronous": asynchronous,
            "kernels": sorted(kernel.name for kernel in program.kernels),
            "defects": [
                f"{kernel.name} {defect}"
                for kernel in program.kernels
                for defect in kernel.defects()
            ],
        }


def collectives_of(text: str) -> tuple[int, int]:
    """Number of collectives in a scheduled program, those of a loop once, and how many of them are
    asynchronous."""
    from sharding.overlap import collectives

    found = collectives(text)
    return len(found), sum(one.is_asynchronous for one in found)


_COMPILED: dict[str, compilers.Program] = {}


def compile_step(
    step: Step, keep: Path | None = None, *, reads_kernels: bool = True
) -> compilers.Program:
    """Compiles a program for its devices.

    A program that this process has compiled already, with its kernels, is not compiled again: it is
    returned with 0 seconds.

    Args:
      keep, reads_kernels: as in `compilers.compile_for`; with a folder to keep it is always
        compiled.
    """
    same = repr(step._replace(title="", quick=False))
    if keep is None and same in _COMPILED:
        return _COMPILED[same]._replace(seconds=0.0)
    build = {UPDATE: _update, SCORING: _scoring, DECODING: _decoding}[step.kind]
    function, *given = build(step)
    program = compilers.compile_for(
        step.device, function, *given, keep=keep, reads_kernels=reads_kernels
    )
    if reads_kernels:
        _COMPILED[same] = program
    return program


def predicted_bytes(step: Step) -> float | None:
    """Bytes on a device during an update as the planner predicts them, which a dry run prints; None
    for other programs."""
    if step.kind != UPDATE:
        return None
    from jrl.trainer.setup.planner import method_of
    from moe.counts import sizes_of
    from sharding.planner.memory import memory
    from sharding.planner.method import Batch

    config, mesh = _network(step)
    layout = mesh.layout
    batch = Batch(
        step.rows, step.prompt + step.response, step.rows // step.micro_batches // layout.dp
    )
    method = method_of(config, mesh, batch, _run_config(step))
    return memory(sizes_of(config), layout, batch, method, config.execution.vocab_chunk).total


def _network(step: Step) -> tuple[Any, Any]:
    """The network with what a run selects for its devices, and its mesh."""
    from jrl.trainer.setup.network import with_dispatch
    from sharding.folding import Layout, fold

    mesh = fold(Layout.parse(step.layout), compilers.devices(step.device, step.shape))
    config = network(step.sizes, **step.execution)
    return with_dispatch(config, _run_config(step), mesh), mesh


def _run_config(step: Step) -> Any:
    from jrl.config.run import RunConfig

    return RunConfig(**(step.run or {}))


def _policy(step: Step) -> tuple[Any, Any, Any]:
    """Objective of the policy, optimizer settings and its state as shapes."""
    from jrl.recipes import RECIPES
    from jrl.trainer import state
    from jrl.trainer.learner.networks import Network, Networks, PolicyObjective
    from jrl.trainer.scoring import PromptLayout

    config, mesh = _network(step)
    recipe = RECIPES["grpo"]()
    run = _run_config(step)
    optimizer = replace(recipe.optimizer, mu_dtype=run.mu_dtype, gradient_wire=run.gradient_wire)
    objective = PolicyObjective(config, mesh, PromptLayout(step.prompt, 1), recipe, step.response)
    networks = Networks(Network(objective, optimizer, step.micro_batches), None)
    return objective, optimizer, state.abstract(networks).policy


def _of_rows(step: Step, mesh: Any, dtype: Any, *shape: int) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    rows = NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))
    return jax.ShapeDtypeStruct((step.rows, *shape), dtype, sharding=rows)


def _update(step: Step) -> tuple[Any, ...]:
    import jax.numpy as jnp

    from jrl.recipes import Batch
    from jrl.trainer.learner.update import update

    objective, optimizer, learner = _policy(step)
    time = step.prompt + step.response

    def of(dtype: Any, *shape: int) -> Any:
        return _of_rows(step, objective.mesh, dtype, *shape)

    batch = Batch(
        tokens=of(jnp.int32, time),
        valid=of(jnp.bool_, time),
        mask=of(jnp.bool_, time),
        behaviour_logprobs=of(jnp.float32, time),
        old_logprobs=of(jnp.float32, time),
        advantages=of(jnp.float32, time),
        correct=of(jnp.bool_),
    )
    return update, objective, optimizer, step.micro_batches, learner, batch


def _scoring(step: Step) -> tuple[Any, ...]:
    import jax.numpy as jnp

    from jrl.trainer.scoring import logprobs_of

    objective, _, learner = _policy(step)
    time, mesh = step.prompt + step.response, objective.mesh
    tokens = _of_rows(step, mesh, jnp.int32, time), _of_rows(step, mesh, jnp.bool_, time)
    return logprobs_of.with_overflow, objective, learner.weights, *tokens


def _decoding(step: Step) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    from jrl.recipes.base.batch import replicated
    from jrl.rollout.decoding.decode import (
        SamplerState,
        StepLimits,
        UnstackedPolicy,
        _policy_specs,
        advance,
    )
    from jrl.rollout.decoding.slots import Decoder, abstract_pool
    from jrl.rollout.sampling import Sampling
    from moe.layers.depth import split_layer_groups
    from moe.weights import cast_shapes, without_layers
    from sharding.sharded_jit import abstract_array, named_shardings

    config, mesh = _network(step)
    columns = step.prompt + step.response
    decoder = Decoder(config, mesh, pad_id=0, stop_ids=(1,))
    policy = jax.eval_shape(
        lambda weights: UnstackedPolicy(
            split_layer_groups(weights, config), without_layers(weights)
        ),
        cast_shapes(config),
    )
    policy = jax.tree.map(abstract_array, policy, named_shardings(_policy_specs(decoder), mesh))

    def everywhere(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))

    number = everywhere(jnp.int32)
    return (
        *(advance, decoder, Sampling(), columns, policy),
        abstract_pool(decoder, step.rows, columns),
        SamplerState(everywhere(jnp.uint32, 2), number),
        StepLimits(number, number),
    )
