"""Settings of the files of a run: checkpoints, samples and loggers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jrl.runs.directory import storage_path
from jrl.setting import setting

LoggerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True)
class OutputSettings:
    """Checkpoints, samples and loggers."""

    CHANGEABLE: ClassVar[bool] = True

    checkpoint_every: int = setting(
        50,
        minimum=1,
        sft="Steps between checkpoints. The first is taken before the first step, the last at the "
        "end.",
    )
    """Steps between checkpoints. The first is taken after the warm start, the last at the end."""
    checkpoint_minutes: float | None = setting(10.0, above=0.0)
    """Minutes after which a step ends with a checkpoint too, whichever comes first; None
    counts steps alone."""
    keep_checkpoints: int = setting(2, minimum=1)
    """Number of checkpoints kept; the oldest is deleted first."""
    checkpoint_dir: str | None = None
    """Directory of the checkpoints, a path or gs://BUCKET/PATH; None is one in the run folder."""
    samples_every: int = setting(
        10,
        minimum=1,
        sft="Steps between completions of held-out prompts written to samples.jsonl.",
    )
    """Steps between completions written to samples.jsonl."""
    sample_tokens: int = setting(512, minimum=0, sft=False)
    """Number of first tokens of each of these completions to write with their advantage, entropy
    and log-probabilities, by a forward pass over these completions; 0 writes none."""
    log_to: tuple[LoggerName, ...] = ()
    """Loggers of metrics, in addition to metrics.jsonl."""

    def __post_init__(self):
        if self.checkpoint_dir is not None:
            storage_path(self.checkpoint_dir)
