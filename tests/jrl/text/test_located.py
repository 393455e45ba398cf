"""Spans of tokens in a text, by tokenizers that add blanks, cut it or spell it by bytes."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from chat_kinds import END, write

from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.located import escape_text, special_pattern
from jrl.text.loss_mask import ChatFormat, encode_chat
from jrl.text.tokenizer import Tokenizer, Usage

TEXT = "How many pens has she? The answer is 7. How many are there? She has 18 pens."


@pytest.fixture(scope="module")
def pieces():
    """A model like Llama's: a blank before each text, a piece for each byte."""
    output = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=output,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return Tokenizer(output.getvalue())


def test_pieces_have_their_characters(pieces):
    text = "How 早 many\té?"
    located = pieces.encode_spans(text)
    assert located.ids == pieces.encode(text)
    spans = zip(located.begins, located.ends, strict=True)
    assert {place for span in spans for place in range(*span)} == set(range(len(text)))
    # All bytes of a character are of it, and the blank that the model adds of what stands there.
    inside = located.within(4, 5)
    assert [pieces.bytes_of(token) for token, own in zip(located.ids, inside, strict=True) if own]
    own = b"".join(
        pieces.bytes_of(token) or b""
        for token, is_inside in zip(located.ids, inside, strict=True)
        if is_inside
    )
    assert own == "早".encode()
    alone = pieces.encode_spans("é")
    assert alone.within(0, 1).all() and len(alone.ids) == 3


def test_a_text_that_goes_on_has_no_blank_of_its_own(pieces):
    before, text = "How many", "pens"
    assert (
        pieces.encode_continuation(before, text)
        == pieces.encode(before + text)[len(pieces.encode(before)) :]
    )
    assert (
        pieces.decode([*pieces.encode(before), *pieces.encode_continuation(before, text)])
        == "How manypens"
    )
    # If there is no template, a prompt and its answer are one text.
    chat = chat_of({"prompt": "How many?", "completion": " 7 pens"}, "f:1")
    found = encode_chat(ChatFormat(pieces), chat)
    assert pieces.decode(found.ids.tolist()) == "How many? 7 pens"
    prompt = [pieces.bos_id, *pieces.encode("How many?")]
    assert found.ids[: found.context].tolist() == prompt


def test_encode_continues_text_of_template(tmp_path):
    place = write(tmp_path, "prepend", "mistral")
    tokenizer = checkpoint_tokenizer(place, 600)
    asked = Conversation.from_pairs([("user", "How many?")])
    template = ChatTemplate(tokenizer)
    ids = [*template.encode(asked), *template.encode_continuation(asked, f" The {END}")]
    assert tokenizer.decode_special(ids) == f"<s> [INST] How many?[/INST] The {END}"
    assert tokenizer.special_tokens[END] not in ids


def test_a_sentencepiece_checkpoint_with_a_template(pieces):
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    made = pieces.with_usage(
        Usage(chat_template=source, turn_end=pieces.eos_id, template_begins=True)
    )
    turns = [("user", "How many?</s>"), ("assistant", "é pens")]
    template = ChatTemplate(made)
    ids = template.encode(Conversation.from_pairs(turns))
    assert ids[0] == made.bos_id and ids.count(made.eos_id) == 2 and ids[-1] == made.eos_id
    assert made.decode_special(ids) == "<s>user: How many?</s></s>assistant: é pens</s>"


def test_blanks_that_a_special_token_takes_along_are_nobodys(tmp_path):
    tokenizer = checkpoint_tokenizer(write(tmp_path, "stripping", "zephyr"), 600)
    messages = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "  many"}]
    found = encode_chat(
        ChatFormat(tokenizer, ChatTemplate(tokenizer)), chat_of({"messages": messages}, "f")
    )
    assert tokenizer.decode_special(found.ids[found.loss_mask].tolist()).strip() == "many</s>"


def test_special_tokens_that_overlap():
    special = {"ab": 1, "bc": 2}
    cut = escape_text("abcab", special, "\ue000")
    assert cut.replace("\ue000", "") == "abcab"
    assert not any(token in cut for token in special)
    assert special_pattern({}) == "(?!)"


def test_how_someone_cut_his_texts_is_no_part_of_a_tokenizer(tmp_path):
    place = write(tmp_path, "bytes", "chatml")
    content = json.loads((place / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 32},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    (place / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = checkpoint_tokenizer(place, 600)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    located = tokenizer.encode_special_spans(f"{TEXT}<\ue000|im_end|>", "\ue000")
    assert tokenizer.decode(located.ids) == f"{TEXT}<|im_end|>"


@pytest.mark.parametrize(
    ("text", "is_token"),
    [("<w>", True), ("a <w> b", True), ("a<w>", False), ("<w>b", False), ("a<w>b", False)],
)
def test_special_token_of_single_words_is_text_inside_of_a_word(text, is_token, tmp_path):
    place = write(tmp_path, "bytes", "chatml")
    pipeline = tokenizers.Tokenizer.from_file(str(place / "tokenizer.json"))
    pipeline.add_special_tokens([tokenizers.AddedToken("<w>", single_word=True, special=True)])
    pipeline.save(str(place / "tokenizer.json"))
    tokenizer = checkpoint_tokenizer(place, 600)
    token = tokenizer.special_tokens["<w>"]
    # As in a text that has no escape.
    assert (token in tokenizer.encode_special(text)) == is_token
    located = tokenizer.encode_special_spans(f"{text} <\ue000|im_end|>", "\ue000")
    assert (token in located.ids) == is_token
    assert tokenizer.decode_special(located.ids) == f"{text} <|im_end|>"
