"""Protocol of a training stage: the step and the evaluation of reinforcement learning or SFT."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array

from jrl.trainer.outputs import Outputs
from jrl.trainer.state import TrainState
from jrl.trainer.step import Done


@runtime_checkable
class Stage(Protocol):
    """Training stage that `jrl.trainer.loop.train` runs until its last step."""

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], Done]:
        """Runs one training step."""
        ...

    def evaluated(self, state: TrainState[Array]) -> dict[str, float]:
        """Held-out metrics of the policy."""
        ...

    def left_out(self) -> dict[str, float]:
        """Metrics of the data, once in a run."""
        ...

    def write_samples(self, outputs: Outputs, state: TrainState[Array], done: Done) -> None:
        """Writes samples of a step to samples.jsonl."""
        ...
