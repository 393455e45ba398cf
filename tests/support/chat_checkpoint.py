"""A small checkpoint made as Qwen's are: byte-level tokens, nothing before a prompt, two tokens
that end a turn, and a template that writes a conversation between them."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.tokenizer import Tokenizer

END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 310
"""Ids of the network, of which the last have no token."""

TEMPLATE = """\
{%- if tools %}
    {{- raise_exception("no tools") }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("no turn for a " + message.role) }}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
QUESTIONS = [
    ("Ann has 3 pens and buys 4 more. How many pens has she?", "7"),
    ("A box holds 12 eggs. Five are broken. How many are whole?", "7"),
    ("Two cars drive 2.5 km each. How far together, in km?", 5.0),
    ("Half of 9 litres are used. How many litres are left?", 4.5),
]


def pipeline() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEMPLATE, *(question for question, _ in QUESTIONS)], trainer)
    made.add_special_tokens([END, START, TURN])
    return made


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """The files of the tokenizer, the fields of tokenizer_config.json changed; None leaves one
    out."""
    folder.mkdir(parents=True, exist_ok=True)
    made = pipeline()
    made.save(str(folder / "tokenizer.json"))
    stated = {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "eos_token": TURN,
        "pad_token": END,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    ends = [made.token_to_id(TURN), made.token_to_id(END)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def chat_tokenizer(folder: Path, **config: Any) -> Tokenizer:
    return checkpoint_tokenizer(write_tokenizer(folder, **config), VOCAB_SIZE)
