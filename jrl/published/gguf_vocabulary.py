"""Metadata of GGUF for a checkpoint's tokenizer, the reverse of `jrl.published.gguf_tokenizer`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jrl.published.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NFC,
    NORMAL,
    PRE_TOKENIZERS,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    tokenizer_files,
)
from jrl.text.checkpoint_files import read_optional

PIPELINE = "tokenizer.json"
PREFERRED = ("smollm", "llama-bpe", "qwen2", "gpt-2")
"""Names in llama.cpp of pre-tokenizations with several."""
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
OTHER_ENDS = ("eot", "eom")
"""Names of ids that end a completion besides the end of sequence."""
WITHOUT_EFFECT = ("trim_offsets", "add_prefix_space", "prepend_scheme")
"""Options of a step of a pipeline that change no id, or are compared by `_spaces`."""


def vocabulary_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The metadata below ``tokenizer.`` for a folder with a tokenizer.json.

    Raises:
      ValueError: for a folder that has no tokenizer.json, and a tokenizer that GGUF lacks.
    """
    from jrl.text.json_tokenizer import checkpoint_tokenizer  # needs an extra

    pipeline = _read_pipeline(folder)
    model = pipeline["model"]
    if model.get("type") != "BPE":
        raise _refused(folder, f"its model is {model.get('type')}, and GGUF has BPE alone")
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    by_id = {i: token for token, i in model["vocab"].items()}
    added = {token["id"]: token for token in pipeline.get("added_tokens") or ()}
    by_id |= {i: token["content"] for i, token in added.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    entries: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [_token_type(i, by_id, added, model) for i in range(vocab_size)],
    }
    if model.get("byte_fallback"):
        # llama.cpp matches these before it replaces spaces.
        for i, token in added.items():
            tokens[i] = tokens[i] if token.get("special") else tokens[i].replace(SPACE, " ")
        entries |= {"model": "llama", "scores": _scores(tokens, merges)}
        entries["add_space_prefix"] = _prepends_space(pipeline)
    else:
        entries |= {"model": "gpt2", "pre": _pre_tokenization(folder, pipeline)}
        entries["merges"] = [" ".join(pair) for pair in merges]
    ids = {token: i for i, token in by_id.items()}
    tokenizer = checkpoint_tokenizer(folder, vocab_size)
    entries |= {f"{NAMES[n]}_token_id": ids[t] for n, t in tokenizer.named_tokens.items()}
    entries["add_bos_token"] = bool(tokenizer.prefix)
    others = [i for i in tokenizer.stop_ids if i != tokenizer.eos_id]
    if len(others) > len(OTHER_ENDS):
        raise _refused(folder, f"{len(others) + 1} tokens end a completion, and GGUF names three")
    entries |= {f"{name}_token_id": i for name, i in zip(OTHER_ENDS, others, strict=False)}
    template = tokenizer.usage.chat_template
    stated = {} if template is None else {"tokenizer.chat_template": template}
    return {**{f"tokenizer.ggml.{name}": value for name, value in entries.items()}, **stated}


def check_vocabulary(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Refuses a tokenizer that the metadata of its file read back as another one."""
    written = json.loads(tokenizer_files(metadata)[PIPELINE])
    ours, theirs = _comparable(_read_pipeline(folder)), _comparable(written)
    if differing := [part for part in ours if ours[part] != theirs[part]]:
        raise _refused(folder, f"GGUF has no such {', '.join(differing)}")


def _comparable(pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide about ids, in one form."""
    model = pipeline["model"]
    added = pipeline.get("added_tokens") or ()
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    is_sentencepiece = bool(model.get("byte_fallback"))
    return {
        "vocabulary": {**model["vocab"], **{token["content"]: token["id"] for token in added}},
        "merges": merges,
        "special tokens": sorted(token["id"] for token in added if token.get("special")),
        "stripping of tokens": sorted(
            token["id"]
            for token in added
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word")
        ),
        "prefix of words": model.get("continuing_subword_prefix") or "",
        "end of words": model.get("end_of_word_suffix") or "",
        "byte fallback": is_sentencepiece,
        "normalisation": _spaces(pipeline)
        if is_sentencepiece
        else _step(pipeline.get("normalizer")),
        "pre-tokenization": [] if is_sentencepiece else _step(pipeline.get("pre_tokenizer")),
    }


def _spaces(pipeline: Mapping[str, Any]) -> list[Any]:
    """Treatment of spaces of a SentencePiece pipeline, by its normaliser or pre-tokenizer."""
    steps = [*_step(pipeline.get("normalizer")), *_step(pipeline.get("pre_tokenizer"))]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    expected = [replaces, {"type": "Prepend", "prepend": SPACE}]
    # Text has no unescaped space by then, so that a split at spaces splits nothing.
    others = [s for s in steps if s not in expected and s["type"] not in ("Metaspace", "Split")]
    return [_prepends_space(pipeline), *others]


def _prepends_space(pipeline: Mapping[str, Any]) -> bool:
    """True if a space is put before a text."""
    steps = [
        *_all_steps(pipeline.get("normalizer")),
        *_all_steps(pipeline.get("pre_tokenizer")),
    ]
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _all_steps(part: Mapping[str, Any] | None) -> list[Any]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for key in ("normalizers", "pretokenizers") for step in part.get(key) or ()]


def _step(part: Mapping[str, Any] | None) -> list[Any]:
    """The steps of a normaliser or pre-tokenizer, without options that change no id."""
    return [
        {name: value for name, value in step.items() if name not in WITHOUT_EFFECT}
        for step in _all_steps(part)
    ]


def _pre_tokenization(folder: Path, pipeline: Mapping[str, Any]) -> str:
    """llama.cpp's name of a pre-tokenization."""
    steps = _step(pipeline.get("pre_tokenizer"))
    is_composed = {"type": "NFC"} in _step(pipeline.get("normalizer"))
    names = [*PREFERRED, *PRE_TOKENIZERS]
    for name in names:
        listed = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}
        if steps == _step(listed) and is_composed == (name in NFC):
            return name
    raise _refused(folder, f"llama.cpp has no such pre-tokenization; supported: {names}")


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores by which SentencePiece makes these merges in this order."""
    ranks: dict[str, float] = {}
    for rank, (first, second) in enumerate(merges):
        ranks.setdefault(first + second, -float(rank))
    return [ranks.get(token, -1e6) for token in tokens]


def _token_type(
    index: int,
    by_id: Mapping[int, str],
    added: Mapping[int, Mapping[str, Any]],
    model: Mapping[str, Any],
) -> int:
    """`tokenizer.ggml.token_type` of an id."""
    token = by_id.get(index)
    if token is None:
        return UNUSED
    if model.get("byte_fallback") and token == model.get("unk_token"):
        return UNKNOWN
    if index in added:
        return CONTROL if added[index].get("special") else USER_DEFINED
    is_byte = model.get("byte_fallback") and token.startswith("<0x") and len(token) == 6
    return BYTE if is_byte else NORMAL


def _read_pipeline(folder: Path) -> dict[str, Any]:
    pipeline = read_optional(folder / PIPELINE)
    if not pipeline.get("model"):
        raise _refused(folder, f"it has no {PIPELINE}")
    return pipeline


def _refused(folder: Path, reason: str) -> ValueError:
    return ValueError(f"the tokenizer of {folder} cannot be written as GGUF: {reason}.")
