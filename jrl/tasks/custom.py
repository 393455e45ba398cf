"""Custom task of a user, from a file or a module."""

from typing import Any

from jrl.tasks.data.prompt_list import PromptList, drop_repeated
from jrl.tasks.data.records import check_sendable, example_of
from jrl.tasks.data.split import HeldOut
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.environments.definition import EnvironmentPrompts, open_example, tools_of
from jrl.tasks.environments.host import Host
from jrl.tasks.references import CodeReference
from jrl.tasks.task import Example, Prompts

SIZES = ("max_prompt_length", "max_response_length", "characters")
"""Attributes that bound all prompts and answers that a task can generate."""


def custom_prompts(
    reference: CodeReference, definition: Any, seed: int, heldout: HeldOut, host: Host | None = None
) -> Prompts:
    """The prompts of what a reference makes (`jrl.tasks.definition`).

    Args:
      definition: made by the reference.
      seed: picks the stream of prompts, or the order of the training examples.
      host: of its environments, of a task that has some in place of a reward.

    Raises:
      ValueError: where it is no task, or a record of it is none.
    """
    name = reference.text
    judged = host is not None or callable(getattr(definition, "reward", None))
    if not hasattr(definition, "prompts") or not judged:
        raise ValueError(
            f"task={name} makes a {type(definition).__name__} without prompts or reward: give it "
            "prompts, a list of records, and reward(prompt, completion, **record) or "
            "environment(**record)"
        )
    if callable(definition.prompts):
        missing = [size for size in SIZES if not hasattr(definition, size)]
        if missing:
            raise ValueError(
                f"task={name} generates its prompts and does not define {', '.join(missing)}: set "
                "them to the lengths of the longest prompt and answer, and to all characters of "
                "both"
            )
        heldout.check_no_file(name, "draws")
        endless = definition if host is None else EnvironmentPrompts(name, definition, host)
        task = ProceduralTask(name, seed, endless, heldout.count, heldout.generated_share)
        check_sendable(task.train(0), f"task={name}")
        return task
    heldout_records = getattr(definition, "heldout", None)
    tools = tools_of(definition)
    examples, repeated = _examples(definition.prompts, f"task={name}: prompts", host, tools)
    if heldout_records is None:
        task = PromptList(name, examples, seed, heldout)
        task.num_repeated = repeated
        return task
    if heldout != HeldOut() and not heldout.everything:
        raise ValueError(
            f"task={name} has its own held-out prompts, and --held-out selects others: leave it out"
        )
    others, again = _examples(heldout_records, f"task={name}: heldout", host, tools)
    task = PromptList(name, examples, seed, heldout_examples=others)
    task.num_repeated = repeated + again
    return task


def _examples(
    records: Any, location: str, host: Host | None, tools: tuple[str, ...]
) -> tuple[list[Example], int]:
    """The examples of records, no two with the same prompt, and how many were left out."""
    examples = []
    for index, record in enumerate(records):
        where = f"{location}[{index}]"
        record = {"prompt": record} if isinstance(record, str) else record
        if host is None:
            example = example_of(record, where)
        else:
            example = open_example(record, where, host, tools)
        check_sendable(example, where)
        examples.append(example)
    return drop_repeated(examples)
