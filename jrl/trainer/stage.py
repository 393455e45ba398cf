"""What a run does in a step, and how it is measured: reinforcement, or the supervised stage."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array

from jrl.trainer.outputs import Outputs
from jrl.trainer.state import TrainState
from jrl.trainer.step import Done


@runtime_checkable
class Stage(Protocol):
    """What `jrl.trainer.loop.train` goes on with until its last step."""

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], Done]:
        """Learns once."""
        ...

    def evaluated(self, state: TrainState[Array]) -> dict[str, float]:
        """Held-out metrics of the policy."""
        ...

    def left_out(self) -> dict[str, float]:
        """Metrics of the data, once in a run."""
        ...

    def write_samples(self, outputs: Outputs, state: TrainState[Array], done: Done) -> None:
        """Samples of a step, into samples.jsonl."""
        ...
