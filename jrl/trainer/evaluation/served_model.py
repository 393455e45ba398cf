"""Policy of a run or a public checkpoint for serving, without its task; on one mesh, or on device
groups of attention and experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jaxtyping import Array

from jrl.checks import flag
from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.published.adapters import check_of_checkpoint, open_adapters
from jrl.published.location import is_checkpoint
from jrl.published.network import open_checkpoint
from jrl.rollout.decoding.build import build_engine
from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.expert_balancer import first_placement
from jrl.rollout.decoding.scheduling.sizes import SERVING
from jrl.rollout.decoding.slots import ranks
from jrl.rollout.decoding.split_backend import DeviceSplit
from jrl.rollout.resharding import rollout_layout, rollout_mesh
from jrl.rollout.settings import SplitSettings
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer
from jrl.text.prompt_format import PromptFormat, prompt_format
from jrl.trainer.evaluation.saved_policy import load_model, read_model_config
from jrl.trainer.setup.network import check_supported, first_devices, network_of
from moe.config import Model, ModelConfig, preset
from moe.disaggregated.split import Split, devices_of, fold_split
from moe.disaggregated.weights import check_splits
from moe.weights import Transformer
from sharding.folding import FoldedMesh, Layout, fold


@dataclass(frozen=True)
class RequestedSplit:
    """Flags of the server for attention and expert device groups, as in
    `jrl.rollout.settings.SplitSettings`; None is unset."""

    split: str | None = None
    micro_batches: int | None = None
    expert_slots: int | None = None
    replan: int | None = None

    def with_defaults_from(self, run: SplitSettings) -> "RequestedSplit":
        """Flags, and a run's settings for unset ones."""
        values = {
            name: getattr(run, f"rollout_{name}") if value is None else value
            for name, value in vars(self).items()
        }
        return RequestedSplit(**values)


def parse_device_split(
    requested: RequestedSplit, layout: str | None, run: RunConfig
) -> DeviceSplit | None:
    """Requested device groups, or those that the run samples on; None for one mesh.

    Args:
      layout: layout of one mesh, if one is requested.

    Raises:
      ValueError: for incompatible settings, and for more devices than there are.
    """
    if requested.split is not None and layout is not None:
        raise ValueError(
            f"layout={layout!r} is a layout of one mesh, and split={requested.split!r} has two: "
            "leave out --layout."
        )
    settings = requested
    if requested.split is None and layout is None:
        settings = requested.with_defaults_from(run)
    if settings.split is None:
        for name in ("micro_batches", "expert_slots", "replan"):
            if (value := getattr(requested, name)) is not None:
                raise ValueError(
                    f"{name}={value} needs the devices of attention and of experts: give --split, "
                    f'for example "tp1 dp2 / ep2", or leave out {flag(name)}.'
                )
        return None
    split, setting = Split.parse(settings.split), f"split={settings.split!r}"
    advice = "give --layout dp1 to serve on one mesh"
    mesh = fold_split(split, first_devices(split.num_devices, setting, advice))
    micro_batches = settings.micro_batches
    if micro_batches is None:
        micro_batches = SplitSettings.rollout_micro_batches
    return DeviceSplit(mesh, micro_batches, settings.expert_slots, settings.replan)


@dataclass(frozen=True)
class PolicySource:
    """Source of a policy's weights: a run, which may still be training, or a published checkpoint.

    Attributes:
      location: folder of the run, or directory of the checkpoint, of which there is one version.
      model: the policy network.
      mesh: the mesh that its weights are loaded on.
      adapters: as for `load_model`.
    """

    location: RunFolder | Path
    model: ModelConfig
    mesh: FoldedMesh
    adapters: str | None = None

    @property
    def checkpoint(self) -> Path | None:
        """Directory of the published checkpoint; None for a run."""
        return None if isinstance(self.location, RunFolder) else self.location

    def newest(self) -> int | None:
        """Step of the run's latest checkpoint, valid or not; None for a published one."""
        return None if self._checkpoints is None else self._checkpoints.latest_step()

    @cached_property
    def _checkpoints(self) -> Checkpoints | None:
        if not isinstance(self.location, RunFolder):
            return None
        return Checkpoints(self.location.checkpoints_path)

    def load(self) -> tuple[Transformer[Array], int]:
        """Loads the latest valid weights and their step, as `load_model` does."""
        return load_model(self.location, Model(self.model, self.mesh), adapters=self.adapters)


@dataclass(frozen=True)
class ServedModel:
    """Policy for serving.

    Attributes:
      name: name of the run, or of the folder of the checkpoint.
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
    versions: PolicySource

    @property
    def fewest_slots(self) -> int:
        """Smallest number of slots that divides over the devices."""
        split = self.device_split
        if split is None:
            return ranks(self.mesh)
        return ranks(split.mesh.attention) * split.micro_batches

    def engine(
        self,
        *,
        slots: int,
        max_length: int,
        key: Array,
        top_logprobs: int,
        records_choices: bool = False,
        prefix_cache: bool = True,
    ) -> Engine:
        """Builds its serving engine, without weights, as `build_engine` does.

        Args:
          prefix_cache: true if requests may begin with tokens of ended rows (`PrefixCache`).
        """
        model = self.model
        # On a CPU, XLA copies a layer's weights out of a scanned stack in each decode step, which
        # takes as long as its products when there are few rows. Prefills are scanned all the same.
        if self.mesh.platform == "cpu" and model.execution.scan_layers is None:
            model = replace(model, execution=replace(model.execution, scan_layers=False))
        return build_engine(
            model,
            self.format.tokenizer,
            self.mesh,
            self.device_split or self.mesh,
            slots=slots,
            max_length=max_length,
            key=key,
            policy=SERVING if prefix_cache else replace(SERVING, min_prefix=None),
            records_choices=records_choices,
            top_logprobs=top_logprobs,
        )


def open_served_model(
    location: str,
    layout: str | None = None,
    split: RequestedSplit | None = None,
    ignore: Sequence[str] = (),
    adapters: str | None = None,
) -> ServedModel:
    """Opens the policy of a run folder, or of a published checkpoint, for serving.

        served = open_served_model("hf:models/qwen3", layout="tp2")
        engine = served.engine(slots=8, max_length=4096, key=jax.random.key(0), top_logprobs=0)
        engine.load(*served.versions.load())

    Args:
      layout: layout of the devices; None is the run's layout for sampling, and one device for a
        checkpoint.
      split: of the devices into attention and expert groups; unset values are the run's, unless a
        layout is given.
      ignore: options of a checkpoint's config.json to pass over.
      adapters: a folder in PEFT's format with adapters of the checkpoint, which are merged into it.

    Raises:
      ValueError: if there is neither a run nor a checkpoint, and for a layout or a split that is
        not available.
    """
    split = split or RequestedSplit()
    if is_checkpoint(location):
        run = RunConfig(model=location)
        path, config = open_checkpoint(location, ignore)
        from jrl.text.json_tokenizer import checkpoint_tokenizer  # needs an extra

        if adapters is not None:
            open_adapters(adapters, path, config, "lora")
        tokenizer = checkpoint_tokenizer(path, config.vocab_size)
        network = config
        source: RunFolder | Path = path
    else:
        check_of_checkpoint(adapters, location, is_checkpoint=False)
        folder = RunFolder.read(location)
        run = run_of(folder)
        # Implementations were chosen for the training devices; here the best that applies is used.
        run = replace(run, **run.without_implementations)
        tokenizer = load_tokenizer(folder.tokenizer_path)
        network = read_model_config(folder) or preset(run.model, tokenizer.vocab_size)
        path, source = folder.path, folder
    model = network_of(network.with_unused_ids(tokenizer.unused_ids), run)
    device_split = parse_device_split(split, layout, run)
    mesh = _mesh(model, _default_layout(run) if layout is None else layout, device_split)
    format, versions = prompt_format(run, tokenizer), PolicySource(source, model, mesh, adapters)
    return ServedModel(path.resolve().name, model, mesh, device_split, format, versions)


def _default_layout(run: RunConfig) -> str:
    if run.rollout_devices is not None:
        return run.rollout_layout or f"dp{run.rollout_devices}"
    return run.rollout_layout or str(rollout_layout(Layout.parse(run.layout)))


def _mesh(model: ModelConfig, text: str, device_split: DeviceSplit | None) -> FoldedMesh:
    """Mesh of a layout that can serve the network; with disaggregation the mesh of all devices."""
    if device_split is not None:
        groups = device_split.mesh
        check_splits(model, groups, first_placement(model, groups, device_split.expert_slots))
        # Weights are loaded on it before they are sent to the groups: data parallel, with experts
        # over as many devices as divide them.
        devices = [*devices_of(groups.attention), *devices_of(groups.experts)]
        ep = math.gcd(len(devices), model.num_experts)
        mesh = fold(Layout(dp=len(devices), ep=ep), devices)
    else:
        layout = Layout.parse(text)
        devices = first_devices(layout.num_devices, f"layout {text!r}", "give --layout dp1")
        mesh = rollout_mesh(text, fold(layout, devices))
    check_supported(Model(model, mesh))
    return mesh
