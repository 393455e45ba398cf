"""Predicted memory of a process on a CPU beside its arrays."""

from jrl.rollout.device_memory import local_devices
from jrl.trainer.setup.setup import Setup

TOKENIZER, TOKEN_BYTES = "tokenizer", 900
"""Row of a checkpoint's tokenizer in the process, and its bytes for each token: entries of a Python
dict and of the pipeline's own table, 0.8 kB of SmolLM2's 49,152 and 0.9 kB of Gemma's 262,144."""
PROCESS, PROCESS_BYTES = "programs and libraries", 850 << 20
"""Row of a process on a CPU beside its arrays (Python, JAX, the compiler and its programs), and its
bytes, which its devices share."""


def process_memory(setup: Setup) -> dict[str, int]:
    """Bytes by kind, for each device of the process."""
    num_devices = max(len(local_devices(setup.mesh)), 1)
    rows = {PROCESS: PROCESS_BYTES // num_devices}
    if setup.run.checkpoint is not None and setup.run.tokenizer is None:
        rows[TOKENIZER] = TOKEN_BYTES * setup.tokenizer.vocab_size // num_devices
    return rows
