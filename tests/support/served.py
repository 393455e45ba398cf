"""Small checkpoints that can be served, and servers of them in processes of their own."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from chat_checkpoint import VOCAB_SIZE, write_tokenizer
from compiling import FLAGS
from programs import random_weights

from moe import huggingface
from moe.config import ModelConfig

ROOT = Path(__file__).parents[2]
NETWORK = ModelConfig(
    VOCAB_SIZE,
    num_layers=1,
    d_model=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    query_key_norm="head",
    num_experts=0,
    d_ff=10,
    embedding_scale=1.0,
    max_positions=64,
)


MIXTURE = replace(NETWORK, num_experts=4, experts_per_token=2, d_expert=6, d_ff=0)


def write_checkpoint(
    folder: Path, seed: int = 0, network: ModelConfig = NETWORK, **stated: Any
) -> Path:
    """A network of one layer with a chat template; `stated` is for `write_tokenizer`."""
    kind = "Moe" if network.num_experts else ""
    huggingface.save(
        folder,
        network,
        jax.device_put(random_weights(network, seed)),
        architecture=f"Qwen3{kind}ForCausalLM",
    )
    write_tokenizer(folder, **stated)
    return folder


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def end(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        """Asks it to end, and gives its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


PROGRAM = "import sys, command_runs; from jrl.serve import main; sys.exit(main(sys.argv[1:]))"
"""The command, with the presets of the tests."""
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))\n"


@contextmanager
def serving(place: str, log: Path, *flags: str, files: int | None = None) -> Iterator[Server]:
    """A server of a run or ``hf:DIR`` on a free port, from when it serves on; with `files` as the
    limit of open files, if given."""
    limited = "" if files is None else LIMITED.format(files)
    command = [sys.executable, "-c", limited + PROGRAM, place, "--port=0", "--devices=1", *flags]
    result = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    inputs = {**os.environ, "XLA_FLAGS": " ".join(FLAGS), "PYTHONPATH": os.pathsep.join(result)}
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=inputs, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        result = re.search(r"on (http://\S+)/v1", line)
        assert result, line + log.read_text()
        yield Server(process, result[1], log)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def numbers(text: str) -> dict[str, float]:
    """Prometheus' lines by name and labels."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}
