"""Loading of saved networks: policy and critic of a run's checkpoints, and public checkpoints."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import any_of, is_main_process, is_multiprocess
from jrl.published.adapters import open_adapters
from jrl.rollout.resharding import reshard
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.runs.provenance import check_files
from jrl.trainer.learner.learner import float32_shardings, weights_of
from jrl.trainer.state import restore_base
from moe import placement
from moe import weights as moe_weights
from moe.adapters import select_trained, with_base
from moe.config import Model, ModelConfig
from moe.huggingface import architecture_of, config_from, load_adapters, load_weights
from moe.weights import Transformer
from sharding.folding import FoldedMesh
from sharding.sharded_jit import abstract_array


def load_model(
    source: RunFolder | str | Path,
    model: Model,
    *,
    masters: bool = False,
    step: int | None = None,
    adapters: str | None = None,
) -> tuple[Transformer[Array], int]:
    """Loads the policy of a run or of a published checkpoint, and the number of steps it was
    trained for.

        weights, step = load_model(RunFolder.read("runs/math"), Model(setup.model, setup.mesh))
        weights, _ = load_model("models/qwen3", model, masters=True)

    Args:
      source: folder of a run, which may still be training, or the directory of a published
        checkpoint, whose number of steps is 0.
      model: the policy network, on the mesh that the weights are put on.
      masters: true for the float32 weights that an optimizer updates, with a run's adapters merged
        into them: for training or an export. False for the weights that sample, in the dtype of
        computation and with the run's adapters beside them.
      step: step of the run's checkpoint; None for the latest valid one.
      adapters: a folder in PEFT's format whose adapters are merged into a published checkpoint.

    Raises:
      ValueError: if the run has no checkpoint yet, none of this step, or only damaged ones, and for
        weights of another network or adapters that cannot be read.
    """
    if isinstance(source, RunFolder):
        (weights,), step = load_networks(
            source, {"policy": model.config}, model.mesh, masters=masters, step=step
        )
        return weights, step
    model = model.without_adapters()
    weights = _load_published(source, model, adapters)
    return weights if masters else weights_of(weights, model), 0


def prompts_seen_by(folder: RunFolder) -> int:
    """Number of training prompts that a run had used by its latest valid checkpoint, warm start
    included.

    Raises:
      ValueError: if there is no checkpoint yet, or all are damaged.
    """
    checkpoints = Checkpoints(folder.checkpoints_path)
    step, _ = checkpoints.latest_valid_step()
    return int(checkpoints.restore(step, np.zeros((), np.int32), part="prompts_seen")[0])


def latest_description(folder: RunFolder) -> tuple[int | None, Mapping[str, Any]]:
    """Step of the latest checkpoint and the description of its run
    (`jrl.runs.provenance.describe`); None and nothing if there is no checkpoint. Its arrays are not
    read."""
    checkpoints = Checkpoints(folder.checkpoints_path)
    step = checkpoints.latest_step()
    return step, {} if step is None else checkpoints.meta(step)


def load_networks(
    folder: RunFolder,
    configs: Mapping[str, ModelConfig],
    mesh: FoldedMesh,
    *,
    masters: bool = False,
    step: int | None = None,
) -> tuple[list[Transformer[Array]], int]:
    """Loads networks of a run, all from the same checkpoint, and its step.

    The run may still be training: if it deletes or replaces the checkpoint during the read,
    everything is read again. Damaged checkpoints are not moved.

    Args:
      configs: the networks by role, "policy" first and perhaps "critic".
      mesh, masters, step: as for `load_model`.

    Raises:
      ValueError: as for `load_model`.
    """
    requested_step = step
    checkpoints = Checkpoints(folder.checkpoints_path)
    models = {role: Model(config, mesh) for role, config in configs.items()}
    like = {role: _abstract_weights(model) for role, model in models.items()}
    while True:
        step, damaged = _checkpoint_step(checkpoints, requested_step)
        if step is None:
            raise ValueError(
                f"run {folder.path} has no checkpoint yet: the first comes after its warm start."
            )
        # Recorded before anything is read, to detect a folder that replaced this one.
        identity_before = checkpoints.identity(step)
        try:
            restored = [
                checkpoints.restore(step, like[role], part=f"{role}/weights") for role in models
            ]
        except (ValueError, OSError):
            # Other processes may have succeeded: they would not retry together with this one.
            if is_multiprocess() or (
                identity_before is not None and checkpoints.identity(step) == identity_before
            ):
                raise
        else:
            # The checkpoint may have been replaced meanwhile, and the parts be of both.
            if not any_of(checkpoints.identity(step) != identity_before):
                check_files(folder, step, restored[0][1])
                _warn(checkpoints, damaged, step)
                model = models["policy"]
                has_base = model.config.lora is not None
                frozen = restore_base(checkpoints, model) if has_base else None
                return [
                    _shard_weights(weights, model, masters, frozen)
                    for (weights, _), model in zip(restored, models.values(), strict=True)
                ], step


def _checkpoint_step(
    checkpoints: Checkpoints, requested_step: int | None
) -> tuple[int | None, dict[int, str]]:
    """Step to read, and the damaged checkpoints among later ones."""
    if requested_step is None:
        return checkpoints.latest_valid_step()
    if requested_step not in (steps := checkpoints.steps()):
        raise ValueError(
            f"step={requested_step} has no checkpoint in {checkpoints.directory}: there are "
            f"{', '.join(map(str, steps)) or 'none yet'}."
        )
    return requested_step, {}


def _abstract_weights(model: Model) -> Any:
    """Shapes and shardings of a network's trained weights as stored in a checkpoint: float32, the
    layers in order."""
    # `save` stores layers in order, so that checkpoints do not depend on the layout.
    shardings = float32_shardings(placement.without_chunks(model))
    all_weights = jax.tree.map(abstract_array, moe_weights.shapes(model.config), shardings)
    return select_trained(all_weights, moe_weights.table(model.config))


def _shard_weights(
    weights: Transformer[Array], model: Model, masters: bool, frozen: Transformer[Array] | None
) -> Transformer[Array]:
    """Places trained weights on the mesh of the run; adapters together with their base weights, or
    merged into them for `masters`."""
    mesh = model.mesh
    weights = placement.in_chunks(weights, mesh)
    if frozen is None:
        weights = jax.device_put(weights, float32_shardings(model))
        return weights if masters else weights_of(weights, model)
    weight_table = moe_weights.table(model.config)
    shardings = select_trained(placement.shardings(model), weight_table)
    weights = with_base(frozen, jax.device_put(weights, shardings), weight_table)
    if not masters:
        return weights
    # Widened first, so that `reshard` merges adapters without rounding to the dtype of the base.
    float32_weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    replicated = reshard(float32_weights, model, model.mesh)
    return jax.device_put(replicated, float32_shardings(model.without_adapters()))


def _warn(checkpoints: Checkpoints, damaged: Mapping[int, str], step: int) -> None:
    """Prints a warning that an older checkpoint is used."""
    for later, reason in damaged.items():
        if is_main_process():
            print(
                f"warning: checkpoint {checkpoints.directory / str(later)} is damaged ({reason}); "
                f"using step {step}",
                file=sys.stderr,
            )


def _load_published(
    directory: str | Path, model: Model, adapters: str | None
) -> Transformer[Array]:
    """Loads the float32 weights of a published checkpoint, on `float32_shardings`; adapters are
    merged as an export merges a run's."""
    shardings = float32_shardings(model)
    if adapters is None:
        return load_weights(directory, model, shardings)
    lora = open_adapters(adapters, directory, model.config, "lora")
    adapted = replace(model, config=replace(model.config, lora=lora))
    learned = load_adapters(adapters, adapted, architecture_of(directory))
    base = load_weights(directory, model)
    weights = with_base(base, learned, moe_weights.table(adapted.config))
    return jax.device_put(reshard(weights, adapted, model.mesh), shardings)


def read_model_config(folder: RunFolder) -> ModelConfig | None:
    """Network config of a run that started from a published checkpoint; None for a preset."""
    return config_from(folder.model_path) if folder.model_path.exists() else None
