"""Settings of a run, except for its recipe's: the records of the components that read
them."""

from dataclasses import dataclass, fields, replace

from jrl.checks import flag
from jrl.config.training import EvaluationSettings, TrainingSettings, WarmStartSettings
from jrl.faults.settings import FaultSettings
from jrl.processes.settings import MonitoringSettings
from jrl.published.settings import LoraSettings, ModelSettings, RouterSettings
from jrl.rollout.settings import LengthSettings, RolloutSettings, SplitSettings, check_engine
from jrl.runs.settings import OutputSettings
from jrl.setting import check_settings, names_with
from jrl.tasks.settings import TaskSettings
from jrl.text.settings import FormatSettings
from moe.execution import Execution


@dataclass(frozen=True)
class RunConfig(
    FaultSettings,
    MonitoringSettings,
    OutputSettings,
    EvaluationSettings,
    WarmStartSettings,
    Execution,
    RouterSettings,
    LoraSettings,
    SplitSettings,
    RolloutSettings,
    LengthSettings,
    FormatSettings,
    TaskSettings,
    ModelSettings,
    TrainingSettings,
):
    """Settings of a run that do not belong to the algorithm: of all its components, each
    declared and checked in its own record.

    A function takes the record that it reads, for example `TaskSettings`; a run is one of each.
    """

    @property
    def execution(self) -> Execution:
        """Execution options of the network."""
        return Execution(**{item.name: getattr(self, item.name) for item in fields(Execution)})

    @property
    def without_implementations(self) -> dict[str, None]:
        """Settings that leave the implementations for other devices to the defaults."""
        return dict.fromkeys(names_with(Execution, "implementation"))

    def on_one_mesh(self) -> "RunConfig":
        """Copy that samples on one mesh, in place of two device groups."""
        unset = {item.name: item.default for item in fields(SplitSettings)}
        return replace(self, rollout_engine="slots", **unset)

    def __post_init__(self):
        check_settings(self)
        for record in RECORDS:
            if record is not Execution and "__post_init__" in record.__dict__:
                record.__post_init__(self)
        _ = self.execution  # raises its errors
        check_engine(self, self)
        if self.profiled_steps.start > self.steps > 0:
            raise ValueError(
                f"profile={self.profile!r} begins after the last step, {self.steps}: give steps of "
                "the run."
            )
        for name in ("rollout_devices", "rollout_split", "stale_cache"):
            if self.min_processes is not None and getattr(self, name):
                raise ValueError(
                    f"min_processes={self.min_processes} cannot be combined with {flag(name)}, "
                    "whose devices do not shrink with dp: leave out one of them."
                )


RECORDS: tuple[type, ...] = RunConfig.__bases__[::-1]
"""Records of settings that a run has, in the order of --help."""
