"""Policy of a run or a public checkpoint for serving, without its task."""

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import jax
from jaxtyping import Array

from jrl.config.files import configuration_of
from jrl.config.rollout import SplitSettings
from jrl.config.run import IMPLEMENTATION_SETTINGS, RunConfig
from jrl.rollout.decoding.backend import MeshBackend
from jrl.rollout.decoding.engine import Backend, Engine
from jrl.rollout.decoding.slots import Decoder
from jrl.rollout.decoding.split_backend import SplitBackend
from jrl.rollout.resharding import rollout_layout, rollout_mesh
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import PromptFormat, prompt_format
from jrl.trainer.evaluation.device_split import DeviceSplit, parse_device_split
from jrl.trainer.evaluation.saved_policy import load_model, load_policy_of
from jrl.trainer.learner.masters import float32_shardings, weights_of
from jrl.trainer.setup.network import check_supported, network_of
from moe.config import PRESETS, ModelConfig
from moe.weights import Transformer
from sharding.folding import FoldedMesh, Layout, fold


@dataclass(frozen=True)
class RunSource:
    """Source of weights: a run, which may still be training.

    Attributes:
      folder: of the run.
      model: its network.
      mesh: the mesh that its weights are loaded on.
    """

    folder: RunFolder
    model: ModelConfig
    mesh: FoldedMesh

    def newest(self) -> int | None:
        """Step of the latest checkpoint, valid or not."""
        return self._checkpoints.latest_step()

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder.checkpoints_path)

    def load(self) -> tuple[Transformer[Array], int]:
        """Loads the latest valid policy and its step; raises ValueError where there is none."""
        return load_policy_of(self.folder, self.model, self.mesh)


@dataclass(frozen=True)
class CheckpointSource:
    """Source of weights: a public checkpoint, of which there is one version.

    Attributes:
      directory: its folder.
      model: its network.
      mesh: the mesh that its weights are loaded on.
    """

    directory: Path
    model: ModelConfig
    mesh: FoldedMesh

    def newest(self) -> int | None:
        """Returns None: there are no later versions."""
        return None

    def load(self) -> tuple[Transformer[Array], int]:
        """Loads its weights, as version 0."""
        from moe.huggingface import load_weights  # needs an extra

        shardings = float32_shardings(self.model, self.mesh)
        weights = load_weights(self.directory, self.model, self.mesh, shardings)
        return weights_of(weights, self.model, self.mesh), 0


@dataclass(frozen=True)
class ServedModel:
    """Policy for serving.

    Attributes:
      name: of the run, or of the folder of the checkpoint.
      model: its network.
      mesh: the mesh that samples; with disaggregation all devices, on which weights are loaded.
      device_split: device groups of attention and experts; None on one mesh.
      format: encoding of the prompts.
      versions: source of its weights.
    """

    name: str
    model: ModelConfig
    mesh: FoldedMesh
    device_split: DeviceSplit | None
    format: PromptFormat
    versions: RunSource | CheckpointSource

    def engine(self, *, slots: int, max_length: int, key: Array, top_logprobs: int) -> Engine:
        """Creates its serving engine, without weights; arguments are those of `Engine` and
        `Decoder`.

        Raises:
          ValueError: for slots that do not divide over the devices.
        """
        split, tokenizer = self.device_split, self.format.tokenizer
        decoder = Decoder(
            self.model,
            self.mesh if split is None else split.mesh.attention,
            tokenizer.pad_id,
            tokenizer.stop_ids,
            top_logprobs=top_logprobs,
        )
        if split is None:
            backend: Backend = MeshBackend(decoder, self.mesh)
        else:
            split.check_slots(slots)
            backend = SplitBackend(
                decoder,
                self.mesh,
                split.mesh,
                micro_batches=split.micro_batches,
                expert_slots=split.expert_slots,
                replan=split.replan,
                restarts=False,
            )
        return Engine(backend, slots=slots, max_length=max_length, key=key, streams=True)


def open_served_model(
    location: str, layout: str | None = None, split: SplitSettings | None = None
) -> ServedModel:
    """Policy of a run folder, or of ``hf:DIR``, for serving.

    Args:
      layout: of the devices; None is the run's layout for sampling, and one device for a
        checkpoint.
      split: of the devices into attention and expert groups; unset values are those of the run,
        unless a layout is given.

    Raises:
      ValueError: where there is neither a run nor a checkpoint, and for a layout or a split that is
        not available.
    """
    split = split or SplitSettings()
    if location.startswith("hf:"):
        return _open_checkpoint(Path(location.removeprefix("hf:")), layout, split)
    folder = RunFolder.read(location)
    run, _ = configuration_of(folder)
    # Implementations were chosen for the training devices; here the best that applies is used.
    run = replace(run, **dict.fromkeys(IMPLEMENTATION_SETTINGS))
    tokenizer = load_tokenizer(folder.tokenizer_path)
    model = load_model(folder)
    model = network_of(PRESETS[run.model](tokenizer.vocab_size) if model is None else model, run)
    device_split = parse_device_split(split, layout, run)
    mesh = _mesh(model, _default_layout(run) if layout is None else layout, device_split)
    format, versions = prompt_format(run, tokenizer), RunSource(folder, model, mesh)
    return ServedModel(folder.path.resolve().name, model, mesh, device_split, format, versions)


def _open_checkpoint(directory: Path, layout: str | None, split: SplitSettings) -> ServedModel:
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        raise ValueError(
            f"hf:{directory} needs safetensors and tokenizers, which are not both installed: run "
            'pip install -e ".[hf]"'
        )
    from jrl.text.json_tokenizer import checkpoint_tokenizer
    from moe.huggingface import config_from

    run = RunConfig(model=f"hf:{directory}")
    model = network_of(config_from(directory), run)
    device_split = parse_device_split(split, layout, run)
    mesh = _mesh(model, layout or "dp1", device_split)
    format = prompt_format(run, checkpoint_tokenizer(directory, model.vocab_size))
    name, versions = directory.resolve().name, CheckpointSource(directory, model, mesh)
    return ServedModel(name, model, mesh, device_split, format, versions)


def _default_layout(run: RunConfig) -> str:
    if run.rollout_devices is not None:
        return run.rollout_layout or f"dp{run.rollout_devices}"
    return run.rollout_layout or str(rollout_layout(Layout.parse(run.layout)))


def _mesh(model: ModelConfig, text: str, device_split: DeviceSplit | None) -> FoldedMesh:
    """Mesh of a layout that can serve the network; with disaggregation that of all devices."""
    if device_split is not None:
        device_split.check(model)
        mesh = device_split.loading_mesh(model)
    else:
        layout, devices = Layout.parse(text), jax.devices()
        if len(devices) < layout.num_devices:
            raise ValueError(
                f"layout {text!r} needs {layout.num_devices} devices and there are {len(devices)}: "
                f"give --layout dp1, or --devices {layout.num_devices} to have as many fake ones "
                "on a CPU."
            )
        mesh = rollout_mesh(text, fold(layout, devices[: layout.num_devices]))
    check_supported(model, mesh)
    return mesh
