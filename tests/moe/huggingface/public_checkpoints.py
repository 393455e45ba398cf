"""Small checkpoints of public architectures, made by make_fixtures.py, and copies to spoil."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
from programs import mesh_of
from safetensors.numpy import load_file

from moe import huggingface

FIXTURES = Path(__file__).parent
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
# Without experts, and with them.
QUICK = ["llama", "qwen3_moe"]
LATER = ["olmo3", "smollm3", "glm4_moe", "gpt_oss", "gemma3", "qwen3_next"]
"""Architectures whose every choice is decoded with too, on a mesh."""
# A layout that splits heads, dense hidden units, experts and rows.
MESH, DENSE_MESH = "tp2 dp2 / ep4", "tp2 dp2"


@functools.cache
def golden(name):
    with np.load(FIXTURES / name / "golden.npz") as file:
        return {key: file[key] for key in file}


def mesh_for(name):
    """`MESH`, without its axis of experts for a network that has none."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    has_experts = any("experts" in option and value for option, value in config.items())
    return MESH if has_experts else DENSE_MESH


@functools.cache
def loaded(name, layout="dp1"):
    return huggingface.load(FIXTURES / name, mesh_of(layout), dtype="float32")


def tensors(folder):
    return {key: value for file in folder.glob("*.safetensors") for key, value in _read(file)}


def _read(file):
    return load_file(file).items()


def copy_of(name, path):
    """A checkpoint that a test may spoil."""
    shutil.copytree(FIXTURES / name, path)
    return path


def change_options(folder, **changed):
    options = json.loads((folder / "config.json").read_text()) | changed
    kept = {name: value for name, value in options.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
