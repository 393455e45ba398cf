"""Device groups of attention and experts for serving a policy with disaggregation."""

import math
from dataclasses import dataclass

import jax

from jrl.config.rollout import SplitSettings
from jrl.config.run import RunConfig
from jrl.rollout.expert_balancer import first_placement
from moe.config import ModelConfig
from moe.disaggregated.split import Split, SplitMesh, devices_of, fold_split
from moe.disaggregated.weights import check_splits
from sharding.folding import FoldedMesh, Layout, fold


@dataclass(frozen=True)
class DeviceSplit:
    """Device groups of attention and experts, and the settings of decoding on them.

    Attributes:
      mesh: of both device groups.
      micro_batches, expert_slots, replan: as of
        `jrl.rollout.decoding.split_backend.SplitBackend`.
    """

    mesh: SplitMesh
    micro_batches: int
    expert_slots: int | None
    replan: int | None

    def check(self, model: ModelConfig) -> None:
        """Rejects a network that the device groups do not support.

        Raises:
          ValueError: with the reason.
        """
        check_splits(model, self.mesh, first_placement(model, self.mesh, self.expert_slots))

    def check_slots(self, slots: int) -> None:
        """Rejects a number of slots that does not divide over devices and micro-batches.

        Raises:
          ValueError: for such a number.
        """
        layout, micro_batches = self.mesh.attention.layout, self.micro_batches
        unit = layout.num_devices * micro_batches
        if slots % unit:
            raise ValueError(
                f"slots={slots} does not divide over dp={layout.dp} x tp={layout.tp} devices of "
                f"attention x micro_batches={micro_batches}: choose --slots in multiples of "
                f"{unit}, or another --micro-batches."
            )

    def loading_mesh(self, model: ModelConfig) -> FoldedMesh:
        """Mesh over all devices, on which weights are loaded before they are sent to the groups:
        data parallel, with experts over as many devices as divide them."""
        devices = [*devices_of(self.mesh.attention), *devices_of(self.mesh.experts)]
        number = len(devices)
        return fold(Layout(dp=number, ep=math.gcd(number, model.num_experts)), devices)


def parse_device_split(
    requested: SplitSettings, layout: str | None, run: RunConfig
) -> DeviceSplit | None:
    """Requested device groups, or those that the run samples on; None for one mesh.

    Args:
      layout: of one mesh, if one is requested.

    Raises:
      ValueError: for incompatible settings, and for more devices than there are.
    """
    if requested.split is not None and layout is not None:
        raise ValueError(
            f"layout={layout!r} is a layout of one mesh, and split={requested.split!r} has two: "
            "leave out --layout."
        )
    settings = requested
    if requested.split is None and layout is None and run.rollout_split is not None:
        settings = requested.with_defaults_from(run)
    if settings.split is None:
        _reject_split_settings(requested)
        return None
    split, devices = Split.parse(settings.split), jax.devices()
    number = split.num_devices
    if len(devices) < number:
        raise ValueError(
            f"split={settings.split!r} needs {number} devices and there are {len(devices)}: give "
            f"--layout dp1 to serve on one mesh, or --devices {number} to have as many fake ones "
            "on a CPU."
        )
    micro_batches = settings.micro_batches
    if micro_batches is None:
        micro_batches = RunConfig.rollout_micro_batches
    mesh = fold_split(split, devices[:number])
    return DeviceSplit(mesh, micro_batches, settings.expert_slots, settings.replan)


def _reject_split_settings(requested: SplitSettings) -> None:
    for name in ("micro_batches", "expert_slots", "replan"):
        if (value := getattr(requested, name)) is not None:
            raise ValueError(
                f"{name}={value} needs the devices of attention and of experts: give --split, for "
                f'example "tp1 dp2 / ep2", or leave out --{name.replace("_", "-")}.'
            )
