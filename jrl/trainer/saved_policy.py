"""The policy of a run on disk: its newest weights and its tokenizer."""

import jax
from jaxtyping import Array

from jrl.tokenizer import Tokenizer
from jrl.trainer.checkpoints import Checkpoints
from jrl.trainer.run_folder import RunFolder
from jrl.trainer.setup import Setup
from moe import weights as moe_weights
from moe.weights import Transformer


def load_policy(folder: RunFolder, setup: Setup) -> tuple[Transformer[Array], int]:
    """The policy of the newest checkpoint and the steps it has learned for.

    The run may still be written: where its writer drops the checkpoint being read, the newer one is
    taken.

    Args:
      setup: whose model it must be, and on whose mesh it is laid out.

    Raises:
      ValueError: where there is no checkpoint yet, or it is one of another model.
    """
    checkpoints = Checkpoints(folder.checkpoints_path)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        moe_weights.shapes(setup.model),
        moe_weights.shardings(setup.model, setup.mesh),
    )
    while True:
        step = checkpoints.latest_step()
        if step is None:
            raise ValueError(
                f"run {folder.path} has no checkpoint yet: the first comes after its warm start."
            )
        try:
            return checkpoints.restore(step, like, part="policy/weights")[0], step
        except (ValueError, OSError):
            if step in checkpoints.steps():
                raise


def load_tokenizer(folder: RunFolder) -> Tokenizer:
    """The tokenizer that a run saved.

    Raises:
      ValueError: where there is none, or it is not one.
    """
    return Tokenizer.from_file(folder.tokenizer_path)
