"""A program does not depend on the hash seed of its process, which orders sets of axes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import hashlib, jax, jax.numpy as jnp
from whole_network import loss_and_gradient
from moe.config import ModelConfig
from moe.placement import in_chunks
from moe.weights import shapes
from sharding.folding import Layout, fold

config = ModelConfig(
    vocab_size=32, num_layers=4, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4,
    num_experts=4, experts_per_token=2, d_expert=8,
)
mesh = fold(Layout.parse("cp2 pp2 tp2 / ep4"), jax.devices()[:8])
rows = jax.ShapeDtypeStruct((4, 16), jnp.int32), jax.ShapeDtypeStruct((4, 16), jnp.bool_)
weights = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
text = jax.jit(loss_and_gradient(config, mesh)).lower(weights, rows).as_text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


def fingerprint(seed: int) -> str:
    """Hash of the lowered loss and gradient of a pipelined network."""
    support = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": support,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_programs_are_the_same_under_every_hash_seed():
    first, *others = (fingerprint(seed) for seed in (1, 2, 3))
    assert len(first) == hashlib.sha256().digest_size * 2
    assert others == [first, first]
