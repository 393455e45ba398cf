"""Wall time and memory of a run, as metrics of each step."""

import os
import time
from pathlib import Path

import jax

from jrl.processes.agreement import is_main_process
from jrl.runs.records import read_metrics

MINUTES, PROCESS_MEMORY = "perf/run_minutes", "perf/process_memory_gb"
DEVICE_MEMORY = "perf/max_memory_allocated_gb"
TOKENIZER, TOKEN_BYTES = "tokenizer", 900
"""Row of a checkpoint's tokenizer in the process, and its bytes for each token: entries of a Python
dict and of the pipeline's own table, 0.8 kB of SmolLM2's 49,152 and 0.9 kB of Gemma's 262,144."""
PROCESS, PROCESS_BYTES = "programs and libraries", 850 << 20
"""Row of a process on a CPU beside its arrays (Python, JAX, the compiler and its programs), and its
bytes, which its devices share."""


class Resources:
    """Metrics of the wall time and the memory of this process since a run began or resumed."""

    def __init__(self):
        self._started, self._minutes_before = time.perf_counter(), 0.0

    def resume(self, metrics_path: Path) -> None:
        """Continues the minutes after the last line of a run that is resumed."""
        lines = read_metrics(metrics_path) if is_main_process() else []
        self._minutes_before = float(lines[-1].get(MINUTES, 0.0)) if lines else 0.0

    def metrics(self) -> dict[str, float]:
        """Minutes of the run, resident memory, and the largest peak of this process's devices."""
        minutes = self._minutes_before + (time.perf_counter() - self._started) / 60.0
        metrics = {MINUTES: minutes}
        if (resident := resident_memory()) is not None:
            metrics[PROCESS_MEMORY] = resident / 2**30
        statistics = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [each["peak_bytes_in_use"] for each in statistics if "peak_bytes_in_use" in each]
        return metrics | ({DEVICE_MEMORY: max(peaks) / 2**30} if peaks else {})  # a CPU has none


def resident_memory(proc: Path = Path("/proc")) -> int | None:
    """Bytes of this process that are in memory; None if the system does not say."""
    try:
        return int((proc / "self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def process_memory(num_devices: int, num_tokens: int) -> dict[str, int]:
    """Predicted bytes of a process on a CPU beside its arrays, by kind, for each of its devices.

    Args:
      num_tokens: of a checkpoint's tokenizer; 0 if the run has its own.
    """
    sizes = {PROCESS: PROCESS_BYTES, TOKENIZER: TOKEN_BYTES * num_tokens}
    return {name: size // max(num_devices, 1) for name, size in sizes.items() if size}
