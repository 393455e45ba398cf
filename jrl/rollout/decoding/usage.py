"""How much of an engine's room was used."""

from dataclasses import dataclass, replace


@dataclass
class Usage:
    """What decoding did.

    Attributes:
      slot_steps: tokens that there was room for: slots times steps.
      row_steps: tokens that were sampled.
      prefilled: tokens of prompts, and of responses gone on with, that were run.
    """

    slot_steps: int = 0
    row_steps: int = 0
    prefilled: int = 0

    def copy(self) -> "Usage":
        """It as it stands, which goes on changing in an engine."""
        return replace(self)

    def since(self, before: "Usage") -> "Usage":
        """What was done after `before`."""
        return Usage(
            self.slot_steps - before.slot_steps,
            self.row_steps - before.row_steps,
            self.prefilled - before.prefilled,
        )

    @property
    def utilisation(self) -> float:
        """The share of the room that was used; 1 where there was none."""
        return self.row_steps / self.slot_steps if self.slot_steps else 1.0
