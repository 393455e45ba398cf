"""Tokenizers of each kind and chat templates of many families, for what a conversation becomes.

Nothing here needs JAX: `tests/jrl/text/record_chats.py` runs it beside `transformers`. Vocabularies
are written down by rule and not trained, so that they are the same everywhere.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

FOLDER = Path(__file__).parent / "chat_templates"
DAY = "2026-11-25"
WORDS = [
    "user",
    "assistant",
    "system",
    "answer",
    "pens",
    "many",
    "The",
    "has",
    "she",
    "How",
    "Be",
    "brief",
    "Count",
    "INST",
]
BEGIN, END = "<s>", "</s>"
SPECIAL = (
    *("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"),
    *("<|im_system|>", "<|im_middle|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *("<|return|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *(f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant", "end▁of▁sentence")),
)
ADDED = ("<think>", "</think>")
"""Tokens of the vocabulary that are no special ones."""
OWN = {
    # Mistral's and Llama 2's older ones, in which nothing is a token but the ends.
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% endfor %}",
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "zephyr": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "phi3": "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}"
    "{% endif %}",
    "vicuna": "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ ' ASSISTANT: ' + m.content + eos_token }}{% else %}"
    "{{ m.content + ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}",
    "marked": "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
}
TEMPLATES = tuple(sorted([*(path.stem for path in FOLDER.glob("*.jinja")), *OWN]))
KINDS = ("bytes", "ignoring", "prepend", "metaspace", "replace", "unigram", "stripping")
PUTS_BEGIN = ("ignoring", "prepend", "metaspace", "replace", "stripping")
"""Kinds whose tokenizers put the beginning of sequence before a text."""


def kinds_of(template: str) -> tuple[str, ...]:
    """Three kinds for each template, and all of them for some."""
    if template in ("inst", "chatml", "gpt_oss"):
        return KINDS
    place = TEMPLATES.index(template)
    others = [kind for kind in KINDS if kind not in ("bytes", "prepend")]
    return ("bytes", "prepend", others[place % len(others)])


def source_of(template: str) -> str:
    if template in OWN:
        return OWN[template]
    return (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")


def write(folder: Path, kind: str, template: str) -> Path:
    """The files of a tokenizer with a template; what ends a sequence is never the template's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(pipeline(kind).to_str(), encoding="utf-8")
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if kind == "bytes" else BEGIN,
        "eos_token": END,
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "chat_template": source_of(template),
    }
    kept = {name: value for name, value in stated.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def pipeline(kind: str) -> tokenizers.Tokenizer:
    """The tokenizer of a kind."""
    made = {"bytes": _bytes, "ignoring": _bytes, "unigram": _unigram}.get(kind, _pieces)(kind)
    strip = {"rstrip": True} if kind == "stripping" else {}
    made.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, **strip)
            for token in (BEGIN, END, *SPECIAL)
        ]
    )
    made.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    own = [processors.ByteLevel(trim_offsets=True)] if kind in ("bytes", "ignoring") else []
    if kind in PUTS_BEGIN:
        begin = (BEGIN, made.token_to_id(BEGIN))
        own.append(processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin]))
    made.post_processor = processors.Sequence(own)
    return made


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Each word grows letter by letter."""
    result: dict[tuple[str, str], None] = {}
    for word in words:
        for size in range(1, len(word)):
            result[word[:size], word[size]] = None
    return list(result)


def _bpe(letters: list[str], words: list[str], **options: Any) -> models.BPE:
    merges = _merges(words)
    vocab = {
        piece: n for n, piece in enumerate([*letters, *dict.fromkeys(a + b for a, b in merges)])
    }
    return models.BPE(vocab, merges, **options)


def _bytes(kind: str) -> tokenizers.Tokenizer:
    words = [*WORDS, *(f"Ġ{word}" for word in WORDS)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(_bpe(letters, words, ignore_merges=kind == "ignoring"))
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    made.decoder = decoders.ByteLevel()
    return made


def _pieces(kind: str) -> tokenizers.Tokenizer:
    """As SentencePiece has them: a blank is a letter, and a byte a token."""
    letters = sorted(set("".join(WORDS) + "▁0123456789.?:,!/[]"))
    words = [*WORDS, *(f"▁{word}" for word in WORDS)]
    first = ["<unk>", BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = _bpe([*first, *letters], words, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    if kind == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "replace":
        made.normalizer = space
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    return made


def _unigram(kind: str) -> tokenizers.Tokenizer:
    letters = sorted(set("".join(WORDS) + "▁0123456789.?:,!/[]"))
    pieces = [("<unk>", 0.0), *((letter, -5.0) for letter in letters)]
    pieces += [(f"▁{word}", -3.0) for word in WORDS]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made
