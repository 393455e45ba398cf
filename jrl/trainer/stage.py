"""Protocol of a training stage: the step and the evaluation of reinforcement learning or SFT."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array

from jrl.trainer.outputs import Outputs
from jrl.trainer.state import TrainState
from jrl.trainer.step import StepResult


@runtime_checkable
class Stage(Protocol):
    """Training stage that `jrl.trainer.loop.train` runs until its last step."""

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], StepResult]:
        """Runs one training step."""
        ...

    def evaluate(self, state: TrainState[Array]) -> dict[str, float]:
        """Held-out metrics of the policy."""
        ...

    def data_metrics(self) -> dict[str, float]:
        """Metrics of the data, once in a run."""
        ...

    def write_samples(self, outputs: Outputs, state: TrainState[Array], result: StepResult) -> None:
        """Writes samples of a step to samples.jsonl."""
        ...
