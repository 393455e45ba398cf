"""Tokenizer settings in the files of a checkpoint: ends, beginnings, templates."""

import json

import numpy as np
import pytest
from chat_checkpoint import END, START, TEMPLATE, TURN, VOCAB_SIZE, chat_tokenizer, write_tokenizer
from tokenizers import Tokenizer as Pipeline
from tokenizers import processors

from jrl.tasks.answers.extraction import UNREADABLE
from jrl.text.json_tokenizer import JsonTokenizer, checkpoint_tokenizer, tokenizer_of
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import text_of
from jrl.text.tokenizer import Tokenizer, Usage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def tokenizer(folder):
    return checkpoint_tokenizer(folder, VOCAB_SIZE)


def ids_of(tokenizer, *tokens):
    return tuple(tokenizer.special_tokens[token] for token in tokens)


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_without_a_beginning_nothing_comes_before_a_prompt(tokenizer):
    assert (tokenizer.bos_id, tokenizer.prefix) == (None, [])


@pytest.mark.parametrize(
    ("stated", "post_processed", "begins"),
    [
        ({"bos_token": END, "add_bos_token": True}, False, True),
        ({"bos_token": END, "add_bos_token": False}, True, False),
        ({"bos_token": END, "add_bos_token": None}, True, True),
        ({"bos_token": {"content": END}, "add_bos_token": None}, False, False),
        ({"bos_token": None, "add_bos_token": True}, False, False),
    ],
)
def test_a_beginning_comes_first_where_the_checkpoint_puts_it(
    tmp_path, stated, post_processed, begins
):
    folder = write_tokenizer(tmp_path, **stated)
    made = Pipeline.from_file(str(folder / "tokenizer.json"))
    template = f"{END} $A" if post_processed else "$A"
    ends = [(END, made.token_to_id(END))]
    made.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    made.save(str(folder / "tokenizer.json"))
    tokenizer = checkpoint_tokenizer(folder, VOCAB_SIZE)
    assert tokenizer.prefix == (list(ids_of(tokenizer, END)) if begins else [])


def test_every_end_that_the_files_name_ends_a_completion(tokenizer, tmp_path):
    assert tokenizer.stop_ids == ids_of(tokenizer, TURN, END)
    assert tokenizer.eos_id == tokenizer.stop_ids[0]
    one, two = tokenizer.encode("12")
    for end in tokenizer.stop_ids:
        assert text_of(tokenizer, np.array([one, two, end])) == "12"
    tokenizer.save(tmp_path / "tokenizer.model")
    again = load_tokenizer(tmp_path / "tokenizer.model")
    assert (again.stop_ids, again.usage) == (tokenizer.stop_ids, tokenizer.usage)


@pytest.mark.parametrize(
    ("generation", "options", "expected"),
    [
        (None, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": 5}, {"eos_token_id": [4, 5]}, (5, 4)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_an_end_is_a_number_or_a_list(tmp_path, generation, options, expected):
    folder = write_tokenizer(tmp_path)
    (folder / "generation_config.json").unlink()
    for name, content in (("generation_config.json", generation), ("config.json", options)):
        if content is not None:
            write(folder, name, content)
    tokenizer = checkpoint_tokenizer(folder, VOCAB_SIZE)
    assert tokenizer.stop_ids == (*ids_of(tokenizer, TURN), *expected)


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, -1, "</s>", True])
def test_an_end_outside_of_the_vocabulary_is_refused(tmp_path, wrong):
    folder = write_tokenizer(tmp_path)
    write(folder, "generation_config.json", {"eos_token_id": [1, wrong]})
    with pytest.raises(ValueError, match=rf"eos_token_id\)? ha.* {wrong!r}, (which is no|not a n)"):
        checkpoint_tokenizer(folder, VOCAB_SIZE)


def test_the_first_of_several_ends_is_the_one_that_is_not_named(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token=None)
    write(folder, "config.json", {"eos_token_id": [7]})
    tokenizer = checkpoint_tokenizer(folder, VOCAB_SIZE)
    assert tokenizer.eos_id == tokenizer.special_tokens[TURN]
    assert tokenizer.stop_ids[2:] == (7,)


@pytest.mark.parametrize(
    ("stated", "files", "expected"),
    [
        (TEMPLATE, {}, TEMPLATE),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], {}, "d"),
        (None, {}, None),
        (None, {"chat_template.json": {"chat_template": "j"}}, "j"),
        ("a", {"chat_template.json": {"chat_template": "j"}}, "a"),
        ("a", {"chat_template.jinja": "own\n"}, "own\n"),
    ],
)
def test_where_a_chat_template_is_found(tmp_path, stated, files, expected):
    folder = write_tokenizer(tmp_path, chat_template=stated)
    for name, content in files.items():
        write(folder, name, content)
    usage = checkpoint_tokenizer(folder, VOCAB_SIZE).usage
    assert usage.chat_template == expected
    assert (usage.chat_date is None) == (expected is None)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ([{"name": "rag", "template": "r"}], r"has 'rag', of which none is called 'default'"),
        (3, r"chat_template is a int, not a text"),
    ],
)
def test_templates_that_are_none(tmp_path, stated, message):
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: .*{message}"):
        chat_tokenizer(tmp_path, chat_template=stated)


def test_special_tokens_show_where_they_are_asked_for(tokenizer):
    start, turn = ids_of(tokenizer, START, TURN)
    one, two = tokenizer.encode("12")
    last = VOCAB_SIZE - 1
    assert tokenizer.decode_special([start, one, two, turn, last], "?") == f"{START}12{TURN}?"
    assert tokenizer.decode([start, one, two, turn, last]) == "12"
    # Nor does a verifier take them for nothing.
    for token in (start, last):
        assert text_of(tokenizer, np.array([one, token, two, turn])) == f"1{UNREADABLE}2"


def test_a_character_of_several_bytes_is_put_together_between_special_tokens(tokenizer):
    ids = tokenizer.encode("é🙂")
    assert len(ids) > 2
    turn = tokenizer.eos_id
    assert tokenizer.decode_special([*ids, turn, *ids]) == f"é🙂{TURN}é🙂"
    assert text_of(tokenizer, np.array([*ids, turn, *ids])) == f"é🙂{UNREADABLE}é🙂"


def test_a_tokenizer_json_is_a_file_like_any_other(folder, tmp_path):
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert isinstance(tokenizer, JsonTokenizer)
    pipeline = Pipeline.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.vocab_size == pipeline.get_vocab_size()
    assert tokenizer.stop_ids == ids_of(tokenizer, TURN, END)
    assert load_tokenizer(folder / "tokenizer.json", VOCAB_SIZE).vocab_size == VOCAB_SIZE
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"tokenizer\.json: eos_token is not set.*config\.json"):
        load_tokenizer(alone)
    for content, message in (("{", "is not JSON"), ("{}", "cannot be read by tokenizers")):
        alone.write_text(content)
        with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{message}"):
            load_tokenizer(alone)


def test_a_sentencepiece_checkpoint_has_ends_and_a_template_too(tmp_path):
    plain = Tokenizer.train_characters("0123456789 abc")
    plain.save(tmp_path / "tokenizer.model")
    write(tmp_path, "generation_config.json", {"eos_token_id": [2, 9]})
    write(tmp_path, "tokenizer_config.json", {"chat_template": "t", "add_bos_token": False})
    tokenizer = checkpoint_tokenizer(tmp_path, plain.vocab_size)
    assert (tokenizer.stop_ids, tokenizer.prefix, plain.prefix) == ((2, 9), [], [1])
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.usage, again.encode("12")) == (tokenizer.usage, plain.encode("12"))
    assert again.usage.chat_template == "t"
    spoilt = json.loads((tmp_path / "saved").read_text()) | {"sentencepiece": "not base64!"}
    write(tmp_path, "saved", spoilt)
    with pytest.raises(ValueError, match="saved: its model is corrupted"):
        load_tokenizer(tmp_path / "saved")


def test_a_sentencepiece_model_writes_out_its_special_tokens():
    tokenizer = Tokenizer.train_characters("0123456789<s>/")
    assert tokenizer.special_tokens == {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    ids = tokenizer.encode("12")
    assert tokenizer.encode_special("<s>12</s>1") == [1, *ids, 2, ids[0]]
    assert tokenizer.decode_special([1, *ids, 2]) == "<s>12</s>"
    assert tokenizer.named_tokens["eos_token"] == "</s>"
    assert tokenizer.with_usage(Usage(stop_ids=(5,))).stop_ids == (2, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", None), ("eos_token", True), ("stop_ids", 3), ("stop_ids", ["x"])],
)
def test_a_saved_tokenizer_that_was_spoilt_is_one_line(tokenizer, tmp_path, field, value):
    path = tmp_path / "tokenizer.model"
    tokenizer.save(path)
    write(tmp_path, path.name, {**json.loads(path.read_text()), field: value})
    with pytest.raises(ValueError, match=r"tokenizer\.model: is not a tokenizer that a run saved"):
        load_tokenizer(path)


@pytest.mark.parametrize("token", [{}, 3, ["</s>"], {"content": None}])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, token):
    folder = write_tokenizer(tmp_path)
    write(folder, "tokenizer_config.json", {"eos_token": token})
    with pytest.raises(ValueError, match=r"has the special token .*, which is neither a text"):
        checkpoint_tokenizer(folder, VOCAB_SIZE)


def test_an_end_that_is_no_id_is_refused_where_it_names_the_end(tmp_path):
    folder = write_tokenizer(tmp_path)
    write(folder, "tokenizer_config.json", {})
    write(folder, "config.json", {"eos_token_id": -1})
    write(folder, "generation_config.json", {})
    with pytest.raises(ValueError, match="have -1, which is not an id"):
        checkpoint_tokenizer(folder, VOCAB_SIZE)


def test_a_pipeline_that_makes_the_library_panic_is_refused(folder, tmp_path):
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    pipeline["model"]["continuing_subword_prefix"] = "longer than any token of it"
    with pytest.raises(ValueError, match="cannot be read by tokenizers"):
        tokenizer_of(tmp_path / "tokenizer.json", pipeline)


def test_a_pipeline_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read by tokenizers"):
        tokenizer_of(tmp_path / "tokenizer.json", {"model": {"type": "?"}})


@pytest.mark.parametrize("holes", [(), (270,), (258, 259, 290)])
def test_unused_ids_are_those_without_a_token(folder, holes):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    # The library counts added tokens on from the number of other tokens.
    vocabulary |= {token["content"]: token["id"] for token in content["added_tokens"]}
    content["model"]["merges"] = []
    for token in [token for token, i in vocabulary.items() if i in holes]:
        del vocabulary[token]
    tokenizer = tokenizer_of(path, content, VOCAB_SIZE)
    assert tokenizer.unused_ids == {*holes, *range(303, VOCAB_SIZE)}
    assert tokenizer.unused_ids < tokenizer.special_ids


def test_a_sentencepiece_model_has_no_unused_ids():
    assert Tokenizer.train_characters("abc").unused_ids == frozenset()
