"""Arrays of an admission, on the host: sources and lengths of rows, and their restored state."""

import numpy as np

from jrl.rollout.decoding.programs.admission import Arrivals, Carried
from jrl.rollout.decoding.programs.slots import Decoder
from jrl.rollout.decoding.seating import Arriving
from moe.config import ModelConfig
from moe.router.replay import choices_dtype


def arrivals_of(
    arriving: Arriving, slots: int, per_rank: int, width: int, decoder: Decoder
) -> Arrivals[np.ndarray]:
    """Arrays of the admitted requests, an entry for each slot.

    Args:
      slots: total number.
      per_rank: slots of a rank.
      width: positions of the longest row, at least.
    """
    numbers = list[tuple[int, ...]]()
    for _, request, source in arriving.seats:
        # `~source` is a global slot; the compiled function counts the slots of its own rank.
        source = source if source >= 0 else ~source % per_rank
        length, begin = request.length, len(request.tokens)
        numbers.append((source, length, request.limit, begin, request.prompt, request.sample))
    # Vectorised: entry by entry this would take longer than the compiled function.
    columns = np.zeros((6, slots), np.int32)
    columns[0] = -1
    columns[:, [slot for slot, *_ in arriving.seats]] = np.transpose(numbers)
    return Arrivals(*columns, carried=carried_by(arriving, slots, width, decoder))


def carried_by(
    arriving: Arriving, slots: int, width: int, decoder: Decoder
) -> Carried[np.ndarray] | None:
    """Restored state of rows that were sampled before: log-probabilities, versions and expert ids;
    None where none was.

    Args:
      slots: total number.
      width: positions of the longest row, at least.
    """
    if all(request.sampled is None for _, request, _ in arriving.seats):
        return None
    carried = Carried(
        starts=np.zeros(slots, np.int32),
        behaviour_logprobs=np.zeros((slots, width), np.float32),
        old_logprobs=np.zeros((slots, width), np.float32),
        versions=np.zeros((slots, width), np.int32),
        choices=no_choices(decoder.config, slots, width) if decoder.records_choices else None,
    )
    for slot, request, _ in arriving.seats:
        carried.starts[slot], sampled = request.start, request.sampled
        if sampled is None:
            continue
        columns = slice(request.start, request.start + len(sampled.tokens))
        carried.behaviour_logprobs[slot, columns] = sampled.behaviour_logprobs
        carried.old_logprobs[slot, columns] = sampled.old_logprobs
        carried.versions[slot, columns] = sampled.versions
        # From the first prompt token on: router replay covers prompt tokens too.
        if carried.choices is not None and sampled.choices is not None:
            carried.choices[slot, : len(sampled.choices)] = sampled.choices
    return carried


def no_choices(config: ModelConfig, rows: int, columns: int) -> np.ndarray:
    """Expert ids ``[row, position, layer, k]`` without a record: `num_experts` everywhere."""
    shape = (rows, columns, config.num_expert_layers, config.experts_per_token)
    return np.full(shape, config.num_experts, choices_dtype(config.num_experts))
