"""Token ids in several files of a checkpoint: refused if they differ."""

import json

import pytest
from chat_checkpoint import END, TURN, VOCAB_SIZE, write_tokenizer

from jrl.text.json_tokenizer import checkpoint_tokenizer


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path / "model")


def changed(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def added(pipeline, **fields):
    pipeline["added_tokens"][-1].update(fields)


def stated(identity, content=TURN):
    return lambda config: config.update(added_tokens_decoder={identity: {"content": content}})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tokenizer.json", lambda x: added(x, id=305), "token '<.im_end.>' has the id 305, and"),
        ("tokenizer.json", lambda x: added(x, content=END), "'<.endoftext.>' has the id 302, and"),
        ("tokenizer.json", lambda x: x["model"]["vocab"].update(new=7), "has the id 7, and id 7"),
        (
            "tokenizer_config.json",
            stated("301"),
            "'<.im_end.>' with the id 301, and",
        ),
        ("tokenizer_config.json", stated("305", "<new>"), "'<new>' with .* does not have it: save"),
        ("tokenizer_config.json", stated("x"), "with the id 'x', and tokenizer.json has 302"),
        ("added_tokens.json", lambda x: x.update({TURN: 9}), "added_tokens.json has the token"),
    ],
)
def test_a_token_with_two_ids_is_refused(folder, name, change, message):
    checkpoint_tokenizer(folder, VOCAB_SIZE)
    changed(folder, name, change)
    with pytest.raises(ValueError, match=message):
        checkpoint_tokenizer(folder, VOCAB_SIZE)


def test_tokens_that_the_files_agree_on_are_read(folder):
    changed(folder, "tokenizer_config.json", stated("302"))
    changed(folder, "added_tokens.json", lambda x: x.update({TURN: 302}))
    assert checkpoint_tokenizer(folder, VOCAB_SIZE).eos_id == 302


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_key_with_two_values_is_refused(folder, name):
    text = (folder / name).read_text()
    key = "version" if name == "tokenizer.json" else "eos_token"
    (folder / name).write_text(f'{{"{key}": "x", ' + text.removeprefix("{"))
    with pytest.raises(ValueError, match=rf"{name} is not JSON: the key '{key}' comes twice"):
        checkpoint_tokenizer(folder, VOCAB_SIZE)


def test_two_templates_of_one_name_are_refused(folder):
    templates = [{"name": "default", "template": text} for text in "ab"]
    changed(folder, "tokenizer_config.json", lambda x: x.update(chat_template=templates))
    with pytest.raises(ValueError, match=r"chat_template has two entries of one name: keep one"):
        checkpoint_tokenizer(folder, VOCAB_SIZE)
