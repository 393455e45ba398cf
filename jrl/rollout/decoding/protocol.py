"""Engines answer requests with trajectories; which one does it is nobody else's concern."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.rollout.decoding.programs.slots import Pool
from jrl.rollout.decoding.requests import Request, Trajectory
from jrl.rollout.decoding.usage import Usage
from jrl.rollout.sampling import Sampling
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@runtime_checkable
class RolloutEngine(Protocol):
    """Weights and requests in, trajectories out."""

    @property
    def mesh(self) -> FoldedMesh:
        """Where it samples."""
        ...

    @property
    def num_idle(self) -> int:
        """Rows that could be decoded beside those that are asked for."""
        ...

    @property
    def usage(self) -> Usage:
        """What it has done so far."""
        ...

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        """The policy to sample with from here on.

        Args:
          weights: on the mesh of training.
          version: that tokens sampled with them will carry.
          entropy: of the step before, by which a temperature that adapts follows the policy; None
            samples at the base temperature.
        """
        ...

    def release(self) -> None:
        """Gives up the memory that is not needed between rollouts."""
        ...

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Asks for responses.

        Args:
          sampling: how their tokens are drawn; the same for all that are under way.

        Raises:
          ValueError: for requests that this engine cannot serve.
        """
        ...

    def poll(self, alone: bool = False) -> list[Trajectory]:
        """Responses that came to their end since the last call: at least one if any is under way.

        Args:
          alone: nothing is asked for, nor taken back, before all that is under way has ended. Fewer
            rows may be computed together then, the fewer are left: when that is depends on nothing
            but what they drew, so that all bits can be had again.
        """
        ...

    def cancel(self, prompts: Sequence[int]) -> None:
        """Drops what is under way for these prompts."""
        ...

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        """Takes back all that is under way: requests which go on where they stood when they are
        submitted again, whatever the weights are then. With several processes a collective.

        Args:
          keep_pool: whether rows go on with the keys and values that they have; the engine must
            have its pool again when they are submitted.
        """
        ...

    def take_pool(self) -> Pool[Array]:
        """What stands in the slots, which the engine has no more."""
        ...

    def give_pool(self, pool: Pool[Array]) -> None:
        """Gives back what `take_pool` gave, to an engine that has nothing under way."""
        ...
