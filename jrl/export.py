"""``python -m jrl.export RUN --to DIR``: export of a run's policy as a Hugging Face checkpoint, a
GGUF file or a repository of the Hub.

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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tyro

from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.program import program
from jrl.published.base_name import CARD, base_name
from jrl.published.hub import check_target, push
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
    to: str | None = None
    """Folder to create, which may not exist yet."""
    gguf: str | None = None
    """GGUF file to create, for llama.cpp."""
    quantise: Literal["q8_0"] | None = None
    """Quantise the matrices of the GGUF file; None keeps their dtype."""
    push: str | None = None
    """Repository of the Hugging Face Hub to upload to, OWNER/NAME, created private if it does not
    exist, or a local folder to create, ./DIR. A run with adapters that are not merged pushes
    these."""
    step: int | None = None
    """Step of the checkpoint; None is the newest."""
    merge: tyro.conf.FlagCreatePairsOff[bool] = False
    """Merge the LoRA adapters of a run into its base weights; without it a run with adapters is not
    exported, as its folder has them already."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of the tensors in the files; None is what the run computes in."""
    base_name: str | None = None
    """Name of the base checkpoint for the model card; None takes the run's name for it."""
    architecture: str | None = None
    """A class of transformers, for example Qwen3MoeForCausalLM; None keeps the
    class of the base checkpoint, or takes the first that can express the network."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    options = parse_flags(
        ExportOptions,
        program("export"),
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
    if not (options.to or options.gguf or options.push):
        raise ValueError("nothing is to be written: give --to DIR, --gguf FILE or --push NAME.")
    for name in ("to", "gguf"):
        target = _path(getattr(options, name) or "")
        if getattr(options, name) and (target.exists() or target.is_symlink()):
            kind = "folder" if name == "to" else "file"
            raise ValueError(f"{name}={str(target)!r} already exists: choose a new {kind}.")
    if options.quantise and not options.gguf:
        raise ValueError(
            f"quantise={options.quantise!r} is for GGUF files: give --gguf FILE, or leave it out."
        )
    if options.gguf and find_spec("gguf") is None:
        raise ValueError('gguf needs the package gguf: run pip install -e ".[gguf]"')
    if options.push:
        check_target(options.push)
    adapted = _is_adapted(folder)
    if adapted and not options.merge and not _pushes_adapters(options, folder):
        raise ValueError(
            f"run {folder.path} trains adapters, which are in {folder.path / 'adapters'} in the "
            "format of PEFT: give --merge for full weights with the adapters merged."
        )
    if options.merge and not adapted:
        raise ValueError(
            f"merge=True has nothing to merge: run {folder.path} has no adapters. Leave out "
            "--merge."
        )


def _is_adapted(folder: RunFolder) -> bool:
    """True if the run trains adapters."""
    return folder.config()["run"].get("lora_rank") is not None


def _pushes_adapters(options: ExportOptions, folder: RunFolder) -> bool:
    """True if what is exported is the run's folder of adapters, as it is."""
    if options.merge or options.to or options.gguf or not _is_adapted(folder):
        return False
    if options.step is not None or not (folder.path / "adapters").is_dir():
        raise ValueError(
            f"run {folder.path} has adapters of its end alone, in {folder.path / 'adapters'}: "
            "leave out --step and wait for it, or give --merge."
        )
    return True


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _export(options: ExportOptions, folder: RunFolder, run: RunConfig) -> None:
    """Writes the checkpoint folder, and the file and the repository that are made of it."""
    if options.push and _pushes_adapters(options, folder):
        print(f"pushed to {push(folder.path / 'adapters', options.push)}")
        return
    parent = None
    if options.gguf is not None:
        parent = _path(options.gguf).absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if options.to is None:  # for a time, on the disk of the file
            name = tempfile.TemporaryDirectory(dir=parent, prefix=".export-")
            target = Path(stack.enter_context(name)) / folder.path.resolve().name
        else:
            target = _path(options.to)
        base = _write_checkpoint(options, folder, run, target)
        if options.gguf is not None:
            from jrl.published.gguf_writer import Description, write_gguf

            description = Description(folder.path.resolve().name, base)
            write_gguf(target, _path(options.gguf), description, options.quantise)
            print(f"{options.gguf}: {_path(options.gguf).stat().st_size / 1e6:.1f} MB")
        if options.push is not None:
            print(f"pushed to {push(target, options.push)}")


def _write_checkpoint(
    options: ExportOptions, folder: RunFolder, run: RunConfig, target: Path
) -> str | None:
    """Writes the policy as a checkpoint folder, and returns the name of its base."""
    import jax  # its devices are chosen by now

    from jrl.text.checkpoint_files import checkpoint_files
    from jrl.trainer.evaluation.model_card import CardSubject, model_card
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
    with _atomic_folder(target) as folder_in_progress:
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
        f"{options.to or folder.path.name}: {architecture}, {num_parameters(model):,} parameters "
        f"in {dtype}, {folder.path} after step {step}"
    )
    print(f"in addition to the weights: {', '.join(sorted(files))}")
    if "tokenizer.json" not in files:
        print(
            "tokenizer.model is the run's SentencePiece model, for which transformers has no "
            "class: --model hf:DIR of jrl reads it; elsewhere give token ids or use sentencepiece."
        )
    return base


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
