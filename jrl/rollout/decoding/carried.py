"""What rows bring into their slots of the samplers that they had before."""

import numpy as np

from jrl.rollout.decoding.programs.admission import Carried
from jrl.rollout.decoding.programs.slots import Decoder
from jrl.rollout.decoding.seating import Arriving
from moe.router.replay import choices_dtype


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
        choices=_no_choices(slots, width, decoder),
    )
    for slot, request, _ in arriving.seats:
        carried.starts[slot], sampled = request.start, request.sampled
        if sampled is None:
            continue
        columns = slice(request.start, request.start + len(sampled.tokens))
        carried.behaviour_logprobs[slot, columns] = sampled.behaviour_logprobs
        carried.old_logprobs[slot, columns] = sampled.old_logprobs
        carried.versions[slot, columns] = sampled.versions
        if carried.choices is not None and sampled.choices is not None:
            carried.choices[slot, : len(sampled.choices)] = sampled.choices
    return carried


def _no_choices(slots: int, width: int, decoder: Decoder) -> np.ndarray | None:
    if not decoder.records_choices:
        return None
    config = decoder.config
    shape = (slots, width, config.num_expert_layers, config.experts_per_token)
    return np.full(shape, config.num_experts, choices_dtype(config.num_experts))
