"""Logits of a checkpoint folder for a sequence of tokens."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from programs import mesh_of, on_mesh

from moe import huggingface, model
from moe.config import Model
from moe.placement import specs


def logits_of(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Logits of the next token at each position, ``[time, vocab]``."""
    mesh = mesh_of("dp1")
    config, weights = huggingface.load(folder, mesh)
    network = Model(config, mesh)
    run = on_mesh(
        lambda w, t: model.next_token_logits(w, t, t >= 0, network)[0][None],
        mesh,
        (specs(network), P(mesh.dp)),
        P(tuple(axis for axis in mesh.axes if axis not in mesh.dp), mesh.dp),
    )
    logits = np.asarray(run(weights, jnp.asarray([tokens])))
    return logits.reshape(len(tokens), -1)
