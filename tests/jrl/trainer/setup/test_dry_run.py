import io
import json
import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from chat_checkpoint import END, TEMPLATE, TURN
from jax.sharding import PartitionSpec
from rich.console import Console
from served import write_checkpoint
from small_runs import small_model, small_recipe, small_run, small_setup
from whole_network import before_responses

from jrl.config.flags import parse_arguments
from jrl.config.run import RunConfig
from jrl.recipes import Dapo, Grpo, Ppo, Vapo
from jrl.rollout.decoding.slots import abstract_pool, empty_pool
from jrl.rollout.resharding import rollout_policy
from jrl.trainer.scoring import logprobs_and_choices_of
from jrl.trainer.setup.dry_run import (
    batch_arithmetic,
    parameters,
    print_dry_run,
    print_first_input,
    readable_bytes,
)
from jrl.trainer.setup.memory import (
    cache_bytes,
    logits_bytes,
    memory,
    unstacked_bytes,
    weight_bytes,
)
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.state import abstract, init_adapters, init_state, init_weights
from moe import placement, weights
from moe.adapters import select_trained
from moe.architecture.attention import GatedDeltaNet, MultiHeadLatentAttention
from moe.config import Model, tiny
from moe.execution import Execution
from moe.head import logits_of
from sharding.folding import Layout, fold_abstract

LAYOUT = "tp2 dp2 / ep4"


def on_one_device(tree):
    """Bytes that the first device holds of a tree of arrays."""
    device = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


def local_bytes(setup, function, *arguments):
    """Bytes on each device of what `function` gives inside the `jax.shard_map`, by tracing it."""
    mesh = setup.mesh
    sizes = []

    def local(weights, tokens, valid):
        out = function(weights, tokens, valid)
        sizes.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out)))
        return jnp.zeros(())

    rows = PartitionSpec(mesh.dp)
    jax.eval_shape(
        jax.shard_map(
            local,
            mesh=mesh.mesh,
            in_specs=(placement.specs(Model(setup.model, mesh)), rows, rows),
            out_specs=PartitionSpec(),
        ),
        weights.shapes(setup.model),
        *arguments,
    )
    return sizes[-1]


def tokens_of(rows, time):
    shape = (rows, time)
    return jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)


def cache_of(setup):
    """Bytes of the cache of a run."""
    columns = setup.prompt_length + setup.response_length
    slots = setup.geometry.slots(setup.run.slots)
    return cache_bytes(Model(setup.model, setup.rollout_mesh), slots, columns)


def logits_of_pass(setup, rows):
    return logits_bytes(setup.model, setup.geometry, rows)


def with_critic_and_reference():
    return build_setup(RunConfig(layout=LAYOUT), replace(Ppo(), kl_coef=0.1))


@pytest.mark.slow
def test_memory_of_the_state_is_what_the_state_takes():
    setup = with_critic_and_reference()
    weights = init_weights(Model(setup.model, setup.mesh), setup.randomness.key("weights"))
    state = init_state(setup.networks, weights, setup.randomness.key("critic"))
    needs = memory(setup)
    assert state.critic is not None
    assert needs["weights"] == on_one_device(state.policy.weights)
    assert needs["critic"] == on_one_device(state.critic.weights)
    assert needs["reference"] == on_one_device(state.networks["reference"])
    assert needs["optimizer state"] == on_one_device(state.policy.opt_state)
    assert needs["critic's optimizer state"] == on_one_device(state.critic.opt_state)


@pytest.mark.slow
def test_memory_of_the_cache_is_what_decoding_carries():
    setup = build_setup(
        RunConfig(layout=LAYOUT), replace(Grpo(), prompts=6, group_size=4, mini_batch=8)
    )

    engine = setup.sampler().engine
    pool = empty_pool(engine.decoder, engine.slots, engine.max_length)
    assert engine.slots == 24
    assert cache_of(setup) == on_one_device(pool.cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 4, "mla": MultiHeadLatentAttention(12, 5, 4, 7)},
        {"num_layers": 3, "delta": GatedDeltaNet((0, 1), 2, 4, 6, 5, 4)},
        {
            "head_dim": 64,
            "dtype": "bfloat16",
            "execution": Execution(decode_attention="mosaic"),
        },
    ],
    ids=["latent", "delta", "columns of a kernel"],
)
def test_memory_of_a_cache_of_other_things_is_that_of_them(changes):
    setup = small_setup(run=small_run(layout="tp2 dp2 / ep4"))
    setup = replace(setup, model=small_model(setup.tokenizer.vocab_size, **changes))
    engine = setup.sampler().engine
    cache = abstract_pool(engine.decoder, engine.slots, engine.max_length).cache
    parts = (
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(cache)
    )
    assert cache_of(setup) == sum(parts)


def test_memory_counts_results_of_decode_kernel():
    setup = small_setup(run=small_run(layout="tp2 dp2 / ep4", slots=8))
    plain = {"head_dim": 64, "dtype": "bfloat16"}
    setup = replace(setup, model=small_model(setup.tokenizer.vocab_size, **plain))
    assert "decode attention partials" not in memory(setup)
    execution = replace(setup.model.execution, decode_attention="mosaic")
    setup = replace(setup, model=replace(setup.model, execution=execution))
    config, columns = setup.model, setup.prompt_length + setup.response_length
    # Rows of few columns are not split: of each of four rows of a device and half of the heads the
    # result, 64 values in bfloat16.
    assert columns <= 128
    assert memory(setup)["decode attention partials"] == 4 * (config.num_heads // 2) * 64 * 2


@pytest.mark.slow
def test_memory_of_all_logits_is_what_a_sampler_that_truncates_asks_for():
    setup = build_setup(RunConfig(layout=LAYOUT), replace(Grpo(), top_k=5))
    execution = replace(setup.model.execution, vocab_chunk=7)
    setup = replace(setup, model=replace(setup.model, execution=execution))

    def score(weights, tokens, valid):
        x, _ = before_responses(
            weights, tokens, valid, setup.prompt_length, 1, setup.model, setup.mesh
        )
        return logits_of(weights, x, Model(setup.model, setup.mesh))

    time = setup.prompt_length + setup.response_length
    assert logits_of_pass(setup, rows=6) == local_bytes(setup, score, *tokens_of(6, time))


@pytest.mark.parametrize(
    ("vocab_size", "chunk", "columns"), [(39, 7, 7), (38, 99, 19), (39, None, 20)]
)
def test_memory_of_logits_is_that_of_a_chunk_of_columns(vocab_size, chunk, columns):
    setup = build_setup(RunConfig(layout=LAYOUT), Grpo())
    execution = replace(setup.model.execution, vocab_chunk=chunk)
    config = replace(setup.model, vocab_size=vocab_size, execution=execution)
    # 6 rows over dp 2; the tp ranks read their own columns for the tokens of both.
    bytes_of_chunk = 4 * 3 * setup.response_length * columns
    assert logits_bytes(config, setup.geometry, rows=6) == bytes_of_chunk


@pytest.mark.parametrize(("vocab_size", "share"), [(38, 19), (39, 39)])
def test_memory_of_a_vocabulary_is_a_part_where_tp_divides_it(vocab_size, share):
    mesh = fold_abstract(Layout.parse(LAYOUT))
    config, least = (tiny(size) for size in (vocab_size, 2))
    more = weight_bytes(Model(config, mesh)) - weight_bytes(Model(least, mesh))
    # Embedding and head, of 2 tokens one on each rank.
    assert more == 2 * 4 * config.d_model * (share - 1)


def test_memory_counts_the_largest_of_what_takes_turns():
    recipe = replace(Grpo(), prompts=8, group_size=4, mini_batch=16, micro_batch=8)
    run = RunConfig(eval_prompts=24, warm_start_batch=12)
    needs = memory(setup := build_setup(run, recipe))
    assert needs["gradients"] == 2 * needs["weights"]  # a sum and a summand
    assert needs["key/value cache"] == cache_of(setup)
    assert needs["logits of a forward pass"] == logits_of_pass(setup, rows=12)
    assert "critic" not in needs and "reference" not in needs

    needs = memory(build_setup(replace(run, eval_prompts=40, warm_start_steps=0), recipe))
    assert needs["key/value cache"] == cache_of(setup)
    assert needs["logits of a forward pass"] == logits_of_pass(setup, rows=8)

    needs = memory(build_setup(run, replace(recipe, micro_batch=None, kl_coef=0.1)))
    assert needs["gradients"] == needs["weights"]
    assert needs["logits of a forward pass"] == logits_of_pass(setup, rows=32)
    for first in ({"old_logprobs": "recompute"}, {"rejection": "geometric"}):
        needs = memory(build_setup(run, replace(recipe, **first)))
        assert needs["logits of a forward pass"] == logits_bytes(
            setup.model, setup.geometry, rows=32
        )
        assert "reference" not in needs


def test_memory_of_a_gradient_on_its_way_is_that_of_the_largest():
    """Twice in bfloat16, which is its float32; inside a group it has been cut before."""
    config = small_model(38, num_layers=2, d_expert=64)
    experts = 4 * math.prod(weights.shapes(config).layers.experts.gate_up.shape)
    name = "gradient sent in bfloat16"
    for layout, expected in (("dp4", experts), ("cp2 dp2", experts // 2), ("cp2", 0)):
        run = small_run(layout=layout, gradient_wire="bfloat16")
        setup = replace(small_setup(small_recipe(), run), model=config)
        assert memory(setup).get(name, 0) == expected
        plain = replace(setup, run=small_run(layout=layout))
        assert name not in memory(plain)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_adapters_is_that_of_what_learns(dtype):
    run = RunConfig(layout=LAYOUT, dtype=dtype, lora_rank=4, warm_start_steps=0)
    setup = build_setup(run, replace(Ppo(), kl_coef=0.1))
    plain, mesh = setup.model.without_adapters(), setup.mesh
    model = Model(plain, mesh)
    key, on = setup.randomness.key("weights"), on_one_device
    adapters = init_adapters(Model(setup.model, mesh), key)
    state = init_state(setup.networks, init_weights(model, key), key, adapters=adapters)
    needs = memory(setup)
    assert needs["weights"] == on(state.policy.weights)
    assert needs["optimizer state"] == on(state.policy.opt_state)
    learned = select_trained(state.critic.weights, weights.table(setup.model.as_critic()))
    assert needs["critic"] == on(learned)
    assert needs["critic's optimizer state"] == on(state.critic.opt_state)
    assert needs["gradients"] < needs["weights"] / 2
    kept = {id(leaf) for leaf in jax.tree.leaves(state.policy.weights)}
    policy = rollout_policy(state.policy.weights, Model(setup.model, mesh), setup.rollout_mesh)
    copied = [leaf for leaf in jax.tree.leaves(policy) if id(leaf) not in kept]
    assert needs["rollout policy"] == on(copied) < weight_bytes(model)
    assert not {"reference", "float32 masters", "critic's float32 masters"} & needs.keys()
    shown = parameters(setup)
    number = weights.num_trained_parameters(setup.model)
    assert shown["of which learn"] == f"{number:,} in adapters, {readable_bytes(4 * number)}"
    assert shown["reference"] == "the policy without adapters"


@pytest.mark.slow
def test_memory_of_choices_of_experts_is_that_of_their_column():
    recipe = replace(Grpo(), prompts=8, group_size=4, mini_batch=16, router_replay="R2")
    setup = build_setup(RunConfig(layout=LAYOUT), recipe)
    record = partial(logprobs_and_choices_of, setup.networks.policy.objective)
    given = tokens_of(32, setup.prompt_length + setup.response_length)
    _, choices = jax.eval_shape(record, weights.shapes(setup.model), *given)
    on_one = choices.size * choices.dtype.itemsize // setup.mesh.layout.dp
    assert memory(setup)["expert ids"] == on_one
    free = build_setup(RunConfig(), replace(recipe, router_replay=None))
    assert "expert ids" not in memory(free)


def test_batch_arithmetic_follows_a_completion_to_its_last_update():
    recipe = replace(
        Vapo(), prompts=6, group_size=4, mini_batch=12, micro_batch=4, epochs=5, pretrain_critic=7
    )
    rows = batch_arithmetic(build_setup(RunConfig(steps=10), recipe))
    assert rows["completions per step"] == "6 prompts x 4 = 24"
    assert rows["mini-batches"] == "24 / 12 = 2"
    assert rows["micro-batches per mini-batch"] == "12 / 4 = 3"
    assert rows["optimizer steps per step"] == "2 mini-batches x 5 epochs = 10"
    assert rows["of which train only the critic"] == "7"
    assert rows["optimizer steps of the critic"] == "10 x 10 = 100"
    assert rows["optimizer steps of the policy"] == "3 x 10 = 30"
    assert rows["tokens per step at most"] == "24 x 22 = 528"


def test_batch_arithmetic_of_dynamic_sampling_has_its_bound():
    recipe = replace(Dapo(), prompts=6, group_size=4, mini_batch=24, max_generation_rounds=3)
    rows = batch_arithmetic(build_setup(RunConfig(), recipe))
    assert rows["sampled per step at most"] == "3 rounds x 24 = 72"
    always = batch_arithmetic(build_setup(RunConfig(), replace(recipe, dynamic_sampling=False)))
    assert "sampled per step at most" not in always
    rows = batch_arithmetic(build_setup(RunConfig(), Grpo(dynamic_sampling=True)))
    assert rows["sampled per step at most"] == "10 rounds x 512 = 5,120"


def test_parameters_are_those_of_the_networks_in_use():
    plain = build_setup(RunConfig(), Grpo())
    assert list(parameters(plain)) == ["policy", "active params per token"]
    setup = with_critic_and_reference()
    state = abstract(setup.networks)
    rows = parameters(setup)

    def numbers(tree):
        return f"{sum(leaf.size for leaf in jax.tree.leaves(tree)):,}"

    assert rows["policy"] == rows["reference"] == numbers(state.policy.weights)
    assert rows["critic"] == numbers(state.critic.weights)


def test_everything_is_printed_and_a_policy_that_never_learns_is_pointed_out():
    text = io.StringIO()
    print_dry_run(
        build_setup(RunConfig(steps=20, layout=LAYOUT), Vapo()), Console(file=text, width=100)
    )
    text = text.getvalue()
    for title in (
        "Batch: vapo on sort",
        "Parameters: tiny",
        "Memory per device",
        f"Layout: {LAYOUT}",
    ):
        assert title in text
    assert re.search(r"ep 4 +experts", text) and re.search(r"cp 1 +context", text)
    assert "The policy is not trained: all 20 steps train only the critic" in text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (3 * 2**20, "3 MiB"),
        (5 * 2**50, "5.12e+03 TiB"),
    ],
)
def test_bytes_are_readable(number, text):
    assert readable_bytes(number) == text


@pytest.fixture(scope="module")
def apart():
    """Training on a pipeline with context parallelism, sampling on neither."""
    recipe = replace(Grpo(), prompts=16, group_size=4, mini_batch=32, micro_batch=16, kl_coef=0.1)
    run = RunConfig(model="small", layout="pp2 cp2 tp2 / ep2", warm_start_batch=64)
    return build_setup(run, recipe)


@pytest.mark.slow
def test_a_rollout_of_its_own_is_printed_and_takes_memory(apart):
    text = io.StringIO()
    print_dry_run(apart, Console(file=text, width=100))
    assert "Layout: pp2 cp2 tp2 / ep2 on" in text.getvalue()
    assert "Rollout layout: tp2 cp1 dp4 pp1 / ep2 etp1 edp4 on the same" in text.getvalue()
    needs = memory(apart)
    policy = weights.initialise(apart.model, apart.randomness.key("weights"))
    there = jax.device_put(policy, placement.shardings(Model(apart.model, apart.rollout_mesh)))
    assert needs["rollout policy"] == on_one_device(there)
    # The cache for dp 4 and tp 2.
    positions = apart.recipe.completions // 4 * (apart.prompt_length + apart.response_length)
    width = apart.model.num_kv_heads // 2 * (apart.model.head_dim + apart.model.v_head_dim) * 4
    assert needs["key/value cache"] == positions * apart.model.num_layers * width
    assert "rollout policy" not in memory(build_setup(RunConfig(layout=LAYOUT), Grpo()))


def test_memory_of_a_stage_counts_the_padding_of_context_parallelism(apart):
    def padded(length):
        return -(-length // 4) * 4

    # 16 rows in 4 groups, over cp 2 x tp 2; two micro-batches leave two inputs to keep of
    # each of three layers.
    tokens = 4 * padded(apart.prompt_length) + 16 * padded(apart.response_length)
    assert apart.model.num_layers == 6
    assert memory(apart)["stored inputs of a stage"] == 6 * tokens // 4 * apart.model.d_model * 4
    columns = -(-apart.model.vocab_size // 2)
    assert logits_of_pass(apart, rows=16) == 4 * 16 * padded(apart.response_length) // 2 * columns


def test_only_layers_that_are_not_scanned_are_unstacked_to_sample():
    mesh = fold_abstract(Layout())

    def sizes(layers, is_stored=False, **execution):
        execution = Execution(**execution)
        config = replace(tiny(8), num_layers=layers, execution=execution)
        return unstacked_bytes(Model(config, mesh), is_stored=is_stored), weight_bytes(
            Model(config, mesh)
        )

    layer = sizes(3)[1] - sizes(2)[1]
    assert [sizes(layers)[0] for layers in (2, 8, 9)] == [2 * layer, 8 * layer, 0]
    # Shards are gathered, with embedding and head; a copy for another layout has none.
    fully_sharded = {"fsdp": True, "remat": "full"}
    made, whole = sizes(9, **fully_sharded)
    assert made == whole and sizes(9, is_stored=True, **fully_sharded)[0] == 0


@pytest.mark.parametrize(
    ("template", "chosen", "line"),
    [
        (None, "checkpoint", "no chat template (--chat-template hermes, llama3, mistral or FILE"),
        (TEMPLATE, "none", "no chat template (--chat-template none)"),
    ],
)
def test_first_prompt_of_base_model_is_shown_with_missing_template(
    tmp_path, template, chosen, line
):
    checkpoint = write_checkpoint(tmp_path / "base", chat_template=template)
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1?", "answer": str(n + 1)}) + "\n" for n in range(2))
    )
    flags = [f"--model=hf:{checkpoint}", f"--task=jsonl:{tmp_path}/data.jsonl", "--verifiers=1"]
    request = parse_arguments([*flags, f"--chat-template={chosen}"])
    setup = build_setup(request.run, request.recipe)
    setup.task.close()
    text = io.StringIO()
    print_first_input(setup, Console(file=text, width=100))
    shown = text.getvalue()
    prompt = setup.task.train(0).prompt
    assert shown.startswith(f"The first prompt as the network reads it\n{prompt}\n{line}")
    assert shown.endswith(f"completions end with {TURN} or {END}\n")
