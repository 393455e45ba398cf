"""Compatibility checks of rollout settings."""

from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

DISAGGREGATED_SETTINGS = ("rollout_split", "rollout_m2n", "rollout_expert_slots", "rollout_replan")
"""Settings that apply to `rollout_engine="disaggregated"` only."""

SINGLE_MESH_SETTINGS: dict[str, Any] = {
    "rollout_engine": "slots",
    **dict.fromkeys(DISAGGREGATED_SETTINGS),
}
"""Settings of a run that samples on one mesh."""


@dataclass(frozen=True)
class SplitSettings:
    """Attention and expert device groups for serving a policy. A `jrl.config.run.RunConfig` has the
    same settings, with ``rollout_`` before each name; None is unset."""

    split: str | None = None
    micro_batches: int | None = None
    expert_slots: int | None = None
    replan: int | None = None

    def with_defaults_from(self, run: object) -> "SplitSettings":
        """These settings, with those of a run where they are unset."""
        names = [field.name for field in fields(self)]
        values = {name: getattr(self, name) for name in names}
        run_values = {name: getattr(run, f"rollout_{name}") for name in names}
        return SplitSettings(
            **{n: run_values[n] if values[n] is None else values[n] for n in names}
        )


@runtime_checkable
class RolloutSettings(Protocol):
    """Rollout settings of a `jrl.config.run.RunConfig`, where they are explained."""

    @property
    def rollout_engine(self) -> str: ...
    @property
    def rollout_split(self) -> str | None: ...
    @property
    def rollout_layout(self) -> str | None: ...
    @property
    def stale_cache(self) -> bool: ...


def check_rollout(run: RolloutSettings) -> None:
    """Rejects rollout settings that are incompatible.

    Raises:
      ValueError: naming them.
    """
    if run.rollout_engine == "slots":
        for name in DISAGGREGATED_SETTINGS:
            if getattr(run, name) is not None:
                raise ValueError(
                    f"{name}={getattr(run, name)!r} needs --rollout-engine disaggregated: "
                    f"give it, or leave out --{name.replace('_', '-')}."
                )
        return
    if run.rollout_split is None:
        raise ValueError(
            "rollout_engine='disaggregated' needs the devices of attention and of experts: give "
            '--rollout-split, for example "tp1 dp2 / ep2".'
        )
    if run.rollout_layout is not None:
        raise ValueError(
            f"rollout_layout={run.rollout_layout!r} is a layout of one mesh, and "
            f"rollout_split={run.rollout_split!r} has two: leave out --rollout-layout."
        )
    if run.stale_cache:
        raise ValueError(
            "stale_cache saves the KV cache in checkpoints, which rollout_engine='disaggregated' "
            "does not support: leave out --stale-cache."
        )
