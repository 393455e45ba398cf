"""Networks, layouts and batches on which the network on a mesh is compared with one device."""

import functools
from dataclasses import replace

import jax
import numpy as np
from permutes import check_permutes
from programs import jit, mesh_of, random_weights
from small_networks import any_choices
from whole_network import loss_and_gradient

from moe.config import GatedDeltaNet, ModelConfig
from moe.execution import Execution
from moe.placement import in_chunks, in_layer_order

# A distinct size for each axis, divisible where the layouts cut it.
MOE = ModelConfig(
    vocab_size=12,
    num_layers=1,
    d_model=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=3,
    d_expert=14,
)
CONFIGS = {
    "routed": MOE,
    # Columns of the head in chunks. A stage of a pipeline learns at run time whether its layer has
    # a window.
    "two": replace(
        MOE,
        num_layers=2,
        sliding_window=2,
        full_attention_layers=(1,),
        execution=Execution(vocab_chunk=5),
    ),
    # A vocabulary that tp does not divide is whole on each rank, which reads its part of the head.
    "four": replace(
        MOE, num_layers=4, vocab_size=11, sliding_window=3, full_attention_layers=(0, 3)
    ),
    # Of four chunks three are a layer shorter.
    "five": replace(
        MOE,
        num_layers=5,
        sliding_window=3,
        full_attention_layers=(0, 3),
        execution=Execution(remat="selective"),
    ),
    # Of two stages the last has a layer less, after a dense one.
    "scanned": replace(
        MOE,
        num_layers=4,
        num_dense_layers=1,
        dense_d_ff=20,
        sliding_window=3,
        full_attention_layers=(0, 3),
        execution=Execution(scan_layers=True, remat="full"),
    ),
    "dense": replace(
        MOE,
        num_layers=2,
        vocab_size=11,
        num_experts=0,
        d_ff=28,
        head="tied",
        execution=Execution(vocab_chunk=4),
    ),
    # One matrix, spread over tp, at both ends.
    "tied": replace(MOE, num_layers=2, head="tied", execution=Execution(vocab_chunk=4)),
    # What DeepSeek-V3 routes by; rows travel one by one.
    "sigmoid": replace(
        MOE,
        router_scores="sigmoid",
        num_expert_groups=4,
        expert_groups_per_token=3,
        routed_scaling=2.5,
        global_balance_coef=0.02,
        execution=Execution(dispatch="all_to_all"),
    ),
    # Tokens of a device in parts, of which some are larger.
    "chunks": replace(
        MOE, execution=Execution(expert_chunks=2, dispatch="all_to_all", remat="selective")
    ),
    "two_in_chunks": replace(
        MOE,
        num_layers=2,
        sliding_window=2,
        full_attention_layers=(1,),
        execution=Execution(expert_chunks=2),
    ),
    # One copy of a token crosses to a server of four devices.
    "servers": replace(
        MOE, num_layers=2, execution=Execution(dispatch="two_level", server_devices=4)
    ),
    "servers full": replace(
        MOE,
        capacity_factor=0.8,
        drop_scope="full_sequence",
        execution=Execution(
            dispatch="two_level", server_devices=2, remat="selective", expert_chunks=2
        ),
    ),
    # Experts that are full drop the later tokens of the rows, wherever these are.
    "full": replace(MOE, capacity_factor=0.8, drop_policy="position", drop_scope="full_sequence"),
    # Tokens traded for heads, with key and value heads sent twice: a rank of tp has one, or two
    # are for cp4.
    "traded": replace(MOE, num_kv_heads=2, execution=Execution(context="ulysses")),
    "traded full": replace(
        MOE,
        capacity_factor=0.8,
        drop_scope="full_sequence",
        execution=Execution(context="ulysses", dispatch="all_to_all", remat="selective"),
    ),
    # Keys and values visit the ranks of cp, in stages that leave work out.
    "ring": replace(MOE, num_layers=2, execution=Execution(context="ring")),
    "ring four": replace(
        MOE,
        num_layers=4,
        sliding_window=3,
        full_attention_layers=(0, 3),
        execution=Execution(context="ring", remat="full"),
    ),
    # States in the place of keys in the first layer of each two, the heads of both over tp.
    "delta": replace(
        MOE,
        num_layers=2,
        num_experts=0,
        d_ff=12,
        delta=GatedDeltaNet((0,), 2, 4, key_head_dim=5, value_head_dim=6, conv_width=3),
        attention_gate=True,
    ),
    # A critic with a shared expert.
    "shared": replace(MOE, num_layers=2, d_ff=12, head="value"),
}
CONFIGS["delta two"] = replace(
    CONFIGS["delta"],
    num_layers=4,
    num_experts=16,
    delta=replace(CONFIGS["delta"].delta, layers=(0, 2)),
    execution=Execution(fsdp=True, remat="selective"),
)
CONFIGS["servers four"] = replace(CONFIGS["four"], execution=CONFIGS["servers"].execution)
# Part of a larger layout has no case of its own: experts on the devices of dp, of tp or of cp,
# parts of experts on the devices of tp.
LAYOUTS = [
    # Every device has all experts.
    "tp2 cp2 dp2",
    # Parts of experts on the devices of cp, and of dp.
    "cp2 / etp2",
    "dp4 / ep2 etp2",
    # Sixteen devices.
    "tp2 cp2 dp4 / ep8 etp2",
    "tp4 cp2 dp2 / ep16",
]
# Two layers on each stage that has two chunks of them, else one.
PIPELINES = ["pp2 dp2 cp2 tp2 / ep4 etp2", "pp2 vpp2 dp2 cp2 tp2 / ep8"]
# What the other configurations add is spread over tp (dense layers, the values' alignment, the
# tied head): a layout that has every axis is theirs, and one with experts inside tp.
CASES = [
    *(("routed", layout) for layout in LAYOUTS),
    *(("four" if "vpp" in layout else "two", layout) for layout in PIPELINES),
    ("five", "pp2 vpp2 dp2 / ep2"),
    ("scanned", "pp2 tp2"),
    ("dense", "tp2 dp4"),
    ("tied", "tp2 cp2 / ep2"),
    ("tied", "pp2 tp2"),
    ("shared", "pp2 tp2 dp2 / ep4"),
    ("sigmoid", "tp2 dp4 / ep2 etp2"),
    ("traded", "tp2 cp2 dp2 / ep8"),
    ("ring", "cp2 pp2"),
    ("ring", "cp4 pp2"),
    ("ring", "cp6 pp2"),
    ("ring", "pp2 dp2 cp2 tp2 / ep4 etp2"),
    ("ring four", "tp2 cp2 pp2 vpp2 / ep4"),
    ("delta", "tp2"),
    ("delta two", "pp2 tp2 / ep2"),
    ("chunks", "tp2 dp4 / ep2 etp2"),
    ("two_in_chunks", "pp2 dp4 / ep4"),
    ("servers", "tp2 cp2 dp4 / ep8 etp2"),
    ("servers", "tp4 cp2 dp2 / ep16"),
    ("servers", "pp2 dp2 cp2 tp2 / ep8"),
    ("servers", PIPELINES[0]),
    ("servers four", PIPELINES[1]),
]
# Who is dropped does not depend on cp and tp: `tests/moe/router/test_capacity.py` has it by itself.
FULL = [("full", "tp2 cp2 / ep4"), ("traded full", "cp4 / ep4"), ("servers full", "tp2 cp2 / ep4")]
BATCH, TIME = 8, 5


def batch():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, min(c.vocab_size for c in CONFIGS.values()), (BATCH, TIME))
    length = np.arange(BATCH) % (TIME - 1) + 2
    valid = np.arange(TIME)[None, :] >= TIME - length[:, None]
    return tokens.astype(np.int32), valid


def run(config, layout, replayed=False):
    mesh, piece = mesh_of(layout), batch()
    if replayed and config.num_experts:
        piece = *piece, any_choices(config, BATCH, TIME)
    weights = in_chunks(random_weights(config, 0), mesh)
    step = jit(loss_and_gradient(config, mesh)).trace(weights, piece)
    check_permutes(step.jaxpr.jaxpr)
    out, grads = jax.device_get(step.lower().compile()(weights, piece))
    stacked = config.num_layers - config.num_dense_layers
    return out, in_layer_order(grads, mesh, stacked)


@functools.cache
def on_one_device(config, replayed=False):
    return run(config, "dp1", replayed)


def without_execution(config):
    """The network's configuration without its execution settings; many layers are compiled as
    one."""
    scans = config.num_layers > 2
    return replace(config, execution=Execution(scan_layers=scans))
