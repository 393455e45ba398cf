"""Counters of a rollout engine: steps, tokens and the utilisation of its slots."""

from dataclasses import astuple, dataclass, replace
from operator import sub


@dataclass
class Usage:
    """Counters of decoding.

    Attributes:
      steps: of decoding; each gives every live row a token.
      slot_steps: tokens that were computed: steps times the slots in each.
      row_steps: tokens that were sampled in them.
      admitted: rows admitted to slots; each got a token then, without a step.
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
        """Differences of the counters to those of `before`."""
        return Usage(*map(sub, astuple(self), astuple(before)))

    @property
    def utilisation(self) -> float:
        """Fraction of computed tokens that were sampled; 1 where there were none."""
        return self.row_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """Metrics for the log; sampled tokens include those of dropped groups."""
        return {
            "perf/slot_utilisation": self.utilisation,
            "perf/decode_steps": float(self.steps),
            "perf/sampled_tokens": float(self.row_steps + self.admitted),
            "perf/prefill_repeated": float(self.repeated),
        }
