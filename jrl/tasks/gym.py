"""Prompts from a generator of reasoning-gym, scored by that generator.

It scores the answer in a completion (`jrl.tasks.answers`), without blanks around it. A chat model
is prompted as in the library's own evaluations, for ``<answer>`` tags, by the system message
`reasoning_gym.utils.SYSTEM_PROMPTS["default"]`; a policy that has no chat template reads the prompt
alone.

Its scores are clipped to [0, 1] and otherwise used as they are, with their faults: some generators
reward garbage (`game_of_life_halting` fully, others with 0.01 or 0.05), and such scores have the
reason "partial". ``python -m jrl.tasks check gym:NAME`` lists the wrong answers that a generator
rewards. An empty completion scores 0. Rows with no answer of their own have the example answer of
their metadata, if it scores full marks, else none (`Example.answer` is empty). Generators whose own
answers do not score full marks, and those that do not give the same prompts twice, are rejected.
"""

import difflib
import json
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from jrl.tasks.data.prompt_list import FiniteTask, PromptList
from jrl.tasks.data.split import HeldOut
from jrl.tasks.task import Example
from jrl.tasks.workers.pool import Pool
from jrl.tasks.workers.process import Message, WorkerEnded, program_worker

# Prompts are fetched in chunks, to distinguish a slow generator from one that hangs.
CHUNK = 64


def gym(
    name: str,
    seed: int,
    *,
    size: int = 2048,
    seconds: float = 5.0,
    load_seconds: float = 300.0,
    workers: int | None = None,
    options: Mapping[str, Any] | None = None,
    heldout: HeldOut | None = None,
) -> FiniteTask:
    """Takes the first prompts of a generator.

    Args:
      name: as registered by reasoning-gym, for instance ``basic_arithmetic``.
      seed: selects the prompts, and the order of the training examples.
      size: number of prompts to take; those that repeat an earlier one are left out.
      seconds: time limit of scoring one completion.
      load_seconds: time limit of taking all prompts.
      workers: processes that score; None is one per processor core, up to 8.
      options: options of the generator, for example ``{"min_terms": 2}``; None keeps its defaults.
      heldout: which prompts are held out; None is one in ten.

    Raises:
      ValueError: there is no such generator, it cannot be used (the message says why), or
        reasoning-gym is not installed.
    """
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            f"task=gym:{name} needs reasoning-gym, which is not installed: "
            'run pip install -e ".[gym]"'
        )
    if heldout is not None:
        heldout.check_no_file(f"gym:{name}", "makes")
    options = dict(options or {})
    spec = ",".join([f"gym:{name}", *(f"{key}={value}" for key, value in options.items())])
    arguments = [name, str(seed), str(size), json.dumps(options)]
    pool = Pool(
        lambda: program_worker("gym", *arguments, seconds=seconds),
        workers,
        # Generating the prompt again, in another worker, is not part of the scoring time.
        prepare=lambda question: {"prepare": question["index"]},
        prepare_seconds=load_seconds,
    )
    indices: dict[str, int] = {}

    def question(example: Example, completion: str) -> Message:
        if example.prompt not in indices:
            raise ValueError(
                f"examples has the prompt {example.prompt[:60]!r}, which is not one of "
                f"task={spec} with seed={seed}: verify with the task that gave the example"
            )
        return {"index": indices[example.prompt], "completion": completion}

    try:
        rows = _fetch_rows(pool, name, spec, size, load_seconds)
        for index, example in enumerate(rows):
            indices.setdefault(example.prompt, index)
        if len(indices) < 2:
            raise ValueError(
                f"task={spec} gave {len(indices)} distinct prompts; at least 2 are needed, "
                "one to train on and one held out: choose another generator"
            )
        examples = [rows[index] for index in indices.values()]
        return FiniteTask(PromptList(spec, examples, seed, heldout), pool, question)
    except BaseException:
        pool.close()
        raise


def _fetch_rows(pool: Pool, name: str, spec: str, size: int, load_seconds: float) -> list[Example]:
    deadline = time.monotonic() + load_seconds
    rows: list[Example] = []
    try:
        problem = pool.ask({"check": min(size, CHUNK)}, seconds=load_seconds)
        while "error" not in problem and "names" not in problem and len(rows) < size:
            span = [len(rows), min(len(rows) + CHUNK, size)]
            problem = pool.ask({"rows": span}, seconds=max(deadline - time.monotonic(), 0.0))
            asking = problem.get("instruction", "")
            rows += [Example(*row, instruction=asking) for row in problem.get("rows", [])]
    except TimeoutError as error:
        raise ValueError(
            f"task={spec} gave {len(rows)} of {size} prompts within {load_seconds:.0f} "
            "seconds: choose a faster generator"
        ) from error
    except WorkerEnded as error:
        raise ValueError(
            f"task={spec} cannot be loaded ({error}): choose another generator"
        ) from error
    if "names" in problem:
        near = difflib.get_close_matches(name, problem["names"], n=3, cutoff=0.4)
        hint = (
            f"did you mean {' or '.join(near)}?" if near else "see reasoning_gym.factory.DATASETS"
        )
        raise ValueError(f"task={spec} is not a generator of reasoning-gym: {hint}")
    if "error" in problem:
        raise ValueError(f"task={spec} cannot be used: {problem['error']}")
    return rows
