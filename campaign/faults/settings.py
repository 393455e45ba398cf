"""Run under test: as small as a run can be, with prompts in a file and rewards in a worker."""

import json
from dataclasses import dataclass
from pathlib import Path

from campaign.faults.program import MODEL

STEPS = 30
SETTINGS = {
    "model": MODEL,
    "steps": STEPS,
    "warm-start-steps": 0,
    # As many rows as a step shows: samples.jsonl has all prompts that were trained on.
    "prompts": 2,
    "group-size": 2,
    "mini-batch": 4,
    "response-length": 4,
    "eval-prompts": 2,
    "eval-every": 4,
    "samples-every": 1,
    "checkpoint-every": 2,
    "verifiers": 1,
    "coordinator-timeout": 60,
}
LAYOUTS = {1: "dp1", 2: "dp2", 4: "dp4"}
"""Layout of the devices, of which each process has one."""
ROWS = SETTINGS["prompts"] * SETTINGS["group-size"]
PROMPTS = 40
REWARD = """
import time

def variety(prompt, completion, answer):
    time.sleep(0.01)  # so that there is a moment in which it is at work
    digits = sum(map(str.isdigit, completion))
    return len(set(completion)) + 0.1 * digits + (completion == answer)
"""


@dataclass(frozen=True)
class Inputs:
    """Files that a run reads, in a folder of their own.

    Attributes:
      prompts: JSONL, a prompt and an answer in each line.
      reward: Python.
    """

    prompts: Path
    reward: Path


def write_inputs(folder: Path) -> Inputs:
    """Writes the files of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = Inputs(folder / "prompts.jsonl", folder / "reward.py")
    pairs = [(number * 7 % 31, number) for number in range(PROMPTS)]
    lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    inputs.prompts.write_text("\n".join(lines) + "\n")
    inputs.reward.write_text(REWARD)
    return inputs


def flags(processes: int, inputs: Inputs, run: Path, deadline: int) -> list[str]:
    """Flags of all processes of a run, which begins or goes on."""
    return [
        *(f"--{name}={value}" for name, value in SETTINGS.items()),
        f"--task=jsonl:{inputs.prompts}",
        f"--reward={inputs.reward}:variety",
        f"--devices={processes}",
        f"--layout={LAYOUTS[processes]}",
        f"--hang-deadline={deadline}",
        f"--run-dir={run}",
        "--resume-if-exists",
    ]
