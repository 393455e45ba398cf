"""Import and export of a run's adapters in PEFT's format."""

from dataclasses import replace

import jax
from jaxtyping import Array

from jrl.checks import flag
from jrl.config.run import RunConfig
from jrl.processes.agreement import RaiseInAllProcesses, is_main_process, to_host
from jrl.published.adapters import open_adapters
from jrl.published.base_name import CARD, base_name, note_on_base
from jrl.runs import records
from jrl.runs.folder import RunFolder
from jrl.text.checkpoint_files import checkpoint_files, read_object
from jrl.trainer.evaluation.model_card import CardSubject, model_card
from jrl.trainer.setup.setup import Setup
from moe import placement
from moe.adapters import select_trained
from moe.config import Model
from moe.huggingface import architecture_of, config_from, load_adapters, save_adapters
from moe.weights import Transformer, axis_sizes, table


def resolve_adapter_settings(run: RunConfig) -> RunConfig:
    """Copies rank, alpha and targets of the adapters that a new run starts from into its settings.

    Raises:
      ValueError: if there are none, they are of another network, or flags contradict them.
    """
    directory = run.lora_from
    if directory is None:
        return run
    if run.checkpoint is None:
        raise ValueError(
            f"lora_from={directory!r} has adapters of a public checkpoint, not of {run.model!r}: "
            "give --model hf:DIR."
        )
    network = config_from(run.checkpoint, ignore=run.ignore_options)
    lora = open_adapters(directory, run.checkpoint, network, "lora_from")
    adapter_settings = {
        "lora_rank": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_targets": ",".join(lora.targets),
        "lora_rank_stabilised": lora.rank_stabilised,
    }
    for name, value in adapter_settings.items():
        requested = getattr(run, name)
        if requested not in (None, False, value):
            raise ValueError(
                f"{name}={requested!r} differs from the {value!r} of lora_from={directory!r}: "
                f"leave out {flag(name)}."
            )
    return replace(run, **adapter_settings)


def load_initial_adapters(setup: Setup) -> Transformer[Array] | None:
    """Loads the adapters that the run starts from; None for fresh adapters, or a run without."""
    run = setup.run
    if run.lora_from is None or run.checkpoint is None:
        return None
    architecture = architecture_of(run.checkpoint)
    adapters = load_adapters(run.lora_from, Model(setup.model, setup.mesh), architecture)
    print(f"starting from the adapters in {run.lora_from}")
    return adapters


def write_adapters(setup: Setup, folder: RunFolder, policy: Transformer[Array], step: int) -> None:
    """Writes the adapters of the policy in PEFT's format, with the tokenizer and a model card;
    writes nothing for a run without, nor for one that did not start from a public checkpoint."""
    run = setup.run
    if setup.model.lora is None or run.checkpoint is None:
        return
    adapters = select_trained(policy, table(setup.model))
    depth = axis_sizes(setup.model)["layer"]
    # Copied to the host outside of the block below, in which no collective may be called.
    in_order = placement.in_layer_order(to_host(adapters), setup.mesh, depth)
    with RaiseInAllProcesses():
        if is_main_process():
            base = _base_of(setup, folder)
            save_adapters(
                folder.adapters_path,
                setup.model,
                jax.device_get(in_order),
                architecture=architecture_of(folder.model_path),
                base=base,
            )
            for name, content in checkpoint_files(setup.tokenizer, folder.origin_path).items():
                records.replace(folder.adapters_path / name, content)
            write_card(setup, folder, step)
            if (note := note_on_base(base)) is not None:
                print(note)


def write_card(setup: Setup, folder: RunFolder, step: int) -> None:
    """Writes the model card of a run's adapters, in the first process; nothing if it has none."""
    if is_main_process() and folder.adapters_path.is_dir():
        card = model_card(folder, CardSubject("adapters", _base_of(setup, folder), step))
        records.replace(folder.adapters_path / CARD, card.encode())


def _base_of(setup: Setup, folder: RunFolder) -> str:
    """Name of the published checkpoint that the adapters are added to."""
    return base_name(setup.run.base_name, setup.run.model, read_object(folder.model_path))
