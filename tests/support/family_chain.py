"""The chain of a user with a checkpoint, from its files to files again: all weights learn from
chats, reinforcement of adapters beside them with a reward in Python, evaluation, export."""

import json
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from family_files import write_family

from jrl import export
from jrl.evaluate import main as evaluate
from jrl.rollout.decoding.requests import Trajectory
from jrl.rollout.sampler import Sampler
from jrl.text import json_tokenizer
from jrl.train import main as train

DAY = "2026-11-23"
"""On which templates are written that have a date."""
QUESTION, ANSWER = "Half of 9 litres are used. How many are left?", "4.5 litres"
OTHERS = [
    (f"Is {n} more than 5, or is it less than that?", "more" if n > 5 else "less")
    for n in (2, 8, 3, 4, 7)
]
REWARD = 'def reward(prompt, completion, **record):\n    return float("more" in completion)\n'
NEW_TOKENS = 24
STEPS = 28
Said = tuple[list[int], list[int]]
"""Tokens of a prompt, and of its completion."""


@dataclass(frozen=True)
class Written:
    """Completion of the question by a policy.

    Attributes:
      exported: the policy as a checkpoint.
      prompt, completion: tokens of the question as its template writes it, and those that
        evaluation found likeliest after it.
    """

    exported: Path
    prompt: list[int]
    completion: list[int]


def go_through(name: str, folder: Path) -> dict[str, Written]:
    """The chain of a family in an empty folder: "taught", which supervised learning made of all
    weights, and "adapted", what reinforcement made of that with adapters."""
    _write_data(folder)
    # The order of a file's lines hangs on its name: one without the folder is always the same.
    with chdir(folder), patch.object(json_tokenizer, "today", lambda: DAY):
        write_family(name, Path("model"))
        chats = ["--task=jsonl:chats.jsonl", "--held-out=apart.jsonl", f"--steps={STEPS}"]
        chats += ["--batch=5", "--learning-rate=2e-2", *_sizes("sft")]
        _done(train(["sft", "--model=hf:model", *chats]))
        _done(export.main(["sft", "--to", "taught"]))
        before, after = _reinforced()
        _done(export.main(["grpo", "--to", "adapted", "--merge"]))
    return {
        "taught": Written(folder / "taught", *before),
        "adapted": Written(folder / "adapted", *after),
    }


def _write_data(folder: Path) -> None:
    """Conversations, questions and a reward. All stages ask two questions at a time, as long as
    each other: they share the programs that sample."""
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in [(QUESTION, ANSWER)] * 2 + OTHERS
    ]
    asked = [{"prompt": question} for question, _ in OTHERS[1:]]
    for name, lines in (
        ("chats", chats[:-2]),
        ("apart", chats[-2:]),
        ("asked", asked[:-1]),
        ("questions", [{"prompt": QUESTION}, asked[-1]]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "litres.py").write_text(REWARD)


def _sizes(run: str) -> list[str]:
    rows = [f"--response-length={NEW_TOKENS}", "--eval-prompts=2"]
    return [*rows, "--eval-every=99", "--samples-every=99", f"--run-dir={run}"]


def _reinforced() -> tuple[Said, Said]:
    """Completions of the policy before reinforcement and after it."""
    asked = ["--task=jsonl:asked.jsonl", "--held-out=questions.jsonl", "--reward=litres.py:reward"]
    asked += ["--prompts=2", "--group-size=2", "--mini-batch=4", "--steps=3"]
    asked += ["--learning-rate=3e-2", "--entropy-coef=0.01", "--verifiers=1"]
    asked += ["--sample-tokens=0", "--lora-rank=2", *_sizes("grpo")]
    with _likeliest() as before:
        _done(train(["grpo", "--model=hf:taught", *asked]))
    with _likeliest() as after:
        _done(evaluate(["grpo", "--k=1"]))
    return _said(before), _said(after)


def _said(found: list[tuple[str, Trajectory]]) -> Said:
    """The first answer to the question."""
    trajectory = next(each for prompt, each in found if prompt == QUESTION)
    return trajectory.request.tokens.tolist(), trajectory.response.tolist()


@contextmanager
def _likeliest() -> Iterator[list[tuple[str, Trajectory]]]:
    """Greedy completions with their prompts."""
    result: list[tuple[str, Trajectory]] = []
    decode = Sampler.decode

    def spied(self: Sampler, requests, examples, sampling, **options):
        drawn = decode(self, requests, examples, sampling, **options)
        if sampling.greedy:
            for completions, _ in drawn._pending:
                result.extend((each.example.prompt, each.trajectory) for each in completions)
        return drawn

    with patch.object(Sampler, "decode", spied):
        yield result


def _done(status: int) -> None:
    assert status == 0, status
