"""Checkpoints made small, each with what its family publishes beside the weights: a tokenizer of
the same kind, a chat template of the same structure, special tokens and what ends a completion.

The templates under `chat_templates` write the same text as the families' own, without tools.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from programs import random_weights
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from moe import huggingface

NETWORKS = Path(__file__).parents[1] / "moe" / "huggingface"
TEMPLATES = Path(__file__).parent / "chat_templates"
VOCAB_SIZE = 448
"""Ids of every network, of which the last have no token."""
POSITIONS = 256
MERGES = 100
WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
TEXTS = (
    "Half of 9 litres are used. How many are left?",
    "4.5 litres",
    "Is 3 more than 5, or is it less than that?",
    "system user assistant Date: November 2026",
    "Reasoning: medium. Valid channels: analysis, commentary, final.\n\n",
)
THINKING = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """Contents of a family's checkpoints.

    Attributes:
      template: its file.
      special: its special tokens.
      end: of a sequence, as tokenizer_config.json names it.
      ends: all that end a completion, as generation_config.json has them.
      begin: of a sequence; None has none.
      begins: whether the tokenizer puts it before a text.
      pad: None has none.
      pieces: whether its tokens are pieces as SentencePiece has them, with a token for each byte,
        and not bytes.
      spaced: whether a text of pieces begins with a space.
      added: tokens that are none of a text's merges, and not special.
    """

    template: str
    special: tuple[str, ...]
    end: str
    ends: tuple[str, ...]
    begin: str | None = None
    begins: bool = False
    pad: str | None = None
    pieces: bool = False
    spaced: bool = False
    added: tuple[str, ...] = ()


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = Family("qwen2", QWEN, QWEN[2], QWEN[2::-2], pad=QWEN[0])
QWEN3 = Family("qwen3", QWEN, QWEN[2], QWEN[2::-2], pad=QWEN[0], added=THINKING)
LLAMA = tuple(
    f"<|{name}|>"
    for name in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
)
DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>"
    for name in ("begin▁of▁sentence", "end▁of▁sentence", "▁pad▁", "User", "Assistant")
)
KIMI = tuple(f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle", "end"))
GLM = tuple(f"<|{name}|>" for name in ("endoftext", "system", "user", "assistant", "observation"))
HARMONY = tuple(
    f"<|{name}|>"
    for name in (
        *("startoftext", "endoftext", "start", "end", "message", "channel", "return", "call"),
    )
)
GEMMA = ("<start_of_turn>", "<end_of_turn>")
SENTENCE = ("<s>", "</s>")

FAMILIES = {
    "llama": Family("llama", LLAMA, LLAMA[4], (LLAMA[1], LLAMA[4]), LLAMA[0], begins=True),
    "mistral": Family(
        "mistral",
        ("[INST]", "[/INST]"),
        *(SENTENCE[1], SENTENCE[1:], SENTENCE[0]),
        begins=True,
        pieces=True,
    ),
    "mixtral": Family(
        "mixtral",
        (),
        *(SENTENCE[1], SENTENCE[1:], SENTENCE[0]),
        begins=True,
        pieces=True,
        spaced=True,
    ),
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    # One token begins a sequence and ends it.
    "olmoe": Family(
        "olmoe",
        ("<|endoftext|>", "<|padding|>"),
        *("<|endoftext|>", ("<|endoftext|>",), "<|endoftext|>"),
        pad="<|padding|>",
        added=("|||EMAIL_ADDRESS|||",),
    ),
    "olmo3": Family("olmo3", QWEN, QWEN[0], QWEN[2::-2], pad=QWEN[0]),
    "deepseek_v3": Family(
        "deepseek_v3",
        DEEPSEEK,
        *(DEEPSEEK[1], DEEPSEEK[1:2], DEEPSEEK[0]),
        begins=True,
        pad=DEEPSEEK[2],
        added=THINKING,
    ),
    "kimi_k2": Family(
        "kimi_k2",
        ("[BOS]", "[EOS]", "[PAD]", *KIMI),
        *("[EOS]", ("[EOS]", KIMI[4]), "[BOS]"),
        pad="[PAD]",
    ),
    # No token ends a turn: the one that begins the next does.
    "glm4_moe": Family(
        "glm4_moe",
        ("[gMASK]", "<sop>", *GLM),
        *(GLM[0], (GLM[0], GLM[2], GLM[4])),
        pad=GLM[0],
        added=THINKING,
    ),
    "gpt_oss": Family(
        "gpt_oss",
        HARMONY,
        *(HARMONY[6], (HARMONY[6], HARMONY[1], HARMONY[7]), HARMONY[0]),
        pad=HARMONY[1],
    ),
    "gemma3": Family(
        "gemma3",
        ("<pad>", *GEMMA),
        *("<eos>", ("<eos>", GEMMA[1]), "<bos>"),
        begins=True,
        pad="<pad>",
        pieces=True,
    ),
    # What it is asked to go on with is a thought that has begun.
    "qwen3_next": replace(QWEN3, template="qwen3_next"),
    "smollm3": Family("smollm3", QWEN, QWEN[2], QWEN[2:], pad=QWEN[2], added=THINKING),
}
"""By the name of a network under tests/moe/huggingface."""
TWO_KINDS = ("deepseek_v3", "gemma3", "gpt_oss", "olmo3", "qwen3_next", "smollm3")
"""Families whose layers are of two kinds: their networks have one of each here, all others one."""


def write_family(name: str, folder: Path) -> Path:
    """A checkpoint of random weights."""
    family = FAMILIES[name]
    folder.mkdir(parents=True)
    made = pipeline(family)
    made.save(str(folder / "tokenizer.json"))
    config, architecture, weights = _network(name, folder)
    ends = [made.token_to_id(end) for end in family.ends]
    begin, pad = (None if t is None else made.token_to_id(t) for t in (family.begin, family.pad))
    ids = {"bos_token_id": begin, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    ids |= {"pad_token_id": pad}
    huggingface.save(folder, config, weights, architecture=architecture, about=ids)
    _write(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.6})
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.begin}
    stated |= {"eos_token": family.end, "pad_token": family.pad}
    template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    # Both places are in use.
    if family.pieces:
        stated["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(folder / "tokenizer_config.json", stated)
    return folder


def _network(name: str, folder: Path) -> Any:
    """As the small one of the family, with fewer layers and more ids and positions."""
    options = json.loads((NETWORKS / name / "config.json").read_text())
    layers = 2 if name in TWO_KINDS else 1
    if layers == 1:
        single = {
            "first_k_dense_replace": 0,
            "mlp_only_layers": [],
            "layer_types": ["full_attention"],
            "use_sliding_window": False,
        }
        options |= {option: value for option, value in single.items() if option in options}
    for option in ("layer_types", "no_rope_layers"):
        if option in options:
            options[option] = options[option][:layers]
    options["num_hidden_layers"] = layers
    options |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "dtype": "float32"}
    _write(folder / "config.json", options)
    config = huggingface.config_from(folder)
    return config, options["architectures"][0], random_weights(config, 0)


def pipeline(family: Family) -> tokenizers.Tokenizer:
    """The tokenizer of a family."""
    made = _of_pieces(family) if family.pieces else _of_bytes()
    made.add_special_tokens([token for token in family.special if not _known(made, token)])
    made.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    if family.begins and family.begin is not None:
        begins = processors.TemplateProcessing(
            single=f"{family.begin} $A", special_tokens=[(family.begin, _id(made, family.begin))]
        )
        own = [] if family.pieces else [processors.ByteLevel(trim_offsets=False)]
        made.post_processor = processors.Sequence([*own, begins])
    return made


def _of_bytes() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def _of_pieces(family: Family) -> tokenizers.Tokenizer:
    assert family.begin is not None
    space = normalizers.Replace(" ", "▁")
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if family.spaced else space
    learned = tokenizers.Tokenizer(models.BPE())
    learned.normalizer = normalizer
    letters = sorted(set("".join(TEXTS).replace(" ", "▁")))
    trainer: Any = BpeTrainer(vocab_size=len(letters) + MERGES, show_progress=False)
    learned.train_from_iterator(TEXTS, trainer)
    content = json.loads(learned.to_str())["model"]
    result = sorted(content["vocab"], key=content["vocab"].__getitem__)
    first = ["<unk>", family.begin, family.end, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: n for n, token in enumerate([*first, *result])}
    merges = [tuple(pair) for pair in content["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizer
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(
        [*parts, *([decoders.Strip(" ", 1, 0)] if family.spaced else [])]
    )
    made.add_special_tokens(first[:3])
    return made


def _known(made: tokenizers.Tokenizer, token: str) -> bool:
    return made.token_to_id(token) is not None


def _id(made: tokenizers.Tokenizer, token: str) -> int:
    result = made.token_to_id(token)
    assert result is not None
    return result


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}, indent=2))
