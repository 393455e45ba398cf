"""Arrays of an admission, on the host: sources and lengths of rows, and their restored state."""

import numpy as np

from jrl.rollout.decoding.programs.admission import AdmissionArrays, RestoredRows
from jrl.rollout.decoding.programs.slots import Decoder
from jrl.rollout.decoding.scheduler import AdmissionPlan
from moe.config import ModelConfig
from moe.router.routing import choices_dtype


def make_admission(
    plan: AdmissionPlan, slots: int, per_rank: int, width: int, decoder: Decoder
) -> AdmissionArrays[np.ndarray]:
    """Arrays of the admitted requests, an entry for each slot.

    Args:
      slots: total number.
      per_rank: slots of a rank.
      width: positions of the longest row, at least.
    """
    fields = list[tuple[int, ...]]()
    for _, request, source in plan.assignments:
        # `~source` is a global slot; the compiled function counts the slots of its own rank.
        source = source if source >= 0 else ~source % per_rank
        length, begin = request.length, len(request.tokens)
        fields.append((source, length, request.limit, begin, request.prompt, request.sample))
    # Vectorised: entry by entry this would take longer than the compiled function.
    columns = np.zeros((6, slots), np.int32)
    columns[0] = -1
    columns[:, [slot for slot, *_ in plan.assignments]] = np.transpose(fields)
    return AdmissionArrays(*columns, restored=collect_restored(plan, slots, width, decoder))


def collect_restored(
    plan: AdmissionPlan, slots: int, width: int, decoder: Decoder
) -> RestoredRows[np.ndarray] | None:
    """Restored state of rows that were sampled before: log-probabilities, versions and expert ids;
    None where none was.

    Args:
      slots: total number.
      width: positions of the longest row, at least.
    """
    if all(request.sampled is None for _, request, _ in plan.assignments):
        return None
    restored = RestoredRows(
        starts=np.zeros(slots, np.int32),
        behaviour_logprobs=np.zeros((slots, width), np.float32),
        old_logprobs=np.zeros((slots, width), np.float32),
        versions=np.zeros((slots, width), np.int32),
        choices=no_choices(decoder.config, slots, width) if decoder.records_choices else None,
    )
    for slot, request, _ in plan.assignments:
        restored.starts[slot], sampled = request.start, request.sampled
        if sampled is None:
            continue
        columns = slice(request.start, request.start + len(sampled.tokens))
        restored.behaviour_logprobs[slot, columns] = sampled.behaviour_logprobs
        restored.old_logprobs[slot, columns] = sampled.old_logprobs
        restored.versions[slot, columns] = sampled.versions
        # From the first prompt token on: router replay covers prompt tokens too.
        if restored.choices is not None and sampled.choices is not None:
            restored.choices[slot, : len(sampled.choices)] = sampled.choices
    return restored


def no_choices(config: ModelConfig, rows: int, columns: int) -> np.ndarray:
    """Expert ids ``[row, position, layer, k]`` without a record: `num_experts` everywhere."""
    shape = (rows, columns, config.num_expert_layers, config.experts_per_token)
    return np.full(shape, config.num_experts, choices_dtype(config.num_experts))
