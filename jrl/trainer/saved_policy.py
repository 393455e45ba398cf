"""The networks of a run on disk: their newest weights, and its tokenizer."""

from dataclasses import replace

import jax
from jaxtyping import Array

from jrl.tokenizer import Tokenizer
from jrl.trainer.checkpoints import Checkpoints
from jrl.trainer.processes import several
from jrl.trainer.run_folder import RunFolder
from jrl.trainer.setup import Setup
from moe import weights as moe_weights
from moe.config import ModelConfig
from moe.weights import Transformer


def load_policy(folder: RunFolder, setup: Setup) -> tuple[Transformer[Array], int]:
    """The policy of the newest checkpoint and the steps it has learned for.

    Args:
      setup: whose model it must be, and on whose mesh it is laid out.

    Raises:
      ValueError: where there is no checkpoint yet, or it is one of another model.
    """
    return _load(folder, setup, setup.model, "policy/weights")


def load_critic(folder: RunFolder, setup: Setup) -> tuple[Transformer[Array], int]:
    """The critic of the newest checkpoint and the steps it has learned for.

    Raises:
      ValueError: as for `load_policy`, and where the recipe trains no critic.
    """
    return _load(folder, setup, setup.critic_objective.config, "critic/weights")


def _load(
    folder: RunFolder, setup: Setup, model: ModelConfig, part: str
) -> tuple[Transformer[Array], int]:
    """A part of the newest checkpoint, and its step.

    The run may still be written: where its writer drops the checkpoint being read, the newer one is
    taken.
    """
    checkpoints = Checkpoints(folder.checkpoints_path)
    # A checkpoint holds the layers in order.
    plain = replace(setup.mesh, layout=replace(setup.mesh.layout, vpp=1))
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        moe_weights.shapes(model),
        moe_weights.shardings(model, plain),
    )
    while True:
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError(
                f"run {folder.path} has no checkpoint yet: the first comes after its warm start."
            )
        try:
            weights = checkpoints.restore(step, like, part=part)[0]
        except (ValueError, OSError):
            # Of several processes the others may have read it: they would not try again with this.
            if several() or step in checkpoints.steps():
                raise
        else:
            weights = moe_weights.in_rounds(weights, setup.mesh)
            return jax.device_put(weights, moe_weights.shardings(model, setup.mesh)), step


def load_model(folder: RunFolder) -> ModelConfig | None:
    """The network of a run that began from a public checkpoint, None for one of a preset."""
    if not folder.model_path.exists():
        return None
    from moe.huggingface import config_from  # needs an extra

    return config_from(folder.model_path)


def load_tokenizer(folder: RunFolder) -> Tokenizer:
    """The tokenizer that a run saved.

    Raises:
      ValueError: where there is none, or it is not one.
    """
    return Tokenizer.from_file(folder.tokenizer_path)
