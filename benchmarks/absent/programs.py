"""Whole programs for absent devices: updates, scoring passes and decoding steps of published
networks, over one device and over hundreds."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.absent import compilers
from benchmarks.absent.disaggregated import half_of
from benchmarks.absent.rows import Figures, folder_of, reason
from benchmarks.absent.selection import Selection
from benchmarks.absent.steps import (
    DECODING,
    DISAGGREGATED,
    OF_ATTENTION,
    OF_DECODING,
    PREFILL,
    SCORING,
    STEPS,
    UPDATE,
    Step,
    prompts_of_prefill,
)
from benchmarks.absent.timeline import overlap
from benchmarks.gpu.networks import network
from moe.config import Model


def steps(selection: Selection, *, quick: bool, keep: Path | None) -> Iterator[Figures]:
    """A row for each program; quick: an update on eight GPUs and one on eight TPUs, of a layer or
    two, with their kernels."""
    for step in STEPS:
        # Those of a few layers are compiled where they are named, or quick.
        if step.quick != quick and (quick or not selection.names):
            continue
        if not selection.takes(step.label):
            continue
        about = {"device": step.device, "layout": step.layout, "program": step.title}
        try:
            program = compile_step(step, folder_of(keep, step.label), reads_kernels=step.quick)
        except Exception as error:  # a compiler's refusal has no type of its own; it is a row
            yield about | {"error": reason(error)}
            continue
        predicted = predicted_bytes(step)
        total, asynchronous = collectives_of(program.text)
        yield about | {
            "seconds": program.seconds,
            "arguments": program.arguments,
            "temporaries": program.temporaries,
            **({"others": program.others} if step.kind in DISAGGREGATED else {}),
            **({} if predicted is None else {"predicted": predicted}),
            "collectives": total,
            "asynchronous": asynchronous,
            **(_kernels_of(program) if step.quick else {}),
            **({"overlap": overlap(program.text, step.device)} if step.scheduled else {}),
        }


def _kernels_of(program: compilers.Program) -> Figures:
    return {
        "kernels": sorted(kernel.name for kernel in program.kernels),
        "defects": [
            f"{kernel.name} {defect}" for kernel in program.kernels for defect in kernel.defects()
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

    A program that this process has compiled already is not compiled again: it is returned with 0
    seconds, unless its kernels are to be read now and were not.

    Args:
      keep, reads_kernels: as in `compilers.compile_for`; with a folder to keep it is always
        compiled.
    """
    same = repr(step._replace(title="", scheduled=False, quick=False))
    before = _COMPILED.get(same)
    if keep is None and before is not None and (before.kernels or not reads_kernels):
        return before._replace(seconds=0.0)
    if step.kind in DISAGGREGATED:
        function, given, others = half_of(step)
    else:
        build = {UPDATE: _update, SCORING: _scoring, PREFILL: _prefill, DECODING: _decoding}
        others = 0
        function, *given = build[step.kind](step)
    program = compilers.compile_for(
        *(step.device, function, *given),
        keep=keep,
        reads_kernels=reads_kernels,
        options=step.options,
    )
    if step.kind in DISAGGREGATED:
        program = program._replace(others=others + program.results)
    _COMPILED[same] = program
    return program


def predicted_bytes(step: Step) -> float | None:
    """Bytes on a device as the planner predicts them: of an update, which a dry run prints too, and
    of a decoding step with caches of whole rows; None for other programs."""
    if step.kind == DECODING:
        return predicted_bytes_of_decoding(step)
    if step.kind in DISAGGREGATED:
        return predicted_bytes_of_half(step)
    if step.kind != UPDATE:
        return None
    from jrl.trainer.setup.plan_inputs import method_of
    from moe.planner.memory import memory
    from moe.planner.method import Batch
    from moe.planner.models import sizes_of

    config, mesh = _network(step)
    layout = mesh.layout
    batch = Batch(
        step.rows, step.prompt + step.response, step.rows // step.micro_batches // layout.dp
    )
    method = method_of(Model(config, mesh), batch, _run_config(step))
    return memory(sizes_of(config), layout, batch, method).total


def predicted_bytes_of_decoding(step: Step) -> float:
    """Bytes on a device of a co-located server, weights and KV cache."""
    from benchmarks.planner.serving.colocated import cache_bytes, weight_bytes
    from benchmarks.planner.serving.plan import Load
    from moe.planner.models import sizes_of
    from sharding.folding import Layout

    layout, model = Layout.parse(step.layout), sizes_of(network(step.sizes, **step.execution))
    # A server is as many devices as hold all experts.
    server = replace(layout, dp=layout.ep * layout.etp // layout.tp)
    rows = step.rows * server.dp // layout.dp
    load = Load(context=step.prompt + step.response)
    return weight_bytes(model, server) + rows * cache_bytes(model, server, load)


def predicted_bytes_of_half(step: Step) -> float | None:
    """Bytes on a device of attention or of experts, weights and KV cache; None for a prefill."""
    from benchmarks.planner.serving.plan import DevicePair, Load, Server
    from moe.disaggregated.split import Split
    from moe.planner.models import sizes_of
    from sharding.costs.hardware import HARDWARE

    if step.kind not in OF_DECODING:
        return None
    split, model = Split.parse(step.layout), sizes_of(network(step.sizes, **step.execution))
    attention, experts = split.attention_layout, split.experts_layout
    hardware, of_node = HARDWARE[step.device], model.num_experts // experts.ep
    load = Load(context=step.prompt + step.response)
    server = Server(
        *(model, load, DevicePair(hardware, hardware), attention.tp, experts.etp, of_node)
    )
    if step.kind not in OF_ATTENTION:
        return server.expert_bytes()
    return server.attention_bytes(step.rows // attention.dp)


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
    from jrl.trainer.learner.networks import Networks
    from jrl.trainer.learner.update import Network, PolicyObjective
    from jrl.trainer.scoring import PromptLayout

    config, mesh = _network(step)
    recipe = RECIPES["grpo"]()
    run = _run_config(step)
    optimizer = replace(
        recipe.policy_optimizer, mu_dtype=run.mu_dtype, gradient_wire=run.gradient_wire
    )
    objective = PolicyObjective(config, mesh, PromptLayout(step.prompt, 1), recipe, step.response)
    networks = Networks({"policy": Network(objective, optimizer, step.micro_batches)})
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


def _prefill(step: Step) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from jrl.rollout.decoding.prefill import AdmissionArrays, admit
    from jrl.rollout.decoding.slots import Decoder, abstract_pool, over_slots
    from jrl.rollout.sampling import Sampling
    from moe.placement import specs
    from moe.weights import cast_shapes
    from sharding.sharded_jit import abstract_array, named_shardings

    config, mesh = _network(step)
    decoder = Decoder(config, mesh, pad_id=0, stop_ids=(1,))
    dp = mesh.size(mesh.dp)
    sharding = NamedSharding(mesh.mesh, over_slots(mesh))

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    shardings = named_shardings(specs(Model(config, mesh)), mesh)
    weights = jax.tree.map(abstract_array, cast_shapes(config), shardings)
    prompts = dp * prompts_of_prefill(step, dp)
    return (
        *(admit, decoder, Sampling(), weights),
        abstract_pool(decoder, step.rows, step.prompt + step.response),
        *(of(prompts, step.prompt), of(prompts)),
        AdmissionArrays(*[of(step.rows)] * 6),
        _sampler_state(mesh),
    )


def _sampler_state(mesh: Any) -> Any:
    import jax.numpy as jnp

    from jrl.rollout.decoding.slots import SamplerState

    return SamplerState(_everywhere(mesh, jnp.uint32, 2), _everywhere(mesh, jnp.int32))


def _everywhere(mesh: Any, dtype: Any, *shape: int) -> Any:
    import jax

    from jrl.recipes.base.batch import replicated

    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))


def _decoding(step: Step) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    from jrl.rollout.decoding.mesh_backend import (
        StepLimits,
        advance,
        policy_specs,
        unstack_policy,
    )
    from jrl.rollout.decoding.slots import Decoder, abstract_pool
    from jrl.rollout.sampling import Sampling
    from moe.weights import cast_shapes
    from sharding.sharded_jit import abstract_array, named_shardings

    config, mesh = _network(step)
    columns = step.prompt + step.response
    decoder = Decoder(config, mesh, pad_id=0, stop_ids=(1,))
    policy = jax.eval_shape(lambda weights: unstack_policy(decoder, weights), cast_shapes(config))
    policy = jax.tree.map(abstract_array, policy, named_shardings(policy_specs(decoder), mesh))
    number = _everywhere(mesh, jnp.int32)
    return (
        *(advance, decoder, Sampling(), columns, policy),
        abstract_pool(decoder, step.rows, columns),
        _sampler_state(mesh),
        StepLimits(number, number),
    )
