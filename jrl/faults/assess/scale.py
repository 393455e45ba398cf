"""Cost of a detector call by fleet size: wall clock, CPU time, memory."""

import json
import resource
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jrl.faults.collect.fleet import Fleet
from jrl.faults.simulate import Settings, simulate
from jrl.faults.standard import StandardDetector

SIZES = (4, 16, 64, 256, 750, 1500)
SEED = 3_000_000


def measure_scale(out: Path, sizes: tuple[int, ...] = SIZES, rounds: int = 3) -> int:
    """Prints, writes and plots the least cost of `rounds` calls of the default detector."""
    rows = []
    for size in sizes:
        row: dict[str, float] = {"machines": size}
        for kind, faulty in (("clean", False), ("fault", True)):
            fleet = simulate(Settings(machines=size, faulty=faulty), SEED + size).fleet
            row[f"{kind}_seconds"], row[f"{kind}_cpu_seconds"] = _cost(fleet, rounds)
        row["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(row)
    (out / "scale.json").write_text(json.dumps(rows, indent=2) + "\n")
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("machines", "clean, s", "CPU s", "fault, s", "CPU s", "peak memory, MiB"):
        table.add_column(name, justify="right")
    for row in rows:
        machines, *costs, memory = row.values()
        table.add_row(str(machines), *(f"{cost:.3f}" for cost in costs), f"{memory:.0f}")
    Console(width=110).print(table)
    from jrl.faults.plots import plot_scale

    plot_scale(rows, out / "scale.png")
    return 0


def _cost(fleet: Fleet, rounds: int) -> tuple[float, float]:
    detector = StandardDetector()
    detector(fleet)
    wall, cpu = [], []
    for _ in range(rounds):
        begin = time.perf_counter(), time.process_time()
        detector(fleet)
        wall.append(time.perf_counter() - begin[0])
        cpu.append(time.process_time() - begin[1])
    return min(wall), min(cpu)
