"""Held-out splits and random generators by stable hashes, in place of `hash()`.

Python's own hash of a string differs between processes. These depend on the text alone, so that a
prompt is on the same side of the split in every run, on every machine and for every seed.
"""

import hashlib
import random
from dataclasses import dataclass

# One prompt in ten is held out.
HELDOUT_SHARE = 0.1


def _digest(text: str, purpose: bytes) -> int:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big")


def position(prompt: str) -> float:
    """Position of a prompt in [0, 1): prompts are spread uniformly, whatever their content."""
    return _digest(prompt, b"jrl split") / 2**64


def is_heldout(prompt: str, share: float = HELDOUT_SHARE) -> bool:
    """True if the prompt belongs to the held-out split, a share of all prompts."""
    return position(prompt) < share


def generator(*names: str | int) -> random.Random:
    """A random generator that depends on the given names alone.

    Args:
      names: identify this stream among all others, for instance task, seed, part and index.
    """
    return random.Random(_digest("\0".join(map(str, names)), b"jrl stream"))


@dataclass(frozen=True)
class HeldOut:
    """Held-out prompts: a share of all, for example 0.1, a number, or the prompts of a file.

    Attributes:
      share: of the prompts, in (0, 1]; 1 holds out a whole list and leaves nothing to train on.
      count: number of prompts.
      path: path of a file or folder with the held-out prompts; those that are also training prompts
        are left out of training.
    """

    share: float = HELDOUT_SHARE
    count: int | None = None
    path: str | None = None

    @property
    def everything(self) -> bool:
        """True if all prompts of a list are held out, to evaluate on."""
        return self.share == 1 and self.count is None and self.path is None

    @property
    def generated_share(self) -> float:
        """Held-out share of generated prompts; never all of them, as they are generated
        endlessly."""
        return HELDOUT_SHARE if self.everything else self.share

    def check_no_file(self, task: str, makes: str) -> None:
        """Rejects a file for a task that `makes` its own prompts."""
        if self.path is not None:
            raise ValueError(
                f"held_out={self.path} is for a list of prompts, and task={task} {makes} its "
                "prompts: give a share or a number"
            )


def parse_heldout(text: str | None) -> HeldOut:
    """Parses a choice, for example ``0.05``, ``200``, ``1.0`` or ``test.jsonl``; None is one prompt
    in ten, and 1.0 all of them.

    Raises:
      ValueError: for a share that holds nothing out, or a count below 1.
    """
    if text is None:
        return HeldOut()
    try:
        number = float(text)
    except ValueError:
        return HeldOut(path=text)
    if text.isdecimal() and number >= 1:
        return HeldOut(count=int(text))
    if 0 < number <= 1:
        return HeldOut(share=number)
    raise ValueError(
        f"held_out={text} must be a share between 0 and 1, a number of prompts from 1, or the path "
        "of a file of prompts."
    )


def check_trains(held_out: str | None) -> None:
    """Rejects a choice of held-out prompts that leaves none to train on.

    Raises:
      ValueError: for a share of all.
    """
    if parse_heldout(held_out).everything:
        raise ValueError(
            f"held_out={held_out} leaves nothing to train on, and is for jrl.evaluate: give a "
            "share below 1, a number of prompts, or a file of others."
        )
