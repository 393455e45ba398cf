"""What rows bring into their slots: their numbers, and what samplers left that they had before."""

import numpy as np

from jrl.rollout.decoding.programs.admission import Arrivals, Carried
from jrl.rollout.decoding.programs.slots import Decoder
from jrl.rollout.decoding.seating import Arriving
from moe.config import ModelConfig
from moe.router.replay import choices_dtype


def arrivals_of(
    arriving: Arriving, slots: int, per_rank: int, width: int, decoder: Decoder
) -> Arrivals[np.ndarray]:
    """What comes into the slots, an entry for each.

    Args:
      slots: in all.
      per_rank: slots of a rank.
      width: columns of the longest row, at least.
    """
    numbers = list[tuple[int, ...]]()
    for _, request, source in arriving.seats:
        # `~source` counts slots of all ranks, and the program those of its own.
        source = source if source >= 0 else ~source % per_rank
        length, begin = request.length, len(request.tokens)
        numbers.append((source, length, request.limit, begin, request.prompt, request.sample))
    # All at once: one by one they take longer than the program.
    columns = np.zeros((6, slots), np.int32)
    columns[0] = -1
    columns[:, [slot for slot, *_ in arriving.seats]] = np.transpose(numbers)
    return Arrivals(*columns, carried=carried_by(arriving, slots, width, decoder))


def carried_by(
    arriving: Arriving, slots: int, width: int, decoder: Decoder
) -> Carried[np.ndarray] | None:
    """Log-probabilities, versions and choices of what was sampled of them; None where nothing
    was.

    Args:
      slots: in all.
      width: columns of the longest row, at least.
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
        # From the first of the prompt on: a replay sends prompt tokens to their experts too.
        if carried.choices is not None and sampled.choices is not None:
            carried.choices[slot, : len(sampled.choices)] = sampled.choices
    return carried


def no_choices(config: ModelConfig, rows: int, columns: int) -> np.ndarray:
    """``[row, column, layer, k]`` without a record of any token's experts."""
    shape = (rows, columns, config.num_expert_layers, config.experts_per_token)
    return np.full(shape, config.num_experts, choices_dtype(config.num_experts))
