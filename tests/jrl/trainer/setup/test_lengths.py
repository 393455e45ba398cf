"""Room for prompts and completions is counted in tokens."""

from dataclasses import replace

import pytest
from chat_checkpoint import QUESTIONS, chat_tokenizer
from small_runs import PROMPT_LENGTH, largest, small_model

from jrl.config.run import RunConfig
from jrl.tasks import Example
from jrl.tasks.data.prompt_list import FiniteTask, PromptList
from jrl.tasks.load import BUILT_IN
from jrl.tasks.workers.pool import Pool
from jrl.text.prompt_format import PromptFormat, prompt_format
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.setup.lengths import (
    check_answers,
    fit_prompts,
    longest_answer,
    longest_prompt,
    prompt_length,
    response_length,
    response_origin,
)

EXAMPLES = [Example(question, str(answer)) for question, answer in QUESTIONS]
CHECKPOINT = RunConfig(model="hf:DIR")


class Unasked(Pool):
    def __init__(self):
        pass


def asked(examples):
    """A list that nobody answers: its worker is never started."""
    return FiniteTask(PromptList("questions", examples, 0), Unasked(), lambda example, text: {})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("qwen"))


def test_prompts_and_answers_of_a_list_are_counted_in_tokens(tokenizer):
    task = asked(EXAMPLES)
    plain = prompt_format(RunConfig(chat_template="none"), tokenizer)
    counted = max(len(tokenizer.encode(question)) for question, _ in QUESTIONS)
    assert longest_prompt(task, plain) == counted < task.max_prompt_length
    chat = prompt_format(RunConfig(), tokenizer)
    around = len(chat.encode(Example("x", ""))) - 1
    assert longest_prompt(task, chat) == counted + around
    assert longest_answer(task, tokenizer) == len(tokenizer.encode("5.0")) + 1


def test_a_text_of_several_bytes_a_character_needs_more_tokens_than_characters(tokenizer):
    task = asked([Example("🙂🙂", "é"), Example("1", "2")])
    plain = PromptFormat(tokenizer)
    assert longest_prompt(task, plain) == len(tokenizer.encode("🙂🙂")) > 2
    assert prompt_length(RunConfig(), task, plain) == longest_prompt(task, plain)


def test_fewer_tokens_than_the_longest_prompt_has_are_refused(tokenizer):
    task, plain = asked(EXAMPLES), PromptFormat(tokenizer)
    needed = longest_prompt(task, plain)
    assert prompt_length(RunConfig(prompt_length=needed), task, plain) == needed
    refusing = RunConfig(prompt_length=needed - 1, overlong_prompts="refuse")
    with pytest.raises(ValueError, match=rf"={needed - 1} is too short: the task needs {needed} t"):
        fit_prompts(refusing, task, plain)


def test_longer_prompts_are_left_out_and_counted(tokenizer):
    task, plain = asked(EXAMPLES), PromptFormat(tokenizer)
    needed = longest_prompt(task, plain)
    longest = sum(len(plain.encode(example)) == needed for example in EXAMPLES)
    run = RunConfig(prompt_length=needed - 1)
    assert fit_prompts(run, task, plain) == (needed - 1, longest)
    assert longest_prompt(task, plain) < needed
    with pytest.raises(ValueError, match=r"prompt_length=2 is too short: the task needs"):
        fit_prompts(RunConfig(prompt_length=2), largest(0), plain)


def test_prompts_without_answers_are_refused_where_answers_are_needed():
    task = asked([Example("a", ""), Example("b", "")])
    with pytest.raises(ValueError, match="2 records have no answer, and the warm start trains on"):
        check_answers(RunConfig(), task)
    with pytest.raises(ValueError, match=r"no answers to derive the .*: give --response-l"):
        check_answers(RunConfig(warm_start_steps=0), task)
    check_answers(RunConfig(warm_start_steps=0, response_length=5), task)
    check_answers(CHECKPOINT, task)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_tasks_need_a_token_a_character_and_one_more(name):
    task = BUILT_IN[name](0)
    tokenizer = Tokenizer.train_characters(task.characters)
    run, model = RunConfig(), small_model(tokenizer.vocab_size)
    format = PromptFormat(tokenizer)
    assert prompt_length(run, task, format) == task.max_prompt_length + 1
    answer = task.max_response_length + 1
    assert longest_answer(task, tokenizer) == answer
    assert response_length(run, task, tokenizer, model, 6) == -(-5 * answer // 4)


def test_a_bound_holds_for_whatever_a_generator_makes(tokenizer):
    task = largest(0)
    for format in (PromptFormat(tokenizer), prompt_format(RunConfig(), tokenizer)):
        bound = longest_prompt(task, format)
        needed = max(len(format.encode(task.train(i))) for i in range(60))
        assert needed <= bound <= needed + PROMPT_LENGTH


@pytest.mark.parametrize(
    ("limits", "prompt", "length", "said"),
    [
        ({}, 200, 1024, "the default of a checkpoint;"),
        (
            {"max_positions": 64},
            20,
            44,
            "the default of a checkpoint, limited by the checkpoint's p",
        ),
        # Beyond its window a network goes on, and looks back no further.
        ({"max_positions": 4000, "sliding_window": 300}, 20, 1024, "the default of a checkpoint;"),
    ],
)
def test_a_checkpoint_has_room_to_reason(tokenizer, limits, prompt, length, said):
    model = replace(small_model(tokenizer.vocab_size), **limits)
    found = response_length(CHECKPOINT, asked(EXAMPLES), tokenizer, model, prompt)
    assert found == length
    assert said in response_origin(CHECKPOINT, found)


def test_prompts_that_fill_the_window_are_refused(tokenizer):
    model = replace(small_model(tokenizer.vocab_size), max_positions=20)
    with pytest.raises(
        ValueError, match=r"prompts of 20 tokens leave no tokens.*hf:DIR supports .*--prompt-length"
    ):
        response_length(CHECKPOINT, asked(EXAMPLES), tokenizer, model, 20)


def test_a_limit_that_is_given_is_taken(tokenizer):
    run = RunConfig(model="hf:DIR", response_length=7)
    model = small_model(tokenizer.vocab_size)
    assert response_length(run, asked(EXAMPLES), tokenizer, model, 9) == 7
    assert response_origin(run, 7) == "--response-length"
    with pytest.raises(ValueError, match="response_length=0 is too short"):
        response_length(replace(run, response_length=0), asked(EXAMPLES), tokenizer, model, 9)
