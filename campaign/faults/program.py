"""Training program of a campaign's run: `jrl.train`, which announces its phases and takes orders.

    python -m campaign.faults.program FLAGS...

Announcements are lines of the pipe `CAMPAIGN_EVENTS`: the monotonic time, the phase and the step.
An order is a line of standard input: `clock SECONDS` moves this process's clock.
"""

import contextlib
import os
import sys
import threading
import time

MODEL = "smallest"
"""Preset of this program, most of whose time is that of tracing it."""
SIZES = {"num_layers": 1, "d_model": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
SIZES |= {"num_experts": 0, "d_ff": 8}
EVENTS = "CAMPAIGN_EVENTS"
"""Variable with the number of the pipe for announcements."""
BEGUN, ENDED, STEP, SAVING, SAVED = "begun", "ended", "step", "saving", "saved"
"""Announcements beside the phases of `jrl.processes.progress`."""


class Clock:
    """Clock of this process as Python sees it, which can be moved; the monotonic one stays."""

    def __init__(self):
        self.shift = 0
        self._seconds, self._nanoseconds = time.time, time.time_ns

    def time(self) -> float:
        return self._seconds() + self.shift

    def time_ns(self) -> int:
        return self._nanoseconds() + self.shift * 10**9

    def install(self) -> None:
        time.time, time.time_ns = self.time, self.time_ns


def announce(phase: str, step: int = 0) -> None:
    with contextlib.suppress(OSError):  # of a campaign that has ended
        os.write(int(os.environ[EVENTS]), f"{time.monotonic():.4f}\t{phase}\t{step}\n".encode())


def obey(clock: Clock) -> None:
    """Carries out orders until there are no more."""
    for line in sys.stdin:
        order, argument = line.split()
        assert order == "clock"
        clock.shift += int(argument)


def observe() -> None:
    """Announces each phase, each step and each save in flight."""
    from jrl.processes.progress import Progress
    from jrl.runs.storage import BackgroundSave

    phase, begin_step, save = Progress.phase, Progress.begin_step, BackgroundSave._run

    def phase_announced(self, name):
        announce(name, self._step)
        return phase(self, name)

    def step_announced(self, step):
        announce(STEP, step)
        begin_step(self, step)

    def save_announced(self, complete):
        announce(SAVING)
        save(self, complete)
        announce(SAVED)

    Progress.phase, Progress.begin_step = phase_announced, step_announced
    BackgroundSave._run = save_announced


def main() -> int:
    announce(BEGUN)
    clock = Clock()
    clock.install()
    threading.Thread(target=obey, args=(clock,), daemon=True).start()
    from compiling import trace_quickly

    from jrl import train
    from jrl.report import plots
    from moe.config import PRESETS, ModelConfig

    trace_quickly()
    PRESETS[MODEL] = lambda vocab_size: ModelConfig(vocab_size, **SIZES)
    plots.plot_run = lambda *arguments, **options: []  # most of the time of so small a run
    observe()
    status = train.main()
    if status == 0:
        announce(ENDED)
    return status


if __name__ == "__main__":
    sys.exit(main())
