"""A checkpoint of each family goes through all that a user does, and `transformers` generates from
what comes out what we do, token for token."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from family_chain import ANSWER, go_through
from family_files import VOCAB_SIZE
from programs import mesh_of

from jrl.text.json_tokenizer import checkpoint_tokenizer
from moe import huggingface

RECORD = json.loads((Path(__file__).parent / "greedy_of_families.json").read_text())
"""Of `transformers` by greedy_of_families.py, with which PEFT's adapters gave the same."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORD)
def test_greedy_tokens_at_the_end_of_all_stages_are_those_of_transformers(name, tmp_path):
    recorded = RECORD[name]
    found = go_through(name, tmp_path)
    for way, written in found.items():
        assert written.prompt == recorded["prompt"]
        assert written.completion == recorded[way]
    taught = found["taught"].completion
    tokenizer = checkpoint_tokenizer(found["taught"].exported, VOCAB_SIZE)
    # It has learned the answer, and where to end.
    assert tokenizer.decode(taught).endswith(ANSWER)
    assert taught[-1] in tokenizer.stop_ids
    before, after = (_weights(written.exported) for written in found.values())
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True))


def _weights(checkpoint):
    return jax.tree.leaves(huggingface.load(checkpoint, mesh_of("dp1"), dtype="float32")[1])
