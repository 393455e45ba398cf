"""Engines answer requests with trajectories; which one does it is nobody else's concern."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import to_devices, to_host
from jrl.rollout.batching import over_rows, replicated
from jrl.rollout.generate import Decoder, generate
from jrl.rollout.requests import Request, Trajectory
from jrl.rollout.resharding import RolloutPolicy
from jrl.rollout.sampling import Sampling
from jrl.text.prompts import left_padded
from moe.config import ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@runtime_checkable
class RolloutEngine(Protocol):
    """Weights and requests in, trajectories out."""

    @property
    def mesh(self) -> FoldedMesh:
        """Where it samples."""
        ...

    def load(self, weights: Transformer[Array], version: int) -> None:
        """The policy to sample with from here on.

        Args:
          weights: on the mesh of training.
          version: that the trajectories will carry.
        """
        ...

    def release(self) -> None:
        """Gives up the memory that is not needed between rollouts."""
        ...

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        key: Array,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        """Asks for responses.

        Args:
          sampling: how their tokens are drawn.
          key: their randomness.
          entropy: for a temperature that adapts (`jrl.rollout.sampling.draw`), on the mesh of
            training; None samples at the base temperature.

        Raises:
          ValueError: for requests that this engine cannot serve.
        """
        ...

    def poll(self) -> list[Trajectory]:
        """What has come of the requests since the last call; waits where something is under way."""
        ...

    def pending(self) -> Any:
        """What is under way, as a pytree that a checkpoint can hold."""
        ...

    def restore(self, pending: Any) -> None:
        """Goes on with what `pending` gave."""
        ...


class BatchEngine:
    """Decodes requests as they are submitted, in one batch that waits for its longest row.

    Prompts are left-padded to one width. A row's randomness is of the key and of its place in the
    submission, in which all samples of a prompt stand together and are as many for each.

    Args:
      config: the policy network.
      training: the mesh that weights come from.
      rollout: the mesh that decodes, over the same devices in the same order.
      prompt_length: tokens that prompts are padded to.
      pad_id: fills what is not a token.
      stop_ids: each of them ends a response.
    """

    def __init__(
        self,
        config: ModelConfig,
        training: FoldedMesh,
        rollout: FoldedMesh,
        *,
        prompt_length: int,
        pad_id: int,
        stop_ids: tuple[int, ...],
    ):
        self.config, self.mesh, self.prompt_length = config, rollout, prompt_length
        self._pad_id, self._stop_ids = pad_id, stop_ids
        self._resharding = RolloutPolicy(config, training, rollout)
        self._weights: Transformer[Array] | None = None
        self._version = 0
        self._under_way: list[tuple[list[Request], int, Any]] = []

    def load(self, weights: Transformer[Array], version: int) -> None:
        self._weights, self._version = weights, version

    def release(self) -> None:
        self._resharding.release()
        self._weights = None

    def submit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        key: Array,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        assert self._weights is not None, "no weights were loaded"
        prompts = [list(samples) for _, samples in groupby(requests, lambda r: r.prompt)]
        num_samples, limit = len(prompts[0]), requests[0].max_new_tokens
        if any(len(samples) != num_samples for samples in prompts):
            raise ValueError("requests of one batch must ask for as many samples of each prompt.")
        if any(request.max_new_tokens != limit for request in requests):
            raise ValueError("requests of one batch must have the same max_new_tokens.")
        first = [samples[0].tokens.tolist() for samples in prompts]
        tokens, valid = left_padded(first, self.prompt_length, self._pad_id)
        tokens, valid = to_devices((tokens, valid), over_rows(self.mesh))
        # Moved once per policy, however many batches it samples.
        policy = self._resharding.of(self._weights)
        decoder = self.decoder(sampling, num_samples, limit)
        # Four numbers, on the mesh that samples.
        entropy = to_devices(to_host(entropy), replicated(self.mesh))
        batch = generate(decoder, policy, tokens, valid, key, entropy)
        # Dispatched, not waited for: `poll` does that when it reads the tokens.
        self._under_way.append((list(requests), self._version, batch))

    def decoder(self, sampling: Sampling, num_samples: int, max_new_tokens: int) -> Decoder:
        """What the decoding program is compiled for."""
        return Decoder(
            config=self.config,
            mesh=self.mesh,
            prompt_length=self.prompt_length,
            response_length=max_new_tokens,
            num_samples=num_samples,
            pad_id=self._pad_id,
            stop_ids=self._stop_ids,
            sampling=sampling,
        )

    def poll(self) -> list[Trajectory]:
        under_way, self._under_way = self._under_way, []
        done: list[Trajectory] = []
        for requests, version, batch in under_way:
            # Texts are made of tokens; what the losses need stays where it is.
            tokens, mask, truncated = to_host((batch.tokens, batch.mask, batch.truncated))
            done += [
                Trajectory(
                    request,
                    tokens[row][mask[row]],
                    version,
                    "length" if truncated[row] else "stop",
                    batch,
                    row,
                )
                for row, request in enumerate(requests)
            ]
        return done

    def pending(self) -> tuple[()]:
        """Nothing: between two calls of `poll` no response is half done."""
        assert not self._under_way, "responses were not polled"
        return ()

    def restore(self, pending: tuple[()]) -> None:
        self._under_way = []


def ranks(mesh: FoldedMesh) -> int:
    """Ranks that share the rows to decode, which must divide over them."""
    return mesh.size((*mesh.dp, *mesh.tp))
