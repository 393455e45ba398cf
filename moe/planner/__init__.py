"""The planner's command for checkpoints: ``python -m moe.planner DIR --hardware h100x64``.

It is ``python -m sharding.planner`` with the network's own reader of config.json.
"""

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from moe.counts import sizes_of
from sharding.planner.models import ModelSizes


def sizes_from(path: str | Path, ignore: Collection[str] = ()) -> ModelSizes:
    """The sizes that a checkpoint's config.json states, of every family that `moe` reads.

    Args:
      path: the checkpoint's directory, or its config.json.
      ignore: options that are passed over although they are not known.

    Raises:
      ValueError: where the file is none of a supported network, or of one that the planner does not
        describe.
    """
    if find_spec("safetensors") is None:
        raise ValueError(
            f'{path} needs safetensors, which is not installed: run pip install -e ".[hf]".'
        )
    # The reader needs safetensors, an extra.
    from moe.huggingface import config_from

    try:
        return sizes_of(config_from(path, ignore=ignore))
    except ValueError as error:
        line = " ".join(str(error).split())
        raise ValueError(line if str(path) in line else f"{path}: {line}") from error
