"""Tokenizer files of a GGUF file: tokenizer.json and its companions, from the metadata."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Metadata = Mapping[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{OTHERS}"
QWEN2_SPLIT = rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{OTHERS}"

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
GPT2_WORDS = {**BYTE_LEVEL, "use_regex": True}
SINGLE_DIGITS = [{"type": "Digits", "individual_digits": True}, GPT2_WORDS]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, {**BYTE_LEVEL, "use_regex": False}]


PRE_TOKENIZERS = {
    "gpt-2": [GPT2_WORDS],
    "default": [GPT2_WORDS],
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "llama3": _split(LLAMA3_SPLIT),
    "llama-v3": _split(LLAMA3_SPLIT),
    "llama-bpe": _split(LLAMA3_SPLIT),
    "falcon3": _split(LLAMA3_SPLIT),
    "qwen2": _split(QWEN2_SPLIT),
    "deepseek-r1-qwen": _split(QWEN2_SPLIT),
}
"""Pre-tokenization before byte-level BPE, by `tokenizer.ggml.pre`."""
AS_WRITTEN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""Options of a token that is matched literally in a text, in any context."""
NFC = {"qwen2", "deepseek-r1-qwen"}
"""Tokenizers that first normalise texts to Unicode's form C."""
SPACE = "\u2581"
"""The character with which SentencePiece represents a space."""


def tokenizer_files(metadata: Metadata) -> dict[str, bytes]:
    """The tokenizer files of a checkpoint by name, from metadata of GGUF.

    tokenizer.json has the pipeline, tokenizer_config.json the special tokens, `add_bos_token` and
    the chat template, generation_config.json the ids that end a completion.

    Raises:
      ValueError: for an unsupported kind of tokenizer or pre-tokenization.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pipeline = _byte_level(metadata)
    elif kind == "llama":
        pipeline = _sentencepiece(metadata)
    else:
        raise ValueError(
            f"tokenizer.ggml.model={kind!r} is not supported; supported: gpt2 (byte-level BPE), "
            "llama (SentencePiece)."
        )
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(metadata, pipeline["model"]["vocab"]),
            "post_processor": _post_processor(metadata),
            **pipeline,
        },
        "tokenizer_config.json": _config(metadata),
        "generation_config.json": _generation(metadata),
    }
    return {
        name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()
    }


def _byte_level(metadata: Metadata) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}."
        )
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": {"type": "NFC"} if pre in NFC else None,
        "pre_tokenizer": _sequence("pretokenizers", PRE_TOKENIZERS[pre]),
        "decoder": GPT2_WORDS,
        "model": _bpe(_ids(metadata, metadata["tokenizer.ggml.tokens"]), merges),
    }


def _sentencepiece(metadata: Metadata) -> dict[str, Any]:
    """SentencePiece as BPE: its merges are all pairs of pieces that form a piece, best piece first.

    The scores order the pieces, except for Gemma, whose vocabulary is in their order.
    """
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    tokens = [_respell(token) if is_gemma else token for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = _ids(metadata, tokens)
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is not None:
        pairs = [merge.split(" ") for merge in merges]
    else:
        order = range(0, -len(tokens), -1)
        scores = map(float, order) if is_gemma else metadata["tokenizer.ggml.scores"]
        pairs = _merges(tokens, vocabulary, scores)
    spaces: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    ]
    fuse = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma):
        spaces = [{"type": "Prepend", "prepend": SPACE}, *spaces]
        fuse = [*fuse, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": _sequence("normalizers", spaces),
        "pre_tokenizer": None,
        "decoder": _sequence("decoders", fuse),
        "model": {
            **_bpe(vocabulary, pairs),
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _respell(token: str) -> str:
    """Gemma's pieces of several spaces, which GGUF writes as plain spaces."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _merges(
    tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Iterable[float]
) -> list[list[str]]:
    pairs = []
    for token, score in zip(tokens, scores, strict=True):
        splits = ((token[:end], token[end:]) for end in range(1, len(token)))
        merged = ((a, b) for a, b in splits if a in vocabulary and b in vocabulary)
        pairs += [(-score, vocabulary[a], vocabulary[b], a, b) for a, b in merged]
    pairs.sort()
    return [[a, b] for *_, a, b in pairs]


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _ids(metadata: Metadata, tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token, without those that llama.cpp's conversion makes for ids that no token has."""
    types = _types(metadata)
    ids = dict[str, int]()
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == UNUSED and token == f"[PAD{index}]":
            continue
        if token in ids:
            raise ValueError(
                f"has the token {token!r} twice, with the ids {ids[token]} and {index}: convert "
                "the model again."
            )
        ids[token] = index
    return ids


def _types(metadata: Metadata) -> Sequence[int]:
    return metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(
        metadata["tokenizer.ggml.tokens"]
    )


def _sequence(kind: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", kind: steps}


def _added_tokens(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[dict[str, Any]]:
    """Tokens that are matched as a whole in a text: control tokens, and user-defined tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return [
        {"id": index, "content": token, **AS_WRITTEN, "special": kind == CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, _types(metadata), strict=True))
        if kind in (CONTROL, USER_DEFINED) and vocabulary.get(token) == index
    ]


def _begins(metadata: Metadata) -> bool:
    """True if the beginning of sequence is prepended to a text."""
    # llama.cpp prepends it to a SentencePiece text unless the file says otherwise.
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))


def _post_processor(metadata: Metadata) -> dict[str, Any] | None:
    """Adds the beginning of sequence in programs that do not read `add_bos_token`, such as
    `transformers`."""
    identity = metadata.get("tokenizer.ggml.bos_token_id")
    if identity is None or not _begins(metadata):
        return None
    token = metadata["tokenizer.ggml.tokens"][identity]
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [bos, texts[0]],
        "pair": [bos, texts[0], bos, texts[1]],
        "special_tokens": {token: {"id": token, "ids": [int(identity)], "tokens": [token]}},
    }


def _config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: metadata.get(f"tokenizer.ggml.{name}_token_id") for ours, name in names.items()}
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _begins(metadata),
        "clean_up_tokenization_spaces": False,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
        **({} if template is None else {"chat_template": template}),
    }


def _generation(metadata: Metadata) -> dict[str, Any]:
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(int(index) for index in ids if index is not None))
    return {"eos_token_id": ends}
