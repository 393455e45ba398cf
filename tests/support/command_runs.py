"""Runs that are as small as a run can be, and what they print."""

import json
from dataclasses import replace

from moe.config import PRESETS, ModelConfig

MICRO = ModelConfig(
    vocab_size=1,
    num_layers=1,
    d_model=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    num_experts=4,
    experts_per_token=2,
    d_expert=6,
)
# Presets of their own keep the compilations of these tests short.
PRESETS["micro"] = lambda vocab_size: replace(MICRO, vocab_size=vocab_size)
PRESETS["micro-wide"] = lambda vocab_size: replace(MICRO, vocab_size=vocab_size, d_expert=10)

SETTINGS = {
    "model": "micro",
    "steps": 2,
    "warm-start-steps": 2,
    "warm-start-batch": 4,
    "prompts": 4,
    "group-size": 4,
    "mini-batch": 8,
    "eval-prompts": 4,
    "eval-every": 2,
    "samples-every": 2,
    "sample-tokens": 3,
}
FLAGS = [f"--{name}={value}" for name, value in SETTINGS.items()]

IN_A_FRESH_PROCESS = (
    f"import sys, {__name__}; from jrl.train import main; sys.exit(main(sys.argv[1:]))"
)


def metrics(path):
    """The lines of metrics.jsonl without what may differ between equal runs."""
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    timings = ("timing_s/", "perf/")
    return [
        {name: value for name, value in line.items() if not name.startswith(timings)}
        for line in lines
    ]


def one_line(captured):
    """The one line on standard error."""
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    return lines[0]
