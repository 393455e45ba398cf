"""Push of a folder to a repository of the Hugging Face Hub, or to a local folder."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from jrl.published.base_name import HUB, HUB_NAME

LOCAL = ("file://", "/", "./", "../", "~")
"""How the name of a local folder begins."""


class PushFailed(RuntimeError):
    """The Hub rejected a push or was not reached; the message says why."""


def check_target(name: str) -> None:
    """Checks the target of a push before anything is written.

    Args:
      name: OWNER/NAME of the Hub, or a local folder: file://DIR, /DIR, ./DIR, ../DIR or ~/DIR.

    Raises:
      ValueError: for another name, a local folder that exists, and a Hub that this user has no
        token of.
    """
    if (folder := _local_folder(name)) is not None:
        if folder.exists():
            raise ValueError(f"push={name!r} already exists: choose a new folder.")
        return
    if HUB_NAME.fullmatch(name) is None:
        raise ValueError(
            f"push={name!r} must be OWNER/NAME of the Hugging Face Hub, or a local folder such as "
            "./DIR."
        )
    if find_spec("huggingface_hub") is None:
        raise ValueError('push needs huggingface_hub: run pip install -e ".[hf]"')
    from huggingface_hub import get_token

    if get_token() is None:
        raise ValueError(
            f"push={name!r} needs a token of the Hugging Face Hub: set HF_TOKEN, or run hf auth "
            "login."
        )


def push(folder: Path, name: str) -> str:
    """Copies a folder to the target, which `check_target` accepts; returns its address.

    A repository that does not exist is created, as a private one.

    Raises:
      PushFailed: if the Hub rejects it or cannot be reached.
    """
    if (target := _local_folder(name)) is not None:
        shutil.copytree(folder, target)
        return str(target)
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by jrl export")
    except Exception as error:  # whatever the network and its libraries raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PushFailed(f"push to {name} failed: {reason}") from error
    return HUB + name


def _local_folder(name: str) -> Path | None:
    if not name.startswith(LOCAL):
        return None
    return Path(os.path.expanduser(name.removeprefix("file://")))
