"""Built-in conversations: references score full marks within the declared sizes."""

import pytest

from jrl.tasks import load_task
from jrl.tasks.load import CONVERSATIONS
from jrl.tasks.mixture import environments_of
from jrl.text.conversation import reference_conversation
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer


@pytest.fixture(params=sorted(CONVERSATIONS))
def task(request):
    return load_task(request.param, 7)


def played(task, example, number):
    """Replies of the environment to the reference conversation, message by message."""
    host, said, given = environments_of(task, example), [], []
    assert host is not None
    for role, content in example.turns:
        if role == "assistant":
            said.append(content)
            given.append(host.say(number, example, said).result())
    return given


def test_gold_conversations_score_full_marks(task):
    for number in range(200):
        example = task.train(number)
        given = played(task, example, number)
        assert [reply.done for reply in given] == [False] * (len(given) - 1) + [True]
        answers = [message for reply in given for message in reply.messages]
        assert answers == [turn for turn in example.turns if turn[0] != "assistant"]
        assert sum(reply.reward for reply in given) == 1.0
        verdict = task.environments.scoring.verdict([reply.reward for reply in given], None)
        assert verdict.correct


def test_sizes_hold(task):
    examples = [task.train(number) for number in range(800)]
    assert max(len(example.prompt) for example in examples) <= task.max_prompt_length
    format = PromptFormat(Tokenizer.train_characters(task.characters))
    sizes = [len(reference_conversation(format, example)[0]) for example in examples]
    # The end of the last turn is not counted.
    assert task.max_response_length - 4 <= max(sizes) - 1 <= task.max_response_length
    text = "".join(x for e in examples for x in (e.prompt, *(c for _, c in e.turns)))
    assert set(text) <= set(task.characters)


def test_heldout_conversations_never_occur_in_training(task):
    train = {task.train(index).identity for index in range(800)}
    heldout = {task.heldout(index).identity for index in range(100)}
    assert len(heldout) > 20 and not train & heldout


def test_a_wrong_turn_scores_nothing():
    task = load_task("guess", 0)
    example = task.train(0)
    host = environments_of(task, example)
    assert host is not None
    for number, text in enumerate(("", "x", "1.5", "123", "-1")):
        reply = host.say(number, example, [text]).result()
        assert (reply.reward, reply.done) == (0.0, True)
    other = str((example.record["number"] + 1) % 10)
    said, replies = [], []
    for _ in range(4):
        said.append(other)
        replies.append(host.say(9, example, said).result())
    assert [reply.done for reply in replies] == [False] * 3 + [True]
    assert not any(reply.reward for reply in replies)
