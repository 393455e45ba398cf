"""Programs of several devices are compiled with the options of these devices."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from programs import mesh_of

from jrl.rollout.decoding.mesh_backend import advance
from jrl.rollout.decoding.packed_prompts import run_packed, score_packed
from jrl.rollout.decoding.prefill import admit, admit_prefilled
from jrl.rollout.decoding.slots import Decoder
from jrl.trainer.learner.update import update
from jrl.trainer.scoring import PromptLayout, Scorer
from moe.config import ModelConfig
from moe.disaggregated.programs import attention_half, experts_half
from moe.execution import Execution
from sharding.folding import Layout, fold_abstract
from sharding.sharded_jit import (
    ONE_GRAPH,
    OVERLAP,
    REQUIRED,
    DeviceJit,
    MeshJit,
    jit_onto,
    jit_sharded,
)

ROOT = Path(__file__).parents[2]
WITHOUT_COLLECTIVES = {
    # Elementwise, or each row by itself.
    "jrl/trainer/evaluation/evaluate.py": {"_rewards"},
    "jrl/trainer/learner/learner.py": {"_copy_leaves"},
    "jrl/rollout/collection/collect.py": {"_clear_unfinished"},
    "jrl/rollout/packing.py": {"clear_idle_rows", "_counts", "_mask_empty_slots"},
    "jrl/rollout/decoding/slots.py": {
        "halt",
        "_resize",
        "recent_tokens",
        "row_of",
        "_compiled_zeros",
    },
    "jrl/rollout/decoding/packed_prompts.py": {"copy_to_cache"},
    "jrl/rollout/decoding/extension.py": {"copy_row"},
    "jrl/rollout/decoding/prefill.py": {"admit_cached"},
    "jrl/rollout/decoding/split_backend.py": {"_read_step_inputs"},
    "moe/disaggregated/runner.py": {"_broadcast_program", "_zeros_program"},
    # Permutes alone; they are no sums.
    "moe/disaggregated/m2n.py": {"_permute_program"},
    # Traced inside other programs.
    "moe/kernels/mosaic.py": {""},
    # The programs with options.
    "sharding/sharded_jit.py": {"jit_with"},
}
"""Functions that `jax.jit` compiles without options, by file."""


def jitted_by_jax(path):
    """Names of the functions of a file that `jax.jit` compiles, or that call it."""
    text, names = path.read_text(), set()
    if "jax.jit" not in text:
        return names

    def visit(node, name):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.jit":
            names.add(name)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                visit(child, child.name)
            elif isinstance(child, ast.Assign) and not name:
                visit(child, ast.unparse(child.targets[0]))
            else:
                visit(child, name)

    visit(ast.parse(text), "")
    return names


def test_programs_with_collectives_have_options():
    result = {}
    for package in ("jrl", "moe", "sharding"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("jrl/losses", "jrl/faults", "jrl/conformance")) and (
                names := jitted_by_jax(path)
            ):
                result[name] = names
    assert set(result) == set(WITHOUT_COLLECTIVES)
    for name, names in result.items():
        assert names <= WITHOUT_COLLECTIVES[name], name


@pytest.mark.parametrize("program", [update, admit, run_packed, score_packed])
def test_passes_over_many_tokens_overlap(program):
    mesh = fold_abstract(Layout.parse("dp2 / ep2"), "gpu")
    options = program.jit_for(mesh), program.jit_with(REQUIRED["gpu"] | OVERLAP["gpu"])
    assert options[0] is options[1]


@pytest.mark.parametrize(
    ("dispatch", "overlaps"),
    [
        *((name, True) for name in (None, "all_to_all", "all_gather", "two_level")),
        *((name, False) for name in ("ragged", "two_level_ragged")),
    ],
)
def test_ragged_dispatch_does_not_overlap_on_gpus(dispatch, overlaps):
    mesh = fold_abstract(Layout.parse("dp2 / ep2"), "gpu")
    config = ModelConfig(vocab_size=8, num_experts=4, execution=Execution(dispatch=dispatch))
    scorer, decoder = Scorer(config, mesh, PromptLayout(1, 1)), Decoder(config, mesh, 0, ())
    expected = REQUIRED["gpu"] | (OVERLAP["gpu"] if overlaps else {})
    for program, record in ((update, scorer), (score_packed, decoder), (admit, decoder)):
        assert program.settings_of((record,)) == expected
    assert advance.settings_of((decoder,)) == REQUIRED["gpu"] | ONE_GRAPH["gpu"]


@pytest.mark.parametrize("program", [admit_prefilled, attention_half, experts_half])
def test_programs_without_overlap_have_required_options(program):
    mesh = fold_abstract(Layout.parse("dp2 / ep2"), "gpu")
    assert program.jit_for(mesh) is program.jit_with(REQUIRED["gpu"])


def test_jit_options_follow_arrays_and_shardings(monkeypatch):
    monkeypatch.setitem(REQUIRED, "cpu", {"xla_of_nobody": True})
    unknown = pytest.raises(jax.errors.JaxRuntimeError, match=r"No such compile option.*of_nobody")
    one, two = (NamedSharding(mesh_of(name).mesh, PartitionSpec()) for name in ("dp1", "dp2"))
    double = DeviceJit(lambda x: 2 * x)
    x = jnp.arange(3)
    assert double(x)[2] == double.lower(x).compile()(x)[2] == 4
    assert jit_onto(lambda x: x + 1, one)(x)[2] == jit_sharded(lambda x: x + 1, one)(x)[2] == 3
    with unknown:
        double(jax.device_put(x, two))
    # As a part of another program it has the options of that one.
    part = jit_onto(lambda x: x + 1, two)
    assert jax.jit(lambda x: double(part(x)))(x)[2] == 6
    for compiled in (jit_onto(lambda x: x + 1, two), jit_sharded(lambda x: x + 1, two)):
        with unknown:
            compiled(x)
    assert isinstance(update, MeshJit)
