"""Which prompts are held out, and where randomness comes from: stable hashes in place of `hash()`.

Python's own hash of a string differs between processes. These depend on the text alone, so that a
prompt is on the same side of the split in every run, on every machine and for every seed.
"""

import hashlib
import random

# One prompt in ten is held out.
HELDOUT_SHARE = 0.1


def _digest(text: str, purpose: bytes) -> int:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big")


def position(prompt: str) -> float:
    """Where the prompt falls in [0, 1); prompts are spread evenly, and apart from their content."""
    return _digest(prompt, b"jrl split") / 2**64


def is_heldout(prompt: str) -> bool:
    """Whether the prompt belongs to the held-out part."""
    return position(prompt) < HELDOUT_SHARE


def generator(*names: str | int) -> random.Random:
    """A random generator that depends on the given names alone.

    Args:
      names: what tells this stream from every other one, for instance task, seed, part and index.
    """
    return random.Random(_digest("\0".join(map(str, names)), b"jrl stream"))
