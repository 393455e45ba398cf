"""Backend of the engine on one mesh: the devices that decode, the policy on them, and their
functions. `jrl.rollout.decoding.split_backend` has another."""

from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.batch import replicated
from jrl.rollout.decoding.decode import (
    Advanced,
    SamplerState,
    StepLimits,
    UnstackedPolicy,
    advance,
    unstack_policy,
)
from jrl.rollout.decoding.packed_prefill import CacheCopies, Packing, copy_to_cache, run_packed
from jrl.rollout.decoding.prefill import AdmissionArrays, admit, admit_prefilled
from jrl.rollout.decoding.scheduler import ChooseSlot
from jrl.rollout.decoding.slots import (
    Decoder,
    SlotPool,
    TokenRows,
    check_slots,
    make_output_buffer,
    over_slots,
    without_cache,
    write_to_buffer,
)
from jrl.rollout.prompt_scores import PackedScores, score_packed
from jrl.rollout.resharding import rollout_policy
from jrl.rollout.sampling import Sampling
from moe.decoding import Prefilled
from moe.router.statistics import run_with_fallback
from moe.weights import Transformer
from sharding.folding import FoldedMesh


class MeshBackend:
    """One mesh, over the devices of training in the same order or over others.

    Args:
      decoder: compile-time settings; adapters of its network are merged where it decodes.
      training: the mesh that weights come from.

    Attributes:
      decoder: compile-time settings; its mesh is the one of the rows.
      packs_prompts: true if prompts may share rows of a prefill.
      computes_fewer: true if a step may compute fewer slots than all.
      keeps_cache: true if rows may continue with their KV cache when the weights change.
      scores_prompts: true if it has `score`.
      max_prefill_tokens: approximate number of prompt tokens of a rank in one prefill; None where
        the engine's own bounds suffice.
    """

    max_prefill_tokens: int | None = None
    packs_prompts = computes_fewer = keeps_cache = scores_prompts = True

    def __init__(self, decoder: Decoder, training: FoldedMesh):
        self._policy_config, self._training = decoder.config, training
        self.decoder = decoder._replace(config=decoder.config.without_adapters())
        self._weights: Transformer[Array] | None = None
        self._unstacked: UnstackedPolicy[Array] | None = None
        self._rows = NamedSharding(decoder.mesh.mesh, over_slots(decoder.mesh))

    def check(self, slots: int) -> None:
        """Checks that this many slots can decode; raises ValueError otherwise."""
        check_slots(self.decoder.mesh, slots)

    def slot_choice(self, slots: int) -> ChooseSlot | None:
        """Choice of a request's slot on its rank; None takes the one free for longest."""
        return None

    def load(self, weights: Transformer[Array]) -> None:
        """Puts the policy, which is on the mesh of training, on the devices that decode."""
        self.release()  # old and new need not fit in memory together
        mesh = self.decoder.mesh
        self._weights = rollout_policy(weights, self._policy_config, self._training, mesh)
        self._unstacked = unstack_policy(self.decoder, self._weights)

    def release(self) -> None:
        """Frees the memory of the policy."""
        self._weights = self._unstacked = None

    def restart(self) -> bool:
        """Called where no request is in flight: undoes what earlier requests changed, so that
        samples depend on the next ones only. True if the KV cache in the slots would be computed
        otherwise now."""
        return False

    def admit(
        self,
        pool: SlotPool[Array],
        tokens: Array,
        lengths: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        """Admits rows to the pool, which is donated (`prefill.admit`).

        Args:
          sampling, state: static parameters of the samplers, and their arrays.

        Returns:
          The pool, and true if the prefill was repeated with dropless expert buffers.
        """
        weights, arrays = self._loaded()[0], (tokens, lengths, admission, state)
        dropless = self.decoder.for_any_routing()
        return run_with_fallback(
            lambda: admit(self.decoder, sampling, weights, pool, *arrays),
            lambda pool: admit(dropless, sampling, weights, pool, *arrays)[0],
        )

    def admit_packed(
        self,
        pool: SlotPool[Array],
        rows: tuple[Packing[Array], CacheCopies[Array]],
        tokens: Array,
        admission: AdmissionArrays[Array],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], bool]:
        """`admit` of prompts that share rows, where `packs_prompts`.

        Args:
          rows: the packed rows, and the copies of their keys and values to the slots.
          tokens: ``[slot, position]`` ids.
        """
        decoder, (weights, unstacked), (packing, cache_copies) = self.decoder, self._loaded(), rows

        def run(decoder: Decoder) -> tuple[Prefilled, Array | None]:
            prefill = run_packed(decoder, weights, packing)
            return prefill, prefill.overflow

        prefill, repeated = run_with_fallback(
            lambda: run(decoder), lambda _: run(decoder.for_any_routing())[0]
        )
        # The cache is handled separately: `admit_prefilled` would be compiled for each of its
        # lengths.
        cache = copy_to_cache(decoder, pool.cache, prefill.cache, cache_copies)
        pool = without_cache(pool)
        prefill = prefill._replace(cache=pool.cache, overflow=None)
        pool = admit_prefilled(
            decoder, sampling, unstacked.rest, pool, prefill, tokens, admission, state
        )
        return replace(pool, cache=cache), repeated

    def score(
        self, packing: Packing[np.ndarray], needs_top_tokens: bool
    ) -> PackedScores[np.ndarray]:
        """Log-probabilities of the tokens of packed rows, on the host, where `scores_prompts`."""
        decoder, weights = self.decoder, self._loaded()[0]
        top, rows = decoder.top_logprobs if needs_top_tokens else 0, to_devices(packing, self._rows)
        scores, _ = run_with_fallback(
            lambda: score_packed(decoder, top, weights, rows),
            lambda _: score_packed(decoder.for_any_routing(), top, weights, rows)[0],
        )
        return to_host(scores)

    def decode(
        self,
        pool: SlotPool[Array],
        cache_length: int,
        limits: StepLimits[Any],
        sampling: Sampling,
        state: SamplerState,
    ) -> tuple[SlotPool[Array], Advanced]:
        """Decodes all live rows of the pool, which is donated, until the scheduler runs again.

        Args:
          cache_length: positions of the cache that attention reads; all rows must fit into them.
          limits: on the host.
        """
        numbers = np.int32(limits.max_steps), np.int32(limits.min_live)
        max_steps, min_live = to_devices(numbers, replicated(self.decoder.mesh))
        return advance(
            self.decoder,
            sampling,
            cache_length,
            self._loaded()[1],
            pool,
            state,
            StepLimits(max_steps, min_live, to_devices(limits.slots, self._rows)),
        )

    def output_buffer(self, rows: TokenRows[Array], size: int) -> TokenRows[Array]:
        """Empty output buffer for `size` rows such as these."""
        return make_output_buffer(rows, size, self._rows)

    def write_to_buffer(
        self, buffer: TokenRows[Array], rows: TokenRows[Array], destinations: np.ndarray
    ) -> TokenRows[Array]:
        """Copies the row of each slot to its destination in the output buffer, which is donated;
        destinations are unique, and past the end drops a row."""
        return write_to_buffer(buffer, rows, to_devices(destinations, self._rows), self._rows)

    def to_host(self, tree: Any) -> Any:
        """Copies arrays of the rows' mesh to the host, in all processes."""
        return to_host(tree)

    def _loaded(self) -> tuple[Transformer[Array], UnstackedPolicy[Array]]:
        assert self._weights is not None and self._unstacked is not None, "no weights were loaded"
        return self._weights, self._unstacked
