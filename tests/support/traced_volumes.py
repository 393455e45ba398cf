"""Volumes of collectives, of traced programs beside the planner's, in one form."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
from observed_collectives import jaxpr_collectives
from whole_network import loss_and_gradient

from moe.config import ModelConfig, MultiHeadLatentAttention
from moe.placement import in_chunks
from moe.planner.method import Batch, Method
from moe.weights import shapes
from sharding.folding import Layout, fold_abstract
from sharding.folding.groups import server_groups
from sharding.schedule import Schedule

# A distinct size for each axis, divisible where the layouts cut it.
TOY = ModelConfig(
    vocab_size=12,
    d_model=20,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=3,
    d_expert=14,
)

MIXTRAL = ModelConfig(
    vocab_size=32768,
    d_model=6144,
    num_heads=48,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    experts_per_token=2,
    d_expert=16384,
    capacity_factor=1.0,
    dtype="bfloat16",
)

CONFIGS = {
    "toy": TOY,
    "half": replace(TOY, dtype="bfloat16"),
    "shared": replace(TOY, d_ff=28),
    "dense": replace(TOY, num_experts=0, d_ff=28),
    "full": replace(TOY, capacity_factor=0.8),
    "long": replace(TOY, num_experts=4),
    "normed": replace(TOY, query_key_norm="head"),
    "latent": replace(TOY, num_kv_heads=8, mla=MultiHeadLatentAttention(10, 18, 2, 4)),
    "direct": replace(TOY, num_kv_heads=8, mla=MultiHeadLatentAttention(10, None, 2, 4)),
    "mixtral": MIXTRAL,
    "dropless": replace(MIXTRAL, capacity_factor=None),
    "g8t8": replace(MIXTRAL, num_experts=64, experts_per_token=8, d_expert=2048),
    "large": replace(
        MIXTRAL, num_experts=64, experts_per_token=8, d_expert=2048, capacity_factor=None
    ),
    "llama": replace(MIXTRAL, vocab_size=128256, d_model=8192, num_heads=64, d_expert=28672),
    "qwen2": replace(
        MIXTRAL,
        vocab_size=151936,
        d_model=3584,
        num_heads=28,
        num_kv_heads=4,
        num_experts=64,
        experts_per_token=8,
        d_expert=2560,
        d_ff=20480,
        qkv_bias=True,
        shared_expert_gate=True,
    ),
}


def method_of(config):
    return Method(config.execution, itemsize=2 if config.dtype == "bfloat16" else 4)


def batch_of(config, layout):
    """Three rows of each ``dp`` rank in one micro-batch, or two that a pipeline runs one by one;
    seven or four in pairs if they are to be halved, and no half has as many as layers."""
    time = 4096 if config.d_model > 1000 else 8
    if config.num_experts == 4:
        time = 100
    halved = config.execution.two_batch_overlap
    if layout.pp > 1:
        micro_rows = 2 if halved else 1
        return Batch(2 * micro_rows * layout.dp, time, micro_rows)
    micro_rows = 7 if halved else 3
    return Batch(micro_rows * layout.dp, time, micro_rows)


def atoms(mesh, transfer):
    """The mesh axes of a transfer's logical axes that have more than one device, on its side of
    sequence-parallel groups."""
    named = {atom for axis in transfer.axes for atom in getattr(mesh, axis)}
    if transfer.side == "inside":
        named &= set(mesh.sequence)
    if transfer.side == "across":
        named -= set(mesh.sequence)
    return frozenset(atom for atom in named if mesh.size((atom,)) > 1)


def observed_group(one, mesh):
    """The mesh axes of more than one device of a collective, and the groups of their indices."""
    over = frozenset(axis for axis in one.over if mesh.size((axis,)) > 1)
    return over if one.groups is None else (over, one.groups)


def stated_group(transfer, mesh):
    """`observed_group` of a transfer."""
    if transfer.server_devices is None:
        return atoms(mesh, transfer)
    split = server_groups(mesh, mesh.ep, transfer.server_devices)
    groups = split.inside if transfer.side == "inside" else split.across
    return atoms(mesh, replace(transfer, side=None)), groups


def schedule_of(batch, layout):
    return Schedule(layout.pp, batch.num_micro_batches(layout), layout.vpp)


@functools.cache
def traced(config, layout):
    mesh, batch = fold_abstract(Layout.parse(layout)), batch_of(config, Layout.parse(layout))
    shape = batch.rows, batch.time
    piece = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)
    weights = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    return list(
        jaxpr_collectives(jax.make_jaxpr(loss_and_gradient(config, mesh))(weights, piece).jaxpr)
    )


def sent(config, layout):
    """Bytes that a device gives to collectives, {(kind, mesh axes): bytes}; of sums, only the
    routers' if no pipeline has others of their shape."""
    sizes = Layout.parse(layout)
    mesh, result = fold_abstract(sizes), Counter()
    # Sums of a sequence and an expert; others are of a layer and an expert.
    streams = method_of(config).streams(batch_of(config, sizes))
    of_routers = [(rows.micro_rows, config.num_experts) for rows in streams]
    for one in traced(config, layout):
        over = observed_group(one, mesh)
        is_load = sizes.pp == 1 and one.shape in of_routers
        if over and (one.kind != "all_reduce" or is_load):
            result[one.kind, over] += one.bytes
    return result


def given_to_collectives(program, mesh):
    """Bytes that a device gives to all collectives of a traced program, as `sent`."""
    result = Counter()
    for one in jaxpr_collectives(program.jaxpr):
        over = observed_group(one, mesh)
        if over:
            result[one.kind, over] += one.bytes
    return result


def stated(transfers, layout):
    mesh = fold_abstract(layout)
    result = Counter()
    for transfer in transfers:
        if transfer.kind == "all_reduce" and (layout.pp > 1 or "load" not in transfer.what):
            continue
        result[transfer.kind, stated_group(transfer, mesh)] += transfer.bytes
    return result
