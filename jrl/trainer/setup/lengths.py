"""Prompt and response lengths in tokens: the needs of a task, and the settings of a run."""

from typing import Any

from jrl.config.run import RunConfig
from jrl.tasks import Example, Task
from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.mixture import leave_out, lists_of, prompt_sources
from jrl.tasks.rewards import Rewarded
from jrl.text.conversation import reference_conversation
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer
from moe.config import ModelConfig

CHECKPOINT_RESPONSE = 1024
"""Default maximum tokens of a completion of a public checkpoint, for reasoning."""


def longest_prompt(task: Task, format: PromptFormat) -> int:
    """Tokens of the longest prompt, including special tokens and the chat template.

    Counted if the task is a list of examples. For a generator, whose prompts are unlimited, it
    is an upper bound: the tokens around a prompt of one character, plus the maximum tokens of as
    many characters as the longest prompt has.
    """

    def longest(task: Any) -> int:
        if isinstance(task, PromptList):
            return max(len(format.encode(example)) for example in task.examples)
        encode, tools = format.tokenizer.encode, task.train(0).tools
        around = max(
            len(format.encode(Example(c, "", tools=tools))) - len(encode(c))
            for c in task.characters
        )
        return around + _bound(task.max_prompt_length, task, format.tokenizer)

    return max(map(longest, prompt_sources(task)))


def longest_answer(task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of the longest reference completion and its end: counted, or bounded as for
    prompts."""
    plain = PromptFormat(tokenizer)

    def longest(task: Any) -> int:
        if isinstance(task, PromptList):
            answers = (reference_conversation(plain, row)[0] for row in task.examples)
            return max(map(len, answers))
        return _bound(task.max_response_length, task, tokenizer) + 1

    return max(map(longest, prompt_sources(task)))


def _bound(length: int, task: Any, tokenizer: Tokenizer) -> int:
    """Maximum tokens of a text of `length` characters of the task.

    A character is one token, or as many as it has bytes, and a tokenizer may start every text with
    a token for a space: the tokens that a character adds are measured by encoding it twice.
    """
    once = {c: len(tokenizer.encode(c)) for c in task.characters}
    added = {c: max(1, len(tokenizer.encode(c + c)) - once[c]) for c in once}
    return length * max(added.values()) + max(once[c] - added[c] for c in once)


def prompt_length(run: RunConfig, task: Task, format: PromptFormat) -> int:
    """Tokens that prompts are padded to; raises ValueError when the run sets fewer than the longest
    prompt has."""
    needed = longest_prompt(task, format)
    if run.prompt_length is None:
        return needed
    if run.prompt_length < needed:
        raise ValueError(
            f"prompt_length={run.prompt_length} is too short: the task needs {needed} tokens."
        )
    return run.prompt_length


def fit_prompts(run: RunConfig, task: Task, format: PromptFormat) -> tuple[int, int]:
    """Tokens that prompts are padded to, and the number of overlong prompts of lists left out.

    Raises:
      ValueError: as for `prompt_length`, for prompts that may not be left out, or cannot be, as
        they are generated.
    """
    dropped = 0
    if (limit := run.prompt_length) is not None and run.overlong_prompts == "drop":
        dropped = leave_out(task, lambda example: len(format.encode(example)) <= limit)
    return prompt_length(run, task, format), dropped


MAX_LISTED = 5
"""Maximum number of records that are named."""


def describe_lists(task: Task, dropped: int, prompt_length: int) -> list[str]:
    """Summary of the prompts of a task's lists: the field they are read from, if no setting names
    it, and those that are left out, a line for each reason.

    Args:
      dropped: number of those left out for their length.
      prompt_length: maximum tokens of a prompt.
    """
    repeated = sum(prompt_list.num_repeated for prompt_list in lists_of(task))
    shared = sum(prompt_list.num_shared for prompt_list in lists_of(task))
    unreadable = [where for prompt_list in lists_of(task) for where in prompt_list.unreadable]
    listed = ", ".join(unreadable[:MAX_LISTED]) + (", ..." if len(unreadable) > MAX_LISTED else "")
    counts = [
        (
            len(unreadable),
            f"records whose answer cannot be checked (--unreadable-answers): {listed}",
        ),
        (repeated, "records with a duplicate prompt and the same answer"),
        (shared, "training prompts that are held out (--held-out)"),
        (dropped, f"prompts of more than {prompt_length:,} tokens (--prompt-length)"),
    ]
    fields = dict.fromkeys(name for prompts in lists_of(task) for name in prompts.prompt_fields)
    read = [f'prompts are read from the field "{name}" (--prompt-field)' for name in fields]
    if isinstance(task, Rewarded) and not task.part_names:
        read.append("no record has an answer: completions are not verified and count as wrong")
    return [*read, *(f"dropped {count:,} {what}" for count, what in counts if count)]


def check_answers(run: RunConfig, task: Task) -> None:
    """Rejects a warm start without reference answers, and a run whose response length cannot be
    derived.

    Raises:
      ValueError: naming the settings to give.
    """
    if run.checkpoint is not None:
        return
    missing = sum(not e.answer for prompt_list in lists_of(task) for e in prompt_list.examples)
    if missing and run.weights is None and run.warm_start_steps:
        raise ValueError(
            f"task={run.task}: {missing} records have no answer, and the warm start trains on "
            "answers: give each one, start from --weights or a checkpoint, or give "
            "--warm-start-steps 0."
        )
    if not task.max_response_length and run.response_length is None:
        raise ValueError(
            f"task={run.task} has no answers to derive the maximum length of completions from: "
            "give --response-length."
        )


def response_length(
    run: RunConfig, task: Task, tokenizer: Tokenizer, model: ModelConfig, prompt: int
) -> int:
    """Length limit of a completion in tokens, its end included.

    The run's setting comes first. Otherwise a checkpoint gets `CHECKPOINT_RESPONSE`, or the
    positions that are left after a prompt, as reference answers do not show the length of its
    reasoning. A policy that is first trained on reference completions gets a quarter more than the
    longest of them.

    Args:
      prompt: tokens that prompts are padded to.

    Raises:
      ValueError: when it would be less than a token.
    """
    if run.response_length is not None:
        if run.response_length < 1:
            raise ValueError(
                f"response_length={run.response_length} is too short: the task needs 1 tokens."
            )
        return run.response_length
    if run.checkpoint is None:
        return -(-5 * longest_answer(task, tokenizer) // 4)
    longest, remaining = model.max_positions, CHECKPOINT_RESPONSE
    if longest is not None:
        remaining = min(longest - prompt, remaining)
    if remaining < 1:
        raise ValueError(
            f"prompts of {prompt} tokens leave no tokens for a completion: the network of "
            f"{run.model} supports sequences of {longest} tokens. Drop the longest prompts with "
            "--prompt-length, the tokens that a prompt may have."
        )
    return remaining


def response_origin(run: RunConfig, length: int) -> str:
    """Origin of the length limit of completions, in words."""
    if run.response_length is not None:
        return "--response-length"
    if run.checkpoint is None:
        return "a quarter above the task's longest answer; --response-length sets it"
    note = "" if length == CHECKPOINT_RESPONSE else ", limited by the checkpoint's positions"
    return f"the default of a checkpoint{note}; --response-length sets it"
