"""Network of a published checkpoint, with what of its config.json was passed over."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jrl.processes.agreement import is_main_process
from jrl.published.location import prepare_checkpoint
from moe.config import ModelConfig


def open_checkpoint(name: str, ignore: Sequence[str] = ()) -> tuple[Path, ModelConfig]:
    """Folder and network of a checkpoint; a line is printed of options that are passed over.

    Args:
      name: as for `jrl.published.location.checkpoint_folder`.
      ignore: options of config.json that have no effect here, by the user's word.

    Raises:
      ValueError: where there is none, an extra is missing, or the network is not supported.
    """
    check_packages(f"model={name}")
    from moe.huggingface import config_from, idle_options  # needs an extra

    folder = prepare_checkpoint(name)
    config = config_from(folder, ignore=ignore)
    passed_over = [*idle_options(folder), *ignore]
    if passed_over and is_main_process():
        print(f"passed over in config.json: {', '.join(passed_over)}", flush=True)
    return folder, config


def check_packages(subject: str) -> None:
    """Rejects what needs the packages of published checkpoints where they are not installed.

    Args:
      subject: what needs them, for the message.
    """
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        raise ValueError(
            f"{subject} needs safetensors and tokenizers, which are not both installed: run pip "
            'install -e ".[hf]"'
        )
