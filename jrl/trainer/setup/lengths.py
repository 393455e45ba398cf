"""How many tokens prompts and completions have: what a task needs, and what a run takes."""

from typing import Any

from jrl.config.run import RunConfig
from jrl.tasks import Example, Task
from jrl.tasks.parts import leave_out, leaves, listed, lists_of
from jrl.text.conversation import gold_conversation
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer
from moe.config import ModelConfig

CHECKPOINT_RESPONSE = 1024
"""Tokens of a completion of a public checkpoint by default: room to reason."""


def longest_prompt(task: Task, format: PromptFormat) -> int:
    """Tokens of the longest prompt, with what comes before it and around it.

    Counted where the task is a list of examples. The prompts of a generator have no end: theirs is
    a bound, the tokens around a prompt of one character and those that as many characters as the
    longest has can come to.
    """
    return max(_longest_prompt(leaf, format) for leaf in leaves(task))


def _longest_prompt(task: Any, format: PromptFormat) -> int:
    if (found := listed(task)) is not None:
        return max(len(format.encode(example)) for example in found.examples)
    encode, tools = format.tokenizer.encode, task.train(0).tools
    around = max(
        len(format.encode(Example(c, "", tools=tools))) - len(encode(c)) for c in task.characters
    )
    return around + _bound(task.max_prompt_length, task, format.tokenizer)


def longest_answer(task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of the longest gold completion and its end: counted, or bounded as for prompts."""
    return max(_longest_answer(leaf, tokenizer) for leaf in leaves(task))


def _longest_answer(task: Any, tokenizer: Tokenizer) -> int:
    if (found := listed(task)) is not None:
        plain = PromptFormat(tokenizer)
        return max(len(gold_conversation(plain, example)[0]) for example in found.examples)
    return _bound(task.max_response_length, task, tokenizer) + 1


def _bound(length: int, task: Any, tokenizer: Tokenizer) -> int:
    """Tokens that a text of `length` characters of the task can have.

    A character is one token, or as many as it has bytes, and a model may begin every text with a
    piece for a space: what a character adds is seen where it stands twice.
    """
    once = {c: len(tokenizer.encode(c)) for c in task.characters}
    added = {c: max(1, len(tokenizer.encode(c + c)) - once[c]) for c in once}
    return length * max(added.values()) + max(once[c] - added[c] for c in once)


def prompt_length(run: RunConfig, task: Task, format: PromptFormat) -> int:
    """Tokens that prompts are padded to.

    Raises:
      ValueError: when the run asks for fewer than the longest prompt has.
    """
    needed = longest_prompt(task, format)
    if run.prompt_length is None:
        return needed
    if run.prompt_length < needed:
        raise ValueError(
            f"prompt_length={run.prompt_length} is too short: the task needs {needed} tokens."
        )
    return run.prompt_length


def fitted_prompts(run: RunConfig, task: Task, format: PromptFormat) -> tuple[int, int]:
    """Tokens that prompts are padded to, and how many prompts of lists are left out for them.

    Raises:
      ValueError: as for `prompt_length`, for what may not be left out or cannot: prompts that are
        drawn.
    """
    dropped = 0
    if (limit := run.prompt_length) is not None and run.overlong_prompts == "drop":
        dropped = leave_out(task, lambda example: len(format.encode(example)) <= limit)
    return prompt_length(run, task, format), dropped


def left_out(task: Task, dropped: int, prompt_length: int) -> list[str]:
    """Which prompts of a task's lists are left out, a line for each reason.

    Args:
      dropped: for their length.
      prompt_length: tokens that prompts may have.
    """
    repeated = sum(found.num_repeated for found in lists_of(task))
    shared = sum(found.num_shared for found in lists_of(task))
    counts = [
        (repeated, "records whose prompts had come before, with the same answer"),
        (shared, "training prompts that are held out (--held-out)"),
        (dropped, f"prompts of more than {prompt_length:,} tokens (--prompt-length)"),
    ]
    return [f"left out {number:,} {what}" for number, what in counts if number]


def check_answers(run: RunConfig, task: Task) -> None:
    """Refuses a warm start where there is nothing to imitate, and a limit of completions that
    nothing tells.

    Raises:
      ValueError: saying what to give.
    """
    if run.checkpoint is not None:
        return
    missing = sum(not e.answer for found in lists_of(task) for e in found.examples)
    if missing and run.weights is None and run.warm_start_steps:
        raise ValueError(
            f"task={run.task}: {missing} records have no answer, and the warm start imitates "
            "answers: give each one, start from --weights or a checkpoint, or say "
            "--warm-start-steps 0."
        )
    if not task.max_response_length and run.response_length is None:
        raise ValueError(
            f"task={run.task} has no answers that say how long completions may be: give "
            "--response-length."
        )


def response_length(
    run: RunConfig, task: Task, tokenizer: Tokenizer, model: ModelConfig, prompt: int
) -> int:
    """The limit of a completion in tokens, its end included.

    What the run asks for. Otherwise a checkpoint gets `CHECKPOINT_RESPONSE`, or what its positions
    leave after a prompt: gold answers are results, and say nothing of how long it reasons. A
    policy that first learns the gold completions gets a quarter more than the longest of them.

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
    longest = model.max_positions
    left = CHECKPOINT_RESPONSE if longest is None else min(longest - prompt, CHECKPOINT_RESPONSE)
    if left < 1:
        raise ValueError(
            f"prompts of {prompt} tokens leave no room for a completion: the network of "
            f"{run.model} was made for sequences of {longest} tokens. Leave out the "
            "longest prompts, or say --response-length."
        )
    return left


def response_origin(run: RunConfig, length: int) -> str:
    """Why completions have the limit that they have."""
    if run.response_length is not None:
        return "--response-length"
    if run.checkpoint is None:
        return "a quarter above the task's longest answer; --response-length sets it"
    why = "" if length == CHECKPOINT_RESPONSE else ", cut to the checkpoint's positions"
    return f"the default of a checkpoint{why}; --response-length sets it"
