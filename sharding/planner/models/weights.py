"""What one device holds of the weights, by the devices that hold the same: the groups over which
gradients are summed and optimizer states are cut."""

import functools
from dataclasses import dataclass

from sharding.folding import Layout
from sharding.planner.models.sizes import ModelSizes


@dataclass(frozen=True)
class Held:
    """Weights of one device that the same group of devices holds.

    Attributes:
      what: in words.
      parameters: on the device, of all its layers.
      replicas: logical axes whose devices hold the same ones.
      in_layers: they belong to the layers that are alike, which full sharding joins one by one.
    """

    what: str
    parameters: int
    replicas: tuple[str, ...]
    in_layers: bool = True

    def group(self, layout: Layout) -> int:
        """Devices that hold the same."""
        size = 1
        for axis in self.replicas:
            size *= getattr(layout, axis)
        return size


@functools.lru_cache(maxsize=1024)
def held(model: ModelSizes, layout: Layout) -> tuple[Held, ...]:
    """All weights of one device.

    Attention and dense layers are cut over ``tp``, experts over ``ep`` and ``etp``, layers over
    ``pp``; norms and routers are whole, and so are embedding, last norm and first dense layers on
    every stage; the head's columns are cut over ``tp`` where they divide.
    """
    h, tp = model.d_model, layout.tp
    layers = (model.num_layers - model.num_dense_layers) // layout.pp
    routed = layers if model.num_experts else 0
    same, whole = ("dp", "cp"), ("dp", "cp", "tp")
    first, ends, spread = model.num_dense_layers, ("pp", *whole), ("pp", *same)
    head_is_cut = model.vocab_size % tp == 0
    head = 0 if model.tied else model.vocab_size * h // (tp if head_is_cut else 1)
    found = [
        Held("attention", layers * model.attention_parameters // tp, same),
        Held("dense layers", layers * 3 * h * model.d_ff // tp, same),
        Held("norms and routers", layers * 2 * h + routed * h * model.num_experts, whole),
        Held("experts", routed * model.expert_parameters // (layout.ep * layout.etp), ("edp",)),
        Held(
            "first dense layers",
            first * (model.attention_parameters + 3 * h * model.dense_d_ff) // tp,
            spread,
            in_layers=False,
        ),
        Held("norms of first layers", first * 2 * h, ends, in_layers=False),
        Held("embedding and last norm", (model.vocab_size + 1) * h, ends, in_layers=False),
        Held("head", head, spread if head_is_cut else ends, in_layers=False),
    ]
    return tuple(one for one in found if one.parameters)


def parameters_on_device(model: ModelSizes, layout: Layout) -> int:
    """How many numbers a device has where weights are used."""
    return sum(one.parameters for one in held(model, layout))


def parameters_in_parts(model: ModelSizes, layout: Layout) -> int:
    """Of how many of them a device keeps the optimizer's state (ZeRO)."""
    return sum(-(-one.parameters // one.group(layout)) for one in held(model, layout))
