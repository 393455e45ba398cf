"""What the planner is told of a run, and what the dry run shows of its answer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jrl.config.run import RunConfig
from jrl.recipes import Grpo
from jrl.trainer.setup.dry_run import prediction
from jrl.trainer.setup.memory import (
    ACTIVATIONS,
    head_copy_bytes,
    memory,
    run_memory,
    weight_bytes,
)
from jrl.trainer.setup.plan_inputs import batch_of, method_of, planner_args
from jrl.trainer.setup.planner import (
    OVERLAPS,
    time_of_update,
    times_with_overlap,
)
from jrl.trainer.setup.setup import build_setup
from moe.attention.context_parallel import context_of
from moe.config import Model, tiny_dense
from moe.execution import Execution
from moe.head import logprobs_and_entropy
from moe.placement import specs
from moe.planner.memory import memory as planned_memory
from moe.weights import cast_shapes
from sharding.costs.hardware import HARDWARE, find_hardware
from sharding.folding import Layout, fold


@pytest.fixture(scope="module")
def setup():
    return build_setup(RunConfig(layout="tp2 dp2 / ep4"), Grpo())


def asked(setup):
    return setup.model, setup.geometry, setup.run


def method(setup):
    return method_of(Model(setup.model, setup.mesh), batch_of(setup.geometry), setup.run)


def test_the_batch_is_the_mini_batch(setup):
    batch, layout = batch_of(setup.geometry), setup.mesh.layout
    assert batch.rows == setup.recipe.mini_batch_size
    assert batch.time == setup.prompt_length + setup.response_length
    assert batch.num_micro_batches(layout) == setup.geometry.num_micro_batches


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_those_that_the_dry_run_counts(setup, dtype):
    setup = replace(setup, model=replace(setup.model, dtype=dtype))
    needs, counted = planned_memory(*planner_args(*asked(setup))), memory(setup)
    assert needs.weights == counted["weights"] == weight_bytes(Model(setup.model, setup.mesh))
    masters = counted.get("float32 masters", 0)
    assert needs.optimizer == masters + counted["optimizer state"] - 8  # step counters
    assert needs.gradients == counted["gradients"]


def test_settings_of_the_execution_reach_the_plan(setup):
    assert method(setup).dispatch == "all_gather"
    execution = replace(setup.model.execution, remat="full", dispatch="all_to_all")
    other = replace(setup, model=replace(setup.model, execution=execution, dtype="bfloat16"))
    found = method(other)
    assert found.execution == replace(execution, context="gather", attention="plain")
    assert found.itemsize == 2
    assert (method(setup).storage, found.storage) == ("float32", "bfloat16")
    kept, all_kept = (run_memory(one).phases["update"][ACTIVATIONS] for one in (other, setup))
    assert kept < all_kept / 4
    slower, faster = (time_of_update(*asked(one), HARDWARE["h100"]) for one in (other, setup))
    assert slower.products > faster.products


def test_attention_crosses_devices_as_the_run_will_have_it(setup):
    few, many = (
        replace(setup, mesh=fold(Layout.parse("cp4"), jax.devices()[:4]), model=model)
        for model in (
            replace(setup.model, num_heads=8, num_kv_heads=1),
            replace(setup.model, num_heads=8, num_kv_heads=8),
        )
    )
    for each in (few, many):
        assert method(each).context == context_of(Model(each.model, each.mesh))
    assert [method(each).context for each in (few, many)] == ["gather", "ulysses"]


def test_scores_are_kept_in_memory_where_no_kernel_of_gpus_serves(setup):
    halves = replace(setup, model=replace(setup.model, dtype="bfloat16"))
    found = {
        platform: method(
            replace(halves, mesh=replace(halves.mesh, platform=platform))
        ).execution.attention
        for platform in ("cpu", "tpu", "gpu", None)
    }
    assert found == {"cpu": "plain", "tpu": "plain", "gpu": None, None: None}


def test_prediction_shows_time_and_utilisation(setup):
    shown = prediction(setup, HARDWARE["h100"])
    assert float(shown["seconds"]) == pytest.approx(
        time_of_update(*asked(setup), HARDWARE["h100"]).total, rel=1e-2
    )
    assert shown["model FLOPs utilisation"].endswith("%")


def test_overlap_counts_where_it_is_on_and_is_offered_where_it_could_be(setup, monkeypatch):
    h100, executed = HARDWARE["h100"], setup.model.execution

    def of(**changes):
        return replace(setup, model=replace(setup.model, execution=replace(executed, **changes)))

    offered = times_with_overlap(*asked(setup), h100)
    assert set(offered) == set(OVERLAPS)
    for name, takes in offered.items():
        assert takes == time_of_update(*asked(of(**{name: True})), h100)
    both = of(**dict.fromkeys(OVERLAPS, True))
    assert times_with_overlap(*asked(both), h100) == {}
    plain, early = time_of_update(*asked(setup), h100), offered["overlap_grad_reduce"]
    assert early.communication["gradients"] != plain.communication["gradients"]
    # A CPU sends and computes one after the other.
    laptop = HARDWARE["laptop"]
    chunks = of(expert_chunks=2)
    assert (
        time_of_update(*asked(chunks), laptop).exposed
        >= time_of_update(*asked(setup), laptop).exposed
    )
    # Nothing is offered that would be refused.
    piped = build_setup(RunConfig(layout="pp2"), Grpo())
    assert "overlap_grad_reduce" not in times_with_overlap(*asked(piped), h100)


def test_kinds_of_devices():
    assert find_hardware("NVIDIA H100 80GB HBM3") is HARDWARE["h100"]
    assert find_hardware("NVIDIA A100-SXM4-80GB") is HARDWARE["a100"]
    assert find_hardware("NVIDIA L40S") is HARDWARE["l40s"]
    assert find_hardware("NVIDIA GB200") is HARDWARE["gb200"]
    kinds = ("TPU v5", "TPU v5p", "TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU7x")
    names = ("v5p", "v5p", "v5e", "v5e", "v6e", "v7x")
    assert [find_hardware(kind) for kind in kinds] == [HARDWARE[name] for name in names]
    assert find_hardware("TPU v4") is None
    assert find_hardware(jax.devices()[0].device_kind) is None
    assert find_hardware("laptop computer") is None


@pytest.mark.parametrize(
    ("head", "chunk", "copied"),
    [("tied", 256, True), ("tied", 1024, False), ("tied", None, False), ("untied", 256, False)],
)
def test_transpose_of_tied_head_is_counted_as_compiled(head, chunk, copied):
    execution = Execution(vocab_chunk=chunk)
    config = replace(tiny_dense(1024), head=head, d_model=512, execution=execution)
    mesh = fold(Layout(), jax.devices()[:1])
    model, rows = Model(config, mesh), PartitionSpec(mesh.axes)

    def scores(weights, x, tokens):
        return logprobs_and_entropy(weights, x, tokens, model)[0]

    mapped = jax.shard_map(
        scores, mesh=mesh.mesh, in_specs=(specs(model), rows, rows), out_specs=rows
    )
    states = jax.ShapeDtypeStruct((4, config.d_model), jnp.float32)
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(mapped).lower(cast_shapes(config), states, tokens).compile()
    counted = head_copy_bytes(model)
    assert counted == 4 * 512 * 1024 * copied
    # Logits and states of four tokens, a chunk of the columns; jaxlib 0.12 copies the head twice.
    rest = compiled.memory_analysis().temp_size_in_bytes - counted
    assert 0 <= rest < 4 * 512 * 1024 * (1.6 if copied else 0.6)
