"""Interface of rollout engines, and the counters of their work."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from operator import sub
from typing import Protocol, runtime_checkable

from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.decoding.slots import SlotPool
from jrl.rollout.sampling import Sampling
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@dataclass
class Usage:
    """Counters of decoding.

    Attributes:
      steps: steps of decoding; each gives every live row a token.
      slot_steps: tokens that were computed: steps times the slots in each.
      row_steps: tokens that were sampled in them.
      admitted: rows admitted to slots; each got its first token at admission, before any step.
      prefilled: tokens of prompts, and of resumed responses, that were run.
      repeated: admissions that were recomputed after an overflow of the expert buffers
        (`Execution.buffer_factor`).
    """

    steps: int = 0
    slot_steps: int = 0
    row_steps: int = 0
    admitted: int = 0
    prefilled: int = 0
    repeated: int = 0

    def copy(self) -> "Usage":
        """Snapshot of the counters, which an engine keeps updating."""
        return replace(self)

    def since(self, before: "Usage") -> "Usage":
        """Differences of the counters to the counters `before`."""
        return Usage(*map(sub, astuple(self), astuple(before)))

    @property
    def utilisation(self) -> float:
        """Fraction of computed tokens that were sampled; 1 if none was computed."""
        return self.row_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Metrics for the log; sampled tokens include the tokens of dropped groups."""
        return {
            "perf/slot_utilisation": self.utilisation,
            "perf/decode_steps": float(self.steps),
            "perf/sampled_tokens": float(self.row_steps + self.admitted),
            "perf/prefill_repeated": float(self.repeated),
        }


@runtime_checkable
class RolloutEngine(Protocol):
    """Interface of a rollout engine: weights and requests in, trajectories out."""

    @property
    def mesh(self) -> FoldedMesh:
        """Mesh on which the engine decodes."""
        ...

    @property
    def num_idle(self) -> int:
        """Number of slots that all submitted requests leave free."""
        ...

    @property
    def usage(self) -> Usage:
        """Counters of the engine's work so far."""
        ...

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        """Loads the policy for all further sampling.

        Args:
          weights: on the mesh of training.
          version: recorded with the tokens that these weights sample.
          entropy: statistics of the step before for an adaptive temperature; None samples at the
            base temperature.
        """
        ...

    def release(self) -> None:
        """Frees the memory that is not needed between rollouts."""
        ...

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Submits requests for responses.

        Args:
          sampling: sampling parameters; equal for all requests in flight.

        Raises:
          ValueError: for requests that this engine does not support.
        """
        ...

    def poll(self, draining: bool = False) -> list[Trajectory]:
        """Returns responses that finished since the last call: at least one if any is in flight.

        Args:
          draining: promises that nothing is submitted or suspended before all requests in flight
            have finished. The engine may then compute fewer rows in a step as rows finish: the
            number depends only on the samples, so that results are reproducible bit for bit.
        """
        ...

    def cancel(self, prompts: Sequence[int]) -> None:
        """Aborts all requests of these prompts."""
        ...

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        """Suspends all requests in flight and returns them; submitted again, they continue from
        their last token, whatever the weights are then. A collective in a run of multiple
        processes.

        Args:
          keep_pool: true if rows continue with their present KV cache; the engine must have its
            pool again when they are submitted.
        """
        ...

    def take_pool(self) -> SlotPool[Array]:
        """Removes the pool of slots from the engine and returns it."""
        ...

    def give_pool(self, pool: SlotPool[Array]) -> None:
        """Returns the pool of `take_pool` to an engine without requests in flight."""
        ...
