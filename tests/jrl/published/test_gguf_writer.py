"""Checkpoints written as GGUF come back as they were."""

import json

import gguf
import numpy as np
import pytest
from chat_checkpoint import VOCAB_SIZE, write_tokenizer
from programs import random_weights
from safetensors.numpy import load_file
from test_gguf import COMMON, KINDS

from jrl.published.base_name import license_in, write_license
from jrl.published.gguf import convert
from jrl.published.gguf_file import GgufFile
from jrl.published.gguf_tokenizer import tokenizer_files
from jrl.published.gguf_vocabulary import check_vocabulary, vocabulary_metadata
from jrl.published.gguf_writer import Description, write_gguf
from jrl.text.json_tokenizer import checkpoint_tokenizer
from moe import huggingface

ABOUT = Description("run", "OWNER/base")
WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
WRITTEN = {
    **{kind: KINDS[kind][:2] for kind in ("llama", "qwen2", "qwen3", "qwen3moe")},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "yarn": (
        "qwen3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "gemma3": ("gemma3_text", {**KINDS["gemma3"][1], "num_hidden_layers": 7}),
}


def make_checkpoint(folder, model_type, options, dtype="float32"):
    """A checkpoint with random weights and a tokenizer; returns its network."""
    folder.mkdir()
    stated = {**COMMON, "vocab_size": VOCAB_SIZE, **options, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(stated))
    config = huggingface.config_from(folder)
    (folder / "config.json").unlink()
    huggingface.save(folder, config, random_weights(config, 0), dtype=dtype)
    write_tokenizer(folder)
    return config


def come_back(folder, tmp_path, **settings):
    """The folder that a checkpoint's file is converted into."""
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, ABOUT, **settings)
    convert(path, tmp_path / "after")
    return tmp_path / "after"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WRITTEN)
def test_network_and_weights_come_back(tmp_path, kind, dtype):
    make_checkpoint(tmp_path / "before", *WRITTEN[kind], dtype)
    after = come_back(tmp_path / "before", tmp_path)
    expected = huggingface.config_from(tmp_path / "before")
    assert huggingface.config_from(after) == expected and expected.dtype == dtype
    before, read = (load_file(f / "model.safetensors") for f in (tmp_path / "before", after))
    assert before.keys() == read.keys()
    for name in before:
        # Gemma's norms have one added in GGUF, and lose the last digit of a float32 there.
        is_rounded = kind == "gemma3" and "norm" in name
        np.testing.assert_allclose(
            read[name].astype(np.float32),
            before[name].astype(np.float32),
            rtol=0,
            atol=2**-22 if is_rounded else 0.0,
        )


def test_quantised_matrices_have_the_values_of_their_blocks(tmp_path):
    make_checkpoint(tmp_path / "before", *WRITTEN["qwen3moe"])
    after = load_file(
        come_back(tmp_path / "before", tmp_path, quantise="q8_0") / "model.safetensors"
    )
    before = load_file(tmp_path / "before" / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q8_0
    kept = []
    for name, values in before.items():
        is_quantised = values.ndim == 2 and values.shape[1] % 32 == 0 and "mlp.gate." not in name
        expected = gguf.dequantize(gguf.quantize(values, kind), kind) if is_quantised else values
        np.testing.assert_array_equal(after[name], expected, err_msg=name)
        kept += [] if is_quantised else [name]
    assert any("mlp.gate." in name for name in kept) and any("norm" in name for name in kept)
    assert GgufFile.read(tmp_path / "model.gguf").metadata["general.file_type"] == 7


def test_tokenizer_template_and_names_come_back(tmp_path):
    folder = tmp_path / "before"
    make_checkpoint(folder, *WRITTEN["llama"])
    third = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["!"]
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    stated = json.dumps({"eos_token_id": [*ends, third]})
    (folder / "generation_config.json").write_text(stated)
    license = {"license": "other", "license_name": "own", "license_link": "https://own.example"}
    write_license(folder, license)
    after = come_back(folder, tmp_path)
    ours, theirs = (checkpoint_tokenizer(f, VOCAB_SIZE) for f in (folder, after))
    for text in ("Ann has 3 pens.", "  été \n\n水<|im_end|>x", "12345 it's"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.usage.chat_template == theirs.usage.chat_template
    assert set(ours.stop_ids) == set(theirs.stop_ids) == {*ends, third}
    assert ours.pad_id == theirs.pad_id
    assert ours.unused_ids == theirs.unused_ids != set()
    assert ours.prefix == theirs.prefix and ours.special_ids == theirs.special_ids
    stated = json.loads((after / "config.json").read_text())
    assert stated["_name_or_path"] == "OWNER/base"
    assert license_in(after) == license
    assert GgufFile.read(tmp_path / "model.gguf").metadata["general.name"] == "run"


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("olmo3", {}, "Olmo3ForCausalLM cannot be written as GGUF; supported: LlamaForCausalLM"),
        ("mistral", {"sliding_window": 16}, "llama cannot express sliding_window=16"),
        ("qwen3_moe", {**KINDS["qwen3moe"][1], "norm_topk_prob": False}, "renormalise=False"),
        (
            "gemma3_text",
            {**KINDS["gemma3"][1], "rope_local_base_freq": 20_000.0},
            "gemma3 cannot express window_rope_base=20000.0",
        ),
        ("gemma3_text", {**KINDS["gemma3"][1], "query_pre_attn_scalar": 4}, "attention_scale=0.5"),
    ],
)
def test_network_that_gguf_has_not_is_refused(tmp_path, model_type, options, message):
    make_checkpoint(tmp_path / "before", model_type, options)
    with pytest.raises(ValueError, match=message) as refusal:
        write_gguf(tmp_path / "before", tmp_path / "model.gguf", ABOUT)
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def changed(pipeline, name):
    """A tokenizer.json with another part."""
    digits = {"type": "Digits", "individual_digits": False}
    stripping = [{**token, "lstrip": True} for token in pipeline["added_tokens"]]
    changes = {
        "unigram": {"model": {"type": "Unigram", "vocab": []}},
        "digits": {"pre_tokenizer": digits},
        "lower": {"normalizer": {"type": "Lowercase"}},
        "suffix": {"model": {**pipeline["model"], "end_of_word_suffix": "</w>"}},
        "strip": {"added_tokens": stripping},
    }
    return {**pipeline, **changes[name]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("unigram", "its model is Unigram, and GGUF has BPE alone"),
        ("digits", "llama.cpp has no such pre-tokenization"),
        ("lower", "GGUF has no such normalisation"),
        ("suffix", "GGUF has no such end of words"),
        ("strip", "GGUF has no such stripping of tokens"),
    ],
)
def test_tokenizer_that_gguf_has_not_is_refused(tmp_path, change, message):
    folder = tmp_path / "before"
    make_checkpoint(folder, *WRITTEN["llama"])
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(changed(pipeline, change)))
    with pytest.raises(ValueError, match=message):
        write_gguf(folder, tmp_path / "model.gguf", ABOUT)
    assert not (tmp_path / "model.gguf").exists()


def test_folder_without_tokenizer_and_existing_file_are_refused(tmp_path):
    make_checkpoint(tmp_path / "before", *WRITTEN["llama"])
    (tmp_path / "there.gguf").touch()
    with pytest.raises(ValueError, match=r"there\.gguf already exists: choose another name"):
        write_gguf(tmp_path / "before", tmp_path / "there.gguf", ABOUT)
    (tmp_path / "before" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"it has no tokenizer\.json"):
        write_gguf(tmp_path / "before", tmp_path / "model.gguf", ABOUT)


SINGLE = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["  ", "ab", "bc", "abc", "\u2581", "a", "b", "c", "\u2581a", "\u2581ab"]
PIECES = {
    "ggml.model": "llama",
    "ggml.token_type": [3, 3, 3, 2, *[6] * 256, 4, *[1] * (len(WORDS) - 1)],
    "ggml.unknown_token_id": 3,
    "ggml.bos_token_id": 2,
    "ggml.eos_token_id": 1,
    "ggml.padding_token_id": 0,
}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_comes_back(tmp_path, kind, space_prefix):
    """Scores become merges in a folder, and scores again in the file."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *SINGLE, *WORDS]
    size, metadata = len(tokens), {f"tokenizer.{name}": value for name, value in PIECES.items()}
    metadata |= {
        "general.architecture": kind,
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.scores": [-float(index) for index in range(size)],
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }
    for name, content in tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    written = vocabulary_metadata(tmp_path, size) | {"general.architecture": kind}
    check_vocabulary(tmp_path, written)
    if kind == "gemma3":  # read as an ordinary piece of two spaces
        tokens[260] = "\u2581\u2581"
        metadata["tokenizer.ggml.token_type"] = [
            *PIECES["ggml.token_type"][:260],
            *[1] * len(WORDS),
        ]
    metadata["tokenizer.ggml.tokens"] = tokens
    for name in ("tokens", "token_type", "add_space_prefix", "bos_token_id", "padding_token_id"):
        assert written[f"tokenizer.ggml.{name}"] == metadata[f"tokenizer.ggml.{name}"], name
    assert written["tokenizer.ggml.add_bos_token"] is True


def test_added_token_of_spaces_is_written_as_spaces(tmp_path):
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *SINGLE, *WORDS]
    metadata = {f"tokenizer.{name}": value for name, value in PIECES.items()}
    metadata |= {"general.architecture": "gemma3", "tokenizer.ggml.tokens": tokens}
    for name, content in tokenizer_files(metadata).items():
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "tokenizer.json"
    pipeline = json.loads(path.read_text())
    double = {"id": 260, "content": "\u2581\u2581", "special": False}
    pipeline["added_tokens"].append({**pipeline["added_tokens"][0], **double})
    path.write_text(json.dumps(pipeline))
    written = vocabulary_metadata(tmp_path, len(tokens)) | {"general.architecture": "gemma3"}
    check_vocabulary(tmp_path, written)
    assert written["tokenizer.ggml.tokens"][260] == "  "
    assert written["tokenizer.ggml.token_type"][260] == 4
