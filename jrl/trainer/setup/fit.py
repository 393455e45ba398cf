"""Sizes of a run that fit the memory that is free: before anything compiles the predicted peak is
compared, and prefill, slots, micro-batch, vocabulary chunk and response length without a setting
are lowered; on GPUs a vocabulary chunk is raised to all columns. The slots of an evaluation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from jrl.checks import flag
from jrl.config.run import RunConfig
from jrl.processes.agreement import gather
from jrl.recipes.base.batch import TEACHER
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.device_memory import device_memory, free_memory, local_devices
from jrl.rollout.settings import RolloutSettings
from jrl.trainer.setup.geometry import MAX_SLOTS
from jrl.trainer.setup.lengths import CHECKPOINT_RESPONSE
from jrl.trainer.setup.memory import (
    RunMemory,
    cache_bytes,
    rollout_memory,
    run_memory,
    unstacked_bytes,
    weight_bytes,
)
from jrl.trainer.setup.setup import Setup
from moe.config import Model
from moe.execution import Execution
from moe.planner.search import MEMORY_FRACTION

LEAST_PREFILL, LEAST_CHUNK, LEAST_RESPONSE = 2048, 1024, 64
"""Least prefill, vocabulary chunk and response length that are chosen."""
LOGITS_FRACTION = 0.75
"""Fraction of the free memory up to which all logits are taken at once. XLA computes values again
if a program needs more than 76% of the device: beyond it an update computed all logits four
times."""
TEACHER_FLAGS = "a smaller --teacher, --teacher-dtype bfloat16"
CPU_CACHE_BYTES = 2 << 30
"""Bytes of the KV cache of a process on a CPU, whose memory other programs share."""
OTHER_FLAGS = "--remat full, --dtype bfloat16, --lora-rank, fewer --prompts or more devices"


@dataclass(frozen=True)
class Fit:
    """A run that fits.

    Attributes:
      setup: of the run, with the chosen settings.
      chosen: settings that differ from the defaults, by name; empty if the defaults fit.
      line: what was chosen and why; empty if nothing was.
    """

    setup: Setup
    chosen: Mapping[str, int]
    line: str = ""


def fit(setup: Setup, recipe: Recipe, *, chooses: bool = True) -> Fit:
    """Fits a run into the memory that its devices have free.

    Defaults that fit stay as they are, but for `with_all_logits`. A size that was set is never
    changed.

    Args:
      recipe: as requested, before it was fitted to lengths and layout.
      chooses: false for a run that is resumed, which keeps its sizes.

    Raises:
      ValueError: if it does not fit, with the numbers and the flags that would do.
    """
    free = free_bytes(setup)
    # Choices leave a margin for what is not predicted; a run is refused for no more than it needs.
    budget = MEMORY_FRACTION * free if free is not None else None
    needed = run_memory(setup)
    if free is None or budget is None:
        return Fit(setup, {})
    is_set = _sizes_set(setup, recipe) if chooses else set(SIZES)
    if needed.peak <= budget:
        return Fit(setup, {}) if "vocab_chunk" in is_set else with_all_logits(setup, recipe, free)
    fitted, chosen, memory = _lower(setup, recipe, budget, is_set)
    if memory.peak > free:
        raise ValueError(_refusal(setup, recipe, needed, free))
    if not chosen:
        return Fit(setup, {})
    flags = _flags(chosen)
    line = (
        f"memory: chosen to fit: {flags}; {_size(memory.peak)} at the peak ({memory.largest}) of "
        f"{_size(free)} free, and the defaults need {_size(needed.peak)} ({needed.largest})"
    )
    return Fit(fitted, chosen, line)


def with_all_logits(setup: Setup, recipe: Recipe, free: int) -> Fit:
    """The run with all columns of the head in one chunk, if it is on GPUs and needs no more than
    `LOGITS_FRACTION` of the free bytes.

    In several chunks each logit is computed twice, once for the gradients: a fourth of the head's
    products. On a CPU chunks stay in its caches.
    """
    columns, chunk = setup.model.vocab_size, setup.model.execution.vocab_chunk
    if setup.mesh.platform != "gpu" or chunk is None or chunk >= columns:
        return Fit(setup, {})
    sizes = {"vocab_chunk": columns}
    raised = with_sizes(setup, recipe, sizes)
    memory = run_memory(raised)
    if memory.peak > LOGITS_FRACTION * free:
        return Fit(setup, {})
    line = f"memory: {_flags(sizes)}: no logit is computed twice; {_size(memory.peak)} at the peak"
    return Fit(raised, sizes, line)


def with_settings(record: Any, chosen: Mapping[str, int]) -> Any:
    """Copy of the run's settings, of its recipe or of its execution, with the chosen ones that it
    has."""
    names = {item.name for item in fields(record)}
    return replace(record, **{name: value for name, value in chosen.items() if name in names})


def free_bytes(setup: Setup) -> int | None:
    """Bytes that a device of the run has free, the least over its processes, or as the run says;
    None if unknown."""
    if setup.run.memory_limit is not None:
        return round(setup.run.memory_limit * 2**30)
    free = [each for each in gather(free_memory(setup.mesh)) if each is not None]
    if not free:
        return None
    if setup.run.rollout_devices is None or setup.mesh.platform != "cpu":
        return min(free)
    # The rollout devices of a CPU take from the same memory.
    devices = setup.mesh.layout.num_devices
    return max(min(free) - sum(rollout_memory(setup).values()) // devices, 0)


def _sizes_set(setup: Setup, recipe: Recipe) -> set[str]:
    """Sizes that the user has set, or that have no default to lower."""
    run = setup.run
    is_set = {
        "prefill_tokens": run.prefill_tokens != RolloutSettings.prefill_tokens,
        "slots": run.slots is not None or run.rollout_devices is not None,
        "micro_batch": recipe.micro_batch is not None,
        "vocab_chunk": run.vocab_chunk != Execution.vocab_chunk,
        # Other defaults follow from the data or from answers.
        "response_length": run.response_length is not None
        or setup.response_length > CHECKPOINT_RESPONSE
        or run.checkpoint is None
        or recipe.supervised,
    }
    return {name for name in SIZES if is_set[name]}


def _smaller_slots(setup: Setup) -> Iterator[int]:
    unit = setup.geometry.slots_unit
    slots = setup.geometry.slots(setup.run.slots)
    while slots > unit:
        slots = -(-slots // 2 // unit) * unit
        yield slots


def _smaller_prefills(setup: Setup) -> Iterator[int]:
    tokens = min(
        setup.run.prefill_tokens, setup.geometry.slots(setup.run.slots) * setup.prompt_length
    )
    while tokens > max(LEAST_PREFILL, setup.prompt_length):
        tokens = max(tokens // 2, LEAST_PREFILL)
        yield tokens


def _smaller_micro_batches(setup: Setup) -> Iterator[int]:
    recipe = setup.recipe
    for size in range(recipe.micro_batch_size - 1, 0, -1):
        if recipe.mini_batch_size % size == 0:
            smaller = replace(recipe, micro_batch=size)
            try:
                replace(setup.geometry, recipe=smaller).check()
            except ValueError:
                continue
            yield size


def _smaller_chunks(setup: Setup) -> Iterator[int]:
    chunk = setup.model.execution.vocab_chunk or setup.model.vocab_size
    chunk = min(chunk, setup.model.vocab_size)
    while chunk > LEAST_CHUNK:
        chunk = max(chunk // 2, LEAST_CHUNK)
        yield chunk


def _smaller_responses(setup: Setup) -> Iterator[int]:
    length = setup.response_length
    while length > LEAST_RESPONSE:
        length = max(length // 2, LEAST_RESPONSE)
        yield length


SIZES: dict[str, Callable[[Setup], Iterator[int]]] = {
    "prefill_tokens": _smaller_prefills,
    "slots": _smaller_slots,
    "micro_batch": _smaller_micro_batches,
    "vocab_chunk": _smaller_chunks,
    "response_length": _smaller_responses,
}
"""Sizes that take memory, each with its smaller values from the largest on."""
LOWERED = {
    "sampling": ("prefill_tokens", "slots", "response_length"),
    "update": ("micro_batch", "vocab_chunk", "response_length"),
    "scoring": ("vocab_chunk", "response_length"),
    "warm start": ("vocab_chunk",),
}
"""Sizes that are lowered for each phase, in this order."""


def _lower(
    setup: Setup, recipe: Recipe, budget: float, is_set: set[str]
) -> tuple[Setup, dict[str, int], RunMemory]:
    """Lowers the sizes that are not set until every phase is within the budget, or all are at their
    least. Returns the run, the lowered sizes and its memory."""
    chosen: dict[str, int] = {}
    memory = run_memory(setup)
    for phase, names in LOWERED.items():
        for name in names:
            if name in is_set:
                continue
            for value in SIZES[name](setup):
                if memory.peaks.get(phase, 0) <= budget:
                    break
                try:
                    setup = with_sizes(setup, recipe, chosen | {name: value})
                except ValueError:  # for example windows as long as responses
                    break
                chosen[name] = value
                memory = run_memory(setup)
    return setup, chosen, memory


def with_sizes(setup: Setup, recipe: Recipe, sizes: Mapping[str, int]) -> Setup:
    """Setup of a run with other sizes.

    Raises:
      ValueError: if they are not valid for the run.
    """
    run: RunConfig = with_settings(setup.run, sizes)
    response = sizes.get("response_length", setup.response_length)
    model = replace(setup.model, execution=with_settings(setup.model.execution, sizes))
    fitted = with_settings(recipe, sizes).fitted(response)
    changed = replace(setup, run=run, recipe=fitted, model=model, response_length=response)
    changed = replace(changed, recipe=changed.geometry.with_micro_batch().recipe)
    changed.geometry.check()
    return changed


def _refusal(setup: Setup, recipe: Recipe, needed: RunMemory, free: int) -> str:
    """Text of the error of a run that does not fit."""
    rows = {**needed.permanent, **needed.phases[needed.largest]}
    largest = sorted(rows, key=lambda name: -rows[name])[:3]
    parts = ", ".join(f"{name} {_size(rows[name])}" for name in largest)
    text = (
        f"the run does not fit: {needed.largest} needs {_size(needed.peak)} ({parts}), and "
        f"{_size(free)} are free. "
    )
    # Whoever set them may set other ones.
    _, chosen, memory = _lower(setup, recipe, MEMORY_FRACTION * free, set())
    if chosen and memory.peak <= free:
        return f"{text}{_flags(chosen)} would do, with {_size(memory.peak)}."
    least = f" (least with smaller sizes: {_size(memory.peak)})" if chosen else ""
    has_teacher = TEACHER in setup.network_files
    flags = f"{TEACHER_FLAGS}, {OTHER_FLAGS}" if has_teacher else OTHER_FLAGS
    return f"{text}Try {flags}{least}."


def _flags(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{flag(name)} {value}" for name, value in sizes.items())


def _size(num_bytes: int | float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


def evaluation_slots(setup: Setup, rows: int) -> tuple[int, str]:
    """Number of slots for the completions of an evaluation, and a line that describes it.

    The run's own number, if set; else as many as there are completions, at most `MAX_SLOTS`, whose
    KV cache fits: into `CPU_CACHE_BYTES`, or into half of the memory that the weights leave on an
    accelerator. It depends on the kind of machine, not on other processes there.

    Args:
      rows: total number of completions.

    Raises:
      ValueError: for a number that does not divide over the devices, or whose cache does not fit.
    """
    mesh, requested = setup.rollout_mesh, setup.run.slots
    model = Model(setup.model.without_adapters(), mesh)
    unit, total = setup.geometry.slots_unit, device_memory(mesh)
    row_length = setup.prompt_length + setup.response_length
    cache_bytes_of = partial(cache_bytes, model, row_length=row_length)
    if requested is None:
        # Rounded up: a few slots may stay empty, and each rank has at least one.
        needed = -(-min(rows, MAX_SLOTS) // unit) * unit
        fitting = unit * max(1, _budget(setup, total) // cache_bytes_of(unit))
        slots = min(needed, fitting)
        fit_text = "as many as fit" if fitting < needed else "with"
    else:
        slots, fit_text = setup.geometry.slots(requested), "with"
        if total is not None and cache_bytes_of(slots) > total:
            raise ValueError(
                f"slots={slots} need a KV cache of {_bytes(cache_bytes_of(slots))} for rows of "
                f"{row_length:,} tokens, and the device has {_bytes(total)}: lower --slots or "
                "--response-length."
            )
    return slots, (
        f"{rows:,} completions of at most {setup.response_length:,} tokens, {slots:,} at a time "
        f"(--slots), {fit_text} a KV cache of {_bytes(cache_bytes_of(slots))}"
    )


def _budget(setup: Setup, total: int | None) -> int:
    mesh = setup.rollout_mesh
    devices = local_devices(mesh)
    if total is None or devices[0].platform == "cpu":
        return CPU_CACHE_BYTES // len(devices)
    model = Model(setup.model.without_adapters(), mesh)
    # As loaded, and unstacked by layers for decoding.
    free = total - weight_bytes(model) - unstacked_bytes(model, is_stored=False)
    return max(free // 2, 0)


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2g} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.3g} MiB"
