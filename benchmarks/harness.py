"""Compares lm-eval through ``jrl.serve`` with lm-eval's own back end for `transformers`.

Two tasks of local files, which this writes: multiple choice (the log-likelihoods of four answers to
a question) and generation (greedy, to the end of a line). The harness asks the server for the
first by ``echo`` with log-probabilities, and for the second by completions. The peer is the
environment of `lm_eval`: pip install "torch==2.13.0" "lm-eval[hf,api]".

    python -m benchmarks.harness path/to/checkpoint --peer path/to/peer/bin/lm_eval

The command fails if a metric or a generated text differs, or a log-likelihood by more than 1e-3.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serve import free_port, running

LENGTH, TOLERANCE = 512, 1e-3
CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Peru": "Lima"},
    **{"Germany": "Berlin", "Egypt": "Cairo", "Canada": "Ottawa", "Russia": "Moscow"},
    **{"Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw"},
    **{"Kenya": "Nairobi", "Cuba": "Havana", "Norway": "Oslo"},
}
"""Countries of the questions."""
TASK = "dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
CHOICE = r"""task: capitals
output_type: multiple_choice
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATION = r"""task: sums
output_type: generate_until
doc_to_text: "1 plus 2 equals 3.\n4 plus 5 equals 9.\n{{question}}"
doc_to_target: answer
generation_kwargs: {until: [".", "\n"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, regexes_to_ignore: ["[^0-9]"], aggregation: mean, higher_is_better: true}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares lm-eval through the server")
    parser.add_argument("model", type=Path, help="folder of a published checkpoint")
    parser.add_argument("--peer", type=Path, required=True, help="path of the command lm_eval")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of the server")
    parser.add_argument("--sums", type=int, default=12, help="questions of the generation task")
    arguments = parser.parse_args()
    model, port = arguments.model.resolve(), free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, arguments.sums)
        command = [sys.executable, "-m", "jrl.serve", str(model), f"--port={port}", "--name=served"]
        command += [f"--length={LENGTH}", "--slots=8", "--no-warm-up"]
        address = f"base_url=http://127.0.0.1:{port}/v1/completions,num_concurrent=4"
        ours = f"model=served,{address},tokenizer={model},tokenizer_backend=huggingface"
        with running(command, port, arguments.threads, folder / "log"):
            served = evaluate(
                arguments.peer, "local-completions", f"{ours},max_length={LENGTH}", folder
            )
        peers = evaluate(arguments.peer, "hf", f"pretrained={model},dtype=float32", folder)
    sys.exit(compare(served, peers))


def write_tasks(folder: Path, sums: int) -> None:
    """Writes the two tasks and their data."""
    draw, names = random.Random(0), list(CAPITALS.values())
    questions = []
    for country, capital in CAPITALS.items():
        choices = [*draw.sample([name for name in names if name != capital], 3), capital]
        draw.shuffle(choices)
        question = f"What is the capital of {country}?"
        label = choices.index(capital)
        questions.append({"question": question, "choices": choices, "label": label})
    pairs = [(draw.randrange(2, 20), draw.randrange(2, 20)) for _ in range(sums)]
    sums_asked = [{"question": f"{a} plus {b} equals", "answer": str(a + b)} for a, b in pairs]
    for name, task, records in (("capitals", CHOICE, questions), ("sums", GENERATION, sums_asked)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / f"{name}.yaml").write_text(task + TASK.format(data=data))


def evaluate(peer: Path, back_end: str, stated: str, folder: Path) -> dict[str, Any]:
    """Metrics and samples of both tasks, by name."""
    out = folder / back_end
    given = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    given |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    command = [str(peer), "run", "--model", back_end, "--model_args", stated, "--device", "cpu"]
    command += ["--tasks", "capitals,sums", "--include_path", str(folder)]
    command += ["--log_samples", "--output_path", str(out)]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"lm_eval with {back_end} failed:\n{done.stderr[-4000:]}")
    (path,) = out.rglob("results_*.json")
    found: dict[str, Any] = {"metrics": json.loads(path.read_text())["results"]}
    for task in ("capitals", "sums"):
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[task] = [sample["resps"] for sample in sorted(samples, key=lambda x: x["doc_id"])]
    return found


def compare(served: dict[str, Any], peers: dict[str, Any]) -> int:
    """Prints both, and returns the exit status."""
    print(f"{'task':10}{'metric':14}{'jrl.serve':>12}{'lm-eval hf':>12}")
    equal = True
    for task, metrics in peers["metrics"].items():
        for name, theirs in metrics.items():
            if not isinstance(theirs, float) or "stderr" in name:
                continue
            ours = served["metrics"][task][name]
            equal &= ours == theirs
            print(f"{task:10}{name.split(',')[0]:14}{ours:>12.4f}{theirs:>12.4f}")
    pairs = [
        (ours[0], theirs[0])
        for ours_of, theirs_of in zip(served["capitals"], peers["capitals"], strict=True)
        for ours, theirs in zip(ours_of, theirs_of, strict=True)
    ]
    largest = max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs)
    greedy = sum(ours[1] == theirs[1] for ours, theirs in pairs)
    texts = sum(a == b for a, b in zip(served["sums"], peers["sums"], strict=True))
    print(
        f"{len(pairs)} log-likelihoods: largest difference {largest:.1e}, {greedy} equally greedy"
    )
    print(f"{len(served['sums'])} generated texts: {texts} equal")
    equal &= largest < TOLERANCE and greedy == len(pairs) and texts == len(served["sums"])
    print("equal" if equal else "NOT equal")
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
