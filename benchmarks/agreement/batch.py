"""The arrays that all libraries are given, and what is compared on them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

ROWS, TIME, VOCAB = 12, 37, 11
# Relative tolerances in float64: of equal formulas, where the library adds 1e-8 to a count that it
# divides by, and where it computes a part in float32.
EXACT, COUNT_PLUS_EPSILON, PARTLY_FLOAT32 = 1e-10, 1e-7, 1e-6


@dataclass(frozen=True)
class Batch:
    """Twelve responses to four prompts, most with holes in their mask.

    Attributes:
      logprobs: of the current policy, [rows, time]; the gradients are taken by them.
      old_logprobs, behaviour_logprobs: of other policies.
      ref_logprobs: of the reference; some are far away, beyond every clamp.
      advantages: one per token.
      row_advantages: one per response, [rows]; one of them is 0.
      rewards: one per token, on true tokens only.
      scores, greedy_scores: one per response.
      components: two scores per response, [rows, 2].
      values, old_values, returns: of the critic.
      entropy: of the policy at each token, positive.
      sum_squared_probs: of the policy at each token.
      importance_weights: trainer over sampler, positive.
      logits: [rows, time, vocab].
      mask: true on sampled tokens.
      groups: the prompt of each response.
    """

    logprobs: Any
    old_logprobs: Any
    ref_logprobs: Any
    behaviour_logprobs: Any
    advantages: Any
    row_advantages: Any
    rewards: Any
    scores: Any
    greedy_scores: Any
    components: Any
    values: Any
    old_values: Any
    returns: Any
    entropy: Any
    sum_squared_probs: Any
    importance_weights: Any
    logits: Any
    mask: Any
    groups: Any

    def map(self, change: Callable[[np.ndarray], Any]) -> "Batch":
        """The same batch in another kind of array."""
        return Batch(**{field.name: change(getattr(self, field.name)) for field in fields(self)})


def draw(seed: int, dtype: type, degenerate: bool = False) -> Batch:
    """A batch of numpy arrays. Ratios reach far over every bound.

    Args:
      seed: what is drawn.
      dtype: of the floats.
      degenerate: one response is without a true token, one prompt has a single response, and one
        prompt has equal scores.
    """
    generator = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return generator.normal(0, scale, shape).astype(dtype)

    lengths = generator.integers(TIME // 3, TIME + 1, ROWS)
    lengths[0] = TIME
    mask = np.arange(TIME) < lengths[:, None]
    mask[1:, 1:] &= generator.random((ROWS - 1, TIME - 1)) > 0.2
    groups, scores = np.repeat(np.arange(ROWS // 3), 3), normal(ROWS)
    if degenerate:
        mask[4] = False
        groups[1:3] = 1
        scores[groups == 2] = 0.75
    logprobs = -np.abs(normal(ROWS, TIME)) - dtype(0.05)
    # Below 0, as log-probabilities are, also where the drawn step leads above.
    old, reference, sampler = (
        np.minimum(logprobs + normal(ROWS, TIME, scale=scale), dtype(-0.01))
        for scale in (0.4, 0.3, 0.05)
    )
    reference[::2] -= np.abs(normal(ROWS // 2, TIME, scale=10.0))
    reference[1::2] += np.abs(normal(ROWS // 2, TIME, scale=3.0))
    row_advantages = normal(ROWS)
    row_advantages[3] = 0
    return Batch(
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=reference,
        behaviour_logprobs=sampler,
        advantages=normal(ROWS, TIME),
        row_advantages=row_advantages,
        rewards=normal(ROWS, TIME) * mask,
        scores=scores,
        greedy_scores=normal(ROWS),
        components=normal(ROWS, 2),
        values=normal(ROWS, TIME),
        old_values=normal(ROWS, TIME),
        returns=normal(ROWS, TIME),
        # In numbers that float32 has: TRL takes their quantile in it.
        entropy=np.abs(normal(ROWS, TIME)).astype(np.float32).astype(dtype),
        sum_squared_probs=generator.uniform(0.2, 0.9, (ROWS, TIME)).astype(dtype),
        importance_weights=np.exp(normal(ROWS, TIME, scale=0.3)),
        logits=normal(ROWS, TIME, VOCAB, scale=2.0),
        mask=mask,
        groups=groups,
    )


@dataclass(frozen=True)
class Comparison:
    """One function here and there.

    Attributes:
      function: our name.
      theirs_name: their name, and what is set.
      ours, theirs: from a batch of that library's arrays to an array.
      by: the array of the batch by which the sum of the result is differentiated; None where the
        function has no gradient.
      degenerate: whether such batches are compared too, see `draw`. False where the two differ on
        them and no setting says otherwise.
      tolerance: how far float64 may be apart, relatively; float32 may be 1e-4 apart.
    """

    function: str
    theirs_name: str
    ours: Callable[[Batch], Any]
    theirs: Callable[[Batch], Any]
    by: str | None = None
    degenerate: bool = True
    tolerance: float = EXACT

    def differences(self, dtype: type, seeds: int) -> tuple[float, float | None]:
        """How far values and gradients are apart, relative to the greatest; the worst batch.

        A loss is relative to the sum of ``|x gradient|`` where that is greater.
        """
        batches = [draw(seed, dtype) for seed in range(seeds)]
        if self.degenerate:
            batches += [draw(seed, dtype, degenerate=True) for seed in range(seeds)]
        found = [self._on(batch, dtype) for batch in batches]
        values, gradients = zip(*found, strict=True)
        return max(values), None if self.by is None else max(gradients)

    def _on(self, batch: Batch, dtype: type) -> tuple[float, float | None]:
        here, there = batch.map(jnp.asarray), batch.map(lambda x: _tensor(x, dtype))
        ours, theirs = np.asarray(self.ours(here), float), _array(self.theirs(there))
        if ours.shape != theirs.shape:
            raise ValueError(f"{self.function}: ours has shape {ours.shape}, theirs {theirs.shape}")
        if self.by is None:
            return _relative(ours, theirs), None

        by = self.by
        slope = jax.grad(lambda x: jnp.sum(self.ours(replace(here, **{by: x}))))(getattr(here, by))
        leaf = getattr(there, by).clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.theirs(replace(there, **{by: leaf})).sum(), leaf)
        # The terms of a loss cancel: its digits are those of their sizes, not of what is left.
        size = float((leaf * gradient).abs().sum()) if theirs.ndim == 0 else 0.0
        return _relative(ours, theirs, size), _relative(np.asarray(slope, float), _array(gradient))


def _tensor(x: np.ndarray, dtype: type) -> torch.Tensor:
    """A mask as floats: the libraries multiply by it, and divide by sums of integers in float32."""
    return torch.tensor(x.astype(dtype) if x.dtype == bool else x)


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _relative(ours: np.ndarray, theirs: np.ndarray, size: float = 0.0) -> float:
    return float(np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), size, 1e-30))
