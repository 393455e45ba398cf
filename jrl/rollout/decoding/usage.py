"""How much of an engine's room was used."""

from dataclasses import astuple, dataclass, replace


@dataclass
class Usage:
    """What decoding did.

    Attributes:
      steps: of decoding; each gives every live row a token.
      slot_steps: tokens that were computed: steps times the slots in each.
      row_steps: tokens that were sampled in them.
      admitted: rows that came into slots; each got a token then, without a step.
      prefilled: tokens of prompts, and of responses gone on with, that were run.
      repeated: admissions that ran once more, as there was no room for all that the routers chose
        (`Execution.buffer_factor`).
    """

    steps: int = 0
    slot_steps: int = 0
    row_steps: int = 0
    admitted: int = 0
    prefilled: int = 0
    repeated: int = 0

    def copy(self) -> "Usage":
        """It as it stands, which goes on changing in an engine."""
        return replace(self)

    def since(self, before: "Usage") -> "Usage":
        """What was done after `before`."""
        return Usage(
            *(now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        )

    @property
    def utilisation(self) -> float:
        """The share of the room that was used; 1 where there was none."""
        return self.row_steps / self.slot_steps if self.slot_steps else 1.0

    def metrics(self) -> dict[str, float]:
        """As they are logged; tokens of groups that were dropped are among those sampled."""
        return {
            "perf/slot_utilisation": self.utilisation,
            "perf/decode_steps": float(self.steps),
            "perf/sampled_tokens": float(self.row_steps + self.admitted),
            "perf/prefill_repeated": float(self.repeated),
        }
