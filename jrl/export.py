"""``python -m jrl.export RUN --to DIR``: export of a run's policy as a Hugging Face checkpoint.

DIR gets config.json and safetensors as `transformers` and vLLM read them, the tokenizer, the chat
template, generation_config.json and a model card, README.md. The run may still be in progress;
nothing is written into its folder.
"""

import glob
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tyro

from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.published.base_name import base_name
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer
from jrl.text.tokenizer import Tokenizer
from moe.config import Model, ModelConfig, preset

COPIED_OPTIONS = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range"),
    *("pad_token_id", "router_aux_loss_coef", "use_cache"),
)
"""Options of config.json that change no logit and stay what they were in the checkpoint that the
run began from."""


@dataclass(frozen=True)
class ExportOptions:
    """Arguments of ``python -m jrl.export``."""

    run: tyro.conf.Positional[str]
    """Folder of the run."""
    to: str
    """Folder to create, which may not exist yet."""
    step: int | None = None
    """Step of the checkpoint; None is the newest."""
    merge: tyro.conf.FlagCreatePairsOff[bool] = False
    """Merge the LoRA adapters of a run into its base weights; without it a run with adapters is not
    exported, as its folder has them already."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the tensors in the files; None is what the run computes in."""
    base_name: str | None = None
    """Name of the checkpoint that the run started from, for the model card; None is that of the
    run."""
    architecture: str | None = None
    """A class of transformers, for example Qwen3MoeForCausalLM; None takes that of the checkpoint
    that the run started from, or the first that can express the network."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    options = parse_flags(
        ExportOptions,
        "python -m jrl.export",
        arguments,
        "Writes the policy of a run as a checkpoint that transformers and vLLM read.",
    )
    folder = RunFolder.read(options.run)
    run = run_of(folder)
    _check(options, folder)
    # On the host, whatever the run learned on: nothing is computed.
    start_jax(1)
    _export(options, folder, run)
    return 0


def _check(options: ExportOptions, folder: RunFolder) -> None:
    """Raises ValueError or OSError for what cannot be, before anything is read or written."""
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        raise ValueError(
            "an export needs safetensors and tokenizers, which are not both installed: run pip "
            'install -e ".[hf]"'
        )
    target = Path(os.path.expanduser(options.to))
    if target.exists() or target.is_symlink():
        raise ValueError(f"to={options.to!r} already exists: choose a new folder.")
    # Of a run that has them the file says so; one without any has no such setting.
    adapted = folder.config()["run"].get("lora_rank") is not None
    if adapted and not options.merge:
        raise ValueError(
            f"run {folder.path} trains adapters, which are in {folder.path / 'adapters'} in the "
            "format of PEFT: give --merge for full weights with the adapters merged."
        )
    if options.merge and not adapted:
        raise ValueError(
            f"merge=True has nothing to merge: run {folder.path} has no adapters. Leave out "
            "--merge."
        )


def _export(options: ExportOptions, folder: RunFolder, run: RunConfig) -> None:
    import jax  # its devices are chosen by now

    from jrl.text.checkpoint_files import checkpoint_files
    from jrl.trainer.evaluation.model_card import CARD, CardSubject, model_card
    from jrl.trainer.evaluation.saved_policy import load_model
    from jrl.trainer.setup.network import network_of
    from moe.huggingface import fold_embedding_scale, save
    from moe.huggingface.configuration import family_for
    from moe.weights import num_parameters
    from sharding.folding import Layout, fold

    tokenizer = load_tokenizer(folder.tokenizer_path)
    model, original_architecture, extra_options = _describe_network(run, folder, tokenizer)
    architecture = options.architecture or original_architecture
    network = network_of(model, run)
    mesh = fold(Layout(), jax.devices()[:1])
    weights, step = load_model(folder, Model(network, mesh), masters=True, step=options.step)
    # The factor of a checkpoint (Gemma's) is part of its architecture; others have none.
    if original_architecture is None and model.embedding_scale != 1.0:
        model, weights = fold_embedding_scale(model, weights)
    dtype = options.dtype or network.dtype
    files = checkpoint_files(tokenizer, folder.origin_path)
    base = _base_of(options, folder, run)
    files[CARD] = model_card(folder, CardSubject("checkpoint", base, step)).encode()
    architecture = family_for(model, architecture).architecture
    with _atomic_folder(Path(os.path.expanduser(options.to))) as folder_in_progress:
        for name, content in files.items():
            (folder_in_progress / name).write_bytes(content)
        save(
            folder_in_progress,
            model,
            weights,
            architecture=architecture,
            dtype=dtype,
            about=extra_options,
        )
    print(
        f"{options.to}: {architecture}, {num_parameters(model):,} parameters in {dtype}, "
        f"{folder.path} after step {step}"
    )
    print(f"in addition to the weights: {', '.join(sorted(files))}")
    if "tokenizer.json" not in files:
        print(
            "tokenizer.model is the run's SentencePiece model, for which transformers has no "
            "class: --model hf:DIR of jrl reads it; elsewhere give token ids or use sentencepiece."
        )


def _describe_network(
    run: RunConfig, folder: RunFolder, tokenizer: Tokenizer
) -> tuple[ModelConfig, str | None, dict[str, Any]]:
    """The network, the architecture that it came as, and what else config.json shall say."""
    from jrl.text.checkpoint_files import token_ids
    from moe.huggingface.configuration import read_config

    extra_options = token_ids(tokenizer)
    if not folder.model_path.exists():
        return preset(run.model, tokenizer.vocab_size), None, extra_options
    model, family = read_config(folder.model_path)
    original_options = json.loads(folder.model_path.read_bytes())
    copied_options = {
        name: original_options[name]
        for name in COPIED_OPTIONS
        if original_options.get(name) is not None
    }
    return model, family.architecture, extra_options | copied_options


def _base_of(options: ExportOptions, folder: RunFolder, run: RunConfig) -> str | None:
    """Name of the checkpoint that the run started from; None for a preset."""
    if not folder.model_path.exists():
        return options.base_name or run.base_name
    named = json.loads(folder.model_path.read_bytes())
    return base_name(options.base_name or run.base_name, run.model, named)


def _is_alive(process: int) -> bool:
    """True if another process has this id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return process != os.getpid()


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A folder that gets its name when all is in it, and goes where that fails; those of processes
    of this host that were killed go first."""
    prefix = f"{target.name}.writing-{socket.gethostname()}-"
    for leftover in target.absolute().parent.glob(f"{glob.escape(prefix)}*"):
        process = leftover.name.removeprefix(prefix)
        if process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(leftover)
    temporary = target.absolute().parent / f"{prefix}{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        # Of two exports to one place the later one fails here, on a folder that is not empty.
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary)
        raise


if __name__ == "__main__":
    sys.exit(main())
