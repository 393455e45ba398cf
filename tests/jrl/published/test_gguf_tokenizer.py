"""The tokenizer of a GGUF file gives the tokens of the tokenizer that it was made of."""

import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jrl.published.gguf_tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, tokenizer_files
from jrl.text.json_tokenizer import tokenizer_of

TEXTS = [
    "What is 17 + 25? It's 42.",
    "  two  spaces,\ttab\n\nnew   line \r\n",
    "naïve café Ünïcödé 日本語 🙂",
    "x = 1234567.89; y = 'it''s'",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
    "can't WON'T we've",
    "\u00e9 e\u0301",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def split(pattern):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
PIPELINES = {
    "gpt-2": (BYTE_LEVEL, None),
    "smollm": (pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]), None),
    "llama-bpe": (split(LLAMA3_SPLIT), None),
    "qwen2": (split(QWEN2_SPLIT), normalizers.NFC()),
}


def byte_level_metadata(pre):
    """A tokenizer of that kind, and what GGUF would have of it."""
    before, normalizer = PIPELINES[pre]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = before, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>"])
    merges = json.loads(made.to_str())["model"]["merges"]
    size = made.get_vocab_size()
    tokens = [made.id_to_token(index) for index in range(size)]
    return made, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (size - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in merges
        ],
        "tokenizer.ggml.bos_token_id": size - 3,
        "tokenizer.ggml.eos_token_id": size - 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def read(folder, metadata):
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_bytes(content)
    path = folder / "tokenizer.json"
    return tokenizer_of(path, json.loads(path.read_text()))


@pytest.mark.parametrize("pre", PIPELINES)
def test_byte_level_tokens_are_the_same(tmp_path, pre):
    made, metadata = byte_level_metadata(pre)
    tokenizer = read(tmp_path, metadata)
    for text in [*TEXTS, "a <think>b"]:
        assert tokenizer.encode(text) == made.encode(text, add_special_tokens=False).ids
        if text.isascii():
            assert tokenizer.decode(tokenizer.encode("plain " + text[:3])) == "plain " + text[:3]


def test_what_else_the_metadata_say_is_kept(tmp_path):
    _, metadata = byte_level_metadata("gpt-2")
    tokenizer = read(tmp_path, metadata)
    ends = metadata["tokenizer.ggml.eos_token_id"], 0
    assert tokenizer.usage.stop_ids[:2] == ends and tokenizer.eos_id == ends[0]
    assert tokenizer.usage.chat_template == TEMPLATE
    assert not tokenizer.usage.begins and tokenizer.bos_id == ends[0] - 1
    pipeline = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert pipeline.encode("hi").ids == tokenizer.encode("hi")
    assert tokenizer.special_tokens["<|im_start|>"] == tokenizer.bos_id
    assert "<think>" not in tokenizer.special_tokens


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model with a byte for each character that it does not have."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "texts").write_text("\n".join(text for text in TEXTS if text.strip()) * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "texts"),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))


def test_pieces_are_those_of_sentencepiece(tmp_path, pieces):
    ids = range(pieces.vocab_size())
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in ids
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = read(tmp_path, metadata)
    assert tokenizer.usage.begins  # llama.cpp's default for these
    # So it is for programs that read tokenizer.json alone.
    pipeline = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert pipeline.encode("17 + 25").ids == [1, *pieces.encode("17 + 25")]
    # A special token that is spelled in a text is one to a pipeline, and text to SentencePiece.
    for text in (text for text in TEXTS if text and "<" not in text):
        assert tokenizer.encode(text) == pieces.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gemma_orders_pieces_by_their_place(tmp_path):
    """Its scores do not, its pieces of spaces are spelled as spaces, and no space comes first."""
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["  ", "ab", "bc", "abc", "\u2581", "a", "b", "c"]
    size = 4 + len(single) + len(words)
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", *single, *words],
        "tokenizer.ggml.scores": [float(index) for index in range(size)],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, *[6] * 256, 4, *[1] * 7],
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = read(tmp_path, metadata)
    double, ab, bc, abc, space, *_ = range(260, size)
    assert tokenizer.encode("abc") == [abc]
    assert tokenizer.encode("abab bcb") == [ab, ab, space, bc, 266]
    assert tokenizer.encode("a  b") == [265, double, 266]
    assert tokenizer.decode(tokenizer.encode("é a")) == "é a"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not supported; supp"),
    ],
)
def test_other_tokenizers_are_refused(changes, message):
    _, metadata = byte_level_metadata("gpt-2")
    with pytest.raises(ValueError, match=message):
        tokenizer_files({**metadata, **changes})


def padded(metadata, *tokens):
    """Metadata with further tokens, which are of the type UNUSED."""
    listed = [*metadata["tokenizer.ggml.tokens"], *tokens]
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(
        metadata["tokenizer.ggml.tokens"]
    )
    return {
        **metadata,
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": [*kinds, *[5] * len(tokens)],
    }


def test_ids_that_a_conversion_filled_have_no_token():
    made, metadata = byte_level_metadata("qwen2")
    size = made.get_vocab_size()
    filled = padded(metadata, f"[PAD{size}]", "<unused>", f"[PAD{size + 2}]", "[PAD1]")
    vocabulary = json.loads(tokenizer_files(filled)["tokenizer.json"])["model"]["vocab"]
    assert vocabulary.keys() - made.get_vocab() == {"<unused>", "[PAD1]"}
    assert vocabulary["<unused>"] == size + 1


def test_a_token_with_two_ids_is_refused():
    _, metadata = byte_level_metadata("qwen2")
    size = len(metadata["tokenizer.ggml.tokens"])
    first = metadata["tokenizer.ggml.tokens"][7]
    with pytest.raises(ValueError, match=rf"twice, with the ids 7 and {size}: convert the model"):
        tokenizer_files(padded(metadata, first))
