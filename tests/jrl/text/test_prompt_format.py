"""Prompts of examples: plain, or as the conversation of a chat template."""

from dataclasses import replace

import pytest
from chat_checkpoint import START, TURN, chat_tokenizer

from jrl.config.run import RunConfig
from jrl.tasks import Example
from jrl.text.conversation import reference_rows
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import PromptFormat, prompt_format, with_template
from jrl.text.tokenizer import Tokenizer

ASKED = Example("1+1?", "2")
TURNS = Example("system: Count.\nuser: 1+1?", "2", (("system", "Count."), ("user", "1+1?")))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("qwen"))


def turn(role, text):
    return f"{START}{role}\n{text}{TURN}\n"


def read(format, example):
    return format.tokenizer.decode_special(format.encode(example))


BEGUN = f"{START}assistant\n"


def test_a_prompt_is_the_users_turn(tokenizer):
    assert read(prompt_format(RunConfig(), tokenizer), ASKED) == turn("user", "1+1?") + BEGUN


def test_a_system_prompt_comes_first_unless_the_conversation_has_one(tokenizer):
    format = prompt_format(RunConfig(system_prompt="Be brief."), tokenizer)
    system = turn("system", "Be brief.")
    assert read(format, ASKED) == system + turn("user", "1+1?") + BEGUN
    assert read(format, TURNS) == turn("system", "Count.") + turn("user", "1+1?") + BEGUN


def test_an_instruction_is_for_chat_models_alone(tokenizer, tmp_path):
    """Prompts of gym have an instruction on the form of answers."""
    asked = replace(ASKED, instruction="Use <answer> tags.")
    told = turn("system", "Use <answer> tags.") + turn("user", "1+1?") + BEGUN
    assert read(prompt_format(RunConfig(), tokenizer), asked) == told
    # What the user says, or the conversation, comes first.
    format = prompt_format(RunConfig(system_prompt="Be brief."), tokenizer)
    assert read(format, asked) == turn("system", "Be brief.") + turn("user", "1+1?") + BEGUN
    turns = replace(TURNS, instruction="Use <answer> tags.")
    assert read(prompt_format(RunConfig(), tokenizer), turns) == read(format, TURNS)
    plain = prompt_format(RunConfig(chat_template="none"), tokenizer)
    assert plain.encode(asked) == tokenizer.encode("1+1?")


@pytest.mark.parametrize(
    "system", ["{{ raise_exception('no system') }}", "{# nothing is written of it #}"]
)
def test_a_template_without_system_messages_has_the_instruction_in_the_question(
    tokenizer, tmp_path, system
):
    path = tmp_path / "own.jinja"
    path.write_text(
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{system}{{% else %}}"
        "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
    )
    run = RunConfig(chat_template=str(path))
    format = prompt_format(run, with_template(run, tokenizer))
    asked = replace(ASKED, instruction="Use <answer> tags.")
    assert read(format, asked) == "user: Use <answer> tags.\n1+1?\n"


def test_without_a_template_a_prompt_is_itself(tokenizer):
    format = prompt_format(RunConfig(chat_template="none"), tokenizer)
    assert format.encode(ASKED) == tokenizer.encode("1+1?")
    with pytest.raises(ValueError, match=r"is a conversation.*no chat template.*--chat-template F"):
        format.encode(TURNS)
    with pytest.raises(ValueError, match=r"'' has no token, and the tokenizer puts none before it"):
        format.encode(Example("", "2"))
    characters = Tokenizer.train_characters("1+?")
    assert PromptFormat(characters).encode(Example("", "2")) == [characters.bos_id]


def test_a_template_of_ones_own(tokenizer, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("Q: {{ messages[0].content }}\nA:")
    run = RunConfig(chat_template=str(path))
    own = with_template(run, tokenizer)
    assert read(prompt_format(run, own), ASKED) == "Q: 1+1?\nA:"
    own.save(tmp_path / "tokenizer.model")
    path.unlink()  # a run keeps it with its tokenizer
    again = load_tokenizer(tmp_path / "tokenizer.model")
    assert read(prompt_format(run, again), ASKED) == "Q: 1+1?\nA:"
    with pytest.raises(ValueError, match=r"own\.jinja' cannot be read \(No such file.*checkpoint"):
        with_template(run, tokenizer)


def test_a_system_prompt_needs_a_template():
    with pytest.raises(ValueError, match=r"system_prompt='Be\.' needs a chat template"):
        prompt_format(RunConfig(system_prompt="Be."), Tokenizer.train_characters("12"))


def test_prompts_of_a_batch_are_conversations_padded_on_the_left(tokenizer):
    format = prompt_format(RunConfig(), tokenizer)
    short, long = (format.encode(example) for example in (ASKED, TURNS))
    rows = reference_rows(format, (ASKED, TURNS), len(long), 9)
    tokens, valid = (x[:, : len(long)] for x in rows[:2])
    pad = len(long) - len(short)
    assert tokens.tolist() == [[tokenizer.pad_id] * pad + short, long]
    assert valid.sum(axis=1).tolist() == [len(short), len(long)]
