"""LoRA adapters of a published checkpoint, in PEFT's format: their folder and its checks."""

from pathlib import Path

from moe.architecture.lora import Lora
from moe.config import ModelConfig


def open_adapters(directory: str, checkpoint: Path | str, config: ModelConfig, option: str) -> Lora:
    """Rank, scale and targets of the adapters in a folder, from its options and names of tensors.

    Args:
      checkpoint: the folder of the checkpoint that they are added to.
      config: its network.
      option: the setting that named the folder, for messages.

    Raises:
      ValueError: where the folder has none, or those of another network.
    """
    from moe.huggingface import adapters_of, architecture_of  # needs an extra

    if not (Path(directory) / "adapter_config.json").is_file():
        inner = Path(directory) / "adapters"
        fix = f"give {inner}" if inner.is_dir() else "give a folder that PEFT or a run wrote"
        raise ValueError(f"{option}={directory!r} has no adapter_config.json: {fix}.")
    return adapters_of(directory, config, architecture_of(checkpoint))


def check_of_checkpoint(directory: str | None, policy: str, is_checkpoint: bool) -> None:
    """Rejects ``--lora`` for a policy that is a run, which has its own adapters or none."""
    if directory is not None and not is_checkpoint:
        raise ValueError(
            f"lora={directory!r} needs a published checkpoint to add adapters to, and {policy} is "
            "a run, which has its own: leave it out, or give the checkpoint."
        )
