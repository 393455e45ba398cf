"""Layouts that the planner proposes, compiled for the absent cluster.

    python -m benchmarks.absent plan qwen3-30b-a3b --hardware h100x8 --tokens 32K --seq 2048 --top 1

Arguments are those of `python -m moe.planner`. Memory, kernel launches and exposed
communication of the compiled update are printed beside the planner's own.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from benchmarks.absent import compilers
from benchmarks.absent.descriptions import GPUS, TPUS
from benchmarks.absent.rows import Figures, reason

COLUMNS = ("layout", "memory", "compiled", "communication", "compiled", "launches", "seconds")


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each layout: planned and compiled memory, exposed communication of a step,
    and the launches of the program.

    Returns:
      The exit status: 0, 1 where a compiler refuses a layout, or 2 when there is no answer, with
      the reason.
    """
    compilers.prepare()
    # They import JAX, which reads the environment.
    from moe.planner.__main__ import PARSER, batch_sizes, join_numbers, model_of, result_of
    from moe.planner.report import align_columns
    from sharding.costs.hardware import parse

    args = PARSER.parse_args(join_numbers(arguments))
    try:
        hardware, devices = parse(args.hardware)
        check(args, hardware.name)
        shape = topology(hardware.name, hardware.domain, devices)
        model = model_of(args.model, args.ignore_options)
        sizes = network_fields(args.model, model, args.ignore_options)
        result = result_of(args, model)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    _, time = batch_sizes(args)
    rows = []
    for plan in result.plans[: args.top]:
        step = step_of(plan, args.model, sizes, hardware.name, shape, time)
        rows.append(compiled_step(step, hardware))
        cells = row_of(plan, rows[-1])
        # A compilation takes minutes: each is printed when it is done.
        print(align_columns([COLUMNS, cells] if len(rows) == 1 else [cells]), flush=True)
    return int(any("error" in row for row in rows))


def check(args: Any, device: str) -> None:
    """Checks that layouts of a command line can be compiled here.

    Raises:
      ValueError: for another program, a device without a description, and without its
        compiler.
    """
    if args.program != "jrl":
        raise ValueError(
            f"--program {args.program} is not compiled, only updates of this library: leave it out."
        )
    if device not in GPUS | TPUS:
        known = ", ".join(GPUS | TPUS)
        raise ValueError(f"--hardware {args.hardware} is not compiled for: choose among {known}.")
    missing = compilers.missing(compilers.platform_of(device))
    if missing is not None:
        raise ValueError(missing)


def topology(device: str, domain: int, devices: int) -> str | None:
    """The absent devices, for `compilers.devices`.

    Raises:
      ValueError: for GPUs that are no whole number of servers, and for other than eight TPUs.
    """
    if device in TPUS:
        if devices != 8:
            raise ValueError(f"{device}x{devices}: TPUs are compiled for in eights, {device}x8.")
        return None
    of_server = min(domain, devices)
    if devices % of_server:
        raise ValueError(
            f"{device}x{devices} is no whole number of servers of {domain}: choose a multiple."
        )
    return f"1x{devices // of_server}x{of_server}"


def network_fields(name: str, model: Any, ignore: Sequence[str]) -> dict[str, Any]:
    """Fields of the `moe.config.ModelConfig` of a checkpoint, or of a network of these sizes.

    Args:
      name: of a preset, or path of a checkpoint.
      model: `moe.planner.models.ModelSizes` of it.
      ignore: options of config.json that are passed over.

    Raises:
      ValueError: for sizes that no network here has.
    """
    from moe.config import ModelConfig
    from moe.planner.models import PRESETS, sizes_of

    if name not in PRESETS:
        from moe.huggingface import config_from

        config = config_from(name, ignore=ignore)
    else:
        config = ModelConfig(**_fields_of_sizes(model))
        if sizes_of(config) != model:
            raise ValueError(f"{name} is not compiled from its sizes: give its config.json.")
    names = {field.name for field in fields(ModelConfig)} - {"dtype", "execution"}
    return {name: getattr(config, name) for name in names}


def _fields_of_sizes(model: Any) -> dict[str, Any]:
    from moe.architecture.attention import MultiHeadLatentAttention

    derived = {"tied", "query_key_norm", "latent", "window", "num_window_layers"}
    names = {field.name for field in fields(model)} - derived
    if not model.num_experts:
        names -= {"experts_per_token", "d_expert"}
    found = {name: getattr(model, name) for name in names}
    found["head"] = "tied" if model.tied else "untied"
    found["query_key_norm"] = "head" if model.query_key_norm else None
    if model.latent is not None:
        latent = model.latent
        found["mla"] = MultiHeadLatentAttention(
            latent.rank, latent.query_rank or None, latent.rope_dim, latent.value_dim
        )
    if model.window:
        # Every other layer, as in gpt-oss, where half of them have a window.
        found["sliding_window"] = model.window
        found["full_attention_layers"] = tuple(range(1, model.num_layers, 2))
    return found


def step_of(
    plan: Any, title: str, sizes: dict[str, Any], device: str, shape: str | None, time: int
) -> Any:
    """The update of a plan, a `benchmarks.absent.steps.Step`.

    Args:
      plan: of `moe.planner.search`.
      title: name of the network.
      sizes: fields of its `moe.config.ModelConfig`.
      device, shape: of `compilers.devices`.
      time: tokens of a sequence.
    """
    from benchmarks.absent.steps import Step

    layout, batch, method = plan.layout, plan.batch, plan.method
    # A run chooses the implementations of axes of one device.
    execution = {
        item.name: getattr(method.execution, item.name)
        for item in fields(method.execution)
        if item.name not in ("dispatch", "context")
    }
    if layout.cp > 1:
        execution["context"] = method.context
    run = {"mu_dtype": method.mu_dtype, "gradient_wire": method.gradient_wire}
    if layout.ep * layout.etp > 1:
        run["dispatch"] = method.dispatch
    return Step(
        *(device, shape, str(layout), title, sizes, execution),
        rows=batch.rows,
        micro_batches=batch.num_micro_batches(layout),
        prompt=time // 4,
        response=time - time // 4,
        run=run,
    )


def compiled_step(step: Any, hardware: Any) -> Figures:
    """Figures of an update that is compiled: bytes on a device, seconds of communication that
    computation waits for, launches, and processor time of the compilation.

    Args:
      hardware: rates, a `sharding.costs.hardware.Hardware`.
    """
    from benchmarks.absent.launches import count_launches
    from benchmarks.absent.programs import compile_step
    from benchmarks.absent.timeline import timeline

    try:
        program = compile_step(step, reads_kernels=False)
    except Exception as error:  # a compiler's refusal has no type of its own; it is a row
        return {"error": reason(error)}
    text = program.text
    found = timeline(text, hardware)
    return {
        "bytes": program.arguments + program.temporaries,
        "exposed": found.exposed,
        "launches": count_launches(text).fixed if step.device in GPUS else None,
        "seconds": program.seconds,
    }


def row_of(plan: Any, figures: Figures) -> list[str]:
    """A plan and the figures of its program as text, under `COLUMNS`."""
    planned = [str(plan.layout), f"{plan.memory.total / 1e9:.3g} GB", f"{plan.cost.exposed:.3g} s"]
    if "error" in figures:
        return [*planned[:2], "refused", planned[2], figures["error"], "", ""]
    launches = "-" if figures["launches"] is None else f"{figures['launches']:,}"
    return [
        *(*planned[:2], f"{figures['bytes'] / 1e9:.3g} GB"),
        *(planned[2], f"{figures['exposed']:.3g} s"),
        *(launches, f"{figures['seconds']:.0f}"),
    ]
