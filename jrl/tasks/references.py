"""References to custom code: ``path/to/file.py:name`` or ``package.module:name``.

A run keeps a copy of each file, and reads the copy when it is resumed or evaluated. Installed
modules are not copied.
"""

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from jrl.tasks.workers.process import Worker, program_worker
from jrl.tasks.workers.user_code import build_from, load_source

_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class CodeReference:
    """A name in a file or a module. ValueError is raised if its code cannot be run, or has no such
    name.

    Attributes:
      text: the reference as given.
      name: in the file or module.
      file: the path of the file, None for a module.
      module: the module, None for a file.
      source: content of the file, None for a module.
    """

    text: str
    name: str
    file: str | None = None
    module: str | None = None
    source: bytes | None = None

    def worker_maker(
        self, kind: str, folder: str, *, makes: bool, seconds: float
    ) -> Callable[[], Worker]:
        """Makes workers that run it from a copy, so that later changes of the file have no effect
        on restarted workers.

        Args:
          kind: kind of the worker program, "reward" or "environment".
          folder: for the copy.
          makes: whether it makes a task; otherwise it is a reward itself.
          seconds: time limit of one answer.
        """
        copy = Path(folder) / f"{kind}.py"
        copy.write_bytes(self.source or b"")
        about = {"file": self.file, "module": self.module, "name": self.name, "makes": makes}
        described = json.dumps({**about, "copy": str(copy), "path": sys.path})
        return lambda: program_worker(kind, described, seconds=seconds)

    def make(self) -> Any:
        """Makes the task in this process."""
        return self._load(lambda module: build_from(module, self.name))

    def is_reward(self) -> bool:
        """True if it names a function that takes a prompt and a completion."""
        target = self._load(lambda module: getattr(module, self.name))
        if isinstance(target, type) or not callable(target) or hasattr(target, "prompts"):
            return False
        parameters = inspect.signature(target).parameters.values()
        return len([each for each in parameters if each.default is each.empty]) >= 2

    def _load(self, use: Callable[[ModuleType], Any]) -> Any:
        try:
            if self.source is not None:
                assert self.file is not None
                name = f"jrl_task_{sha256(self.source).hexdigest()[:16]}"
                module = sys.modules.get(name) or load_source(self.source, self.file, name)
            else:
                assert self.module is not None
                module = importlib.import_module(self.module)
            if not hasattr(module, self.name):
                raise ValueError(f"it has no {self.name}")
            return use(module)
        except Exception as error:  # custom code may fail in any way
            raise ValueError(
                f"{self.text} does not make a task: {type(error).__name__}: {error}"
            ) from error


def is_code_reference(text: str) -> bool:
    """True if a text has the form of a reference. The file, or the module if its name has a dot,
    need not exist."""
    if _FILE.fullmatch(text):
        return True
    match = _MODULE.fullmatch(text)
    # A misspelt kind of task looks like a module too.
    return match is not None and ("." in match[1] or find_spec(match[1]) is not None)


def is_module_reference(text: str) -> bool:
    """True if a text has the form of a reference to a module."""
    return is_code_reference(text) and not _FILE.fullmatch(text)


def parse_reference(text: str, code: Mapping[str, bytes] | None = None) -> CodeReference:
    """Parses a reference, and reads its file.

    Args:
      code: contents of the copies of a run, by `copy_name`; if None, or if it has no copy, the file
        is read from its path.

    Raises:
      ValueError: if it is not a reference, or the file cannot be read.
    """
    if match := _FILE.fullmatch(text):
        file, name = match[1], match[2]
        original = Path(os.path.expanduser(file))
        source = (code or {}).get(copy_name(file))
        if source is None:
            source = _read(text, original)
        return CodeReference(text, name, file=str(original.absolute()), source=source)
    if match := _MODULE.fullmatch(text):
        return CodeReference(text, match[2], module=match[1])
    raise ValueError(
        f"{text!r} names nothing: write path/to/file.py:name, or package.module:name of a module "
        "that can be imported"
    )


def copy_name(file: str) -> str:
    """File name of the copy of a file, made unique by a hash of its path."""
    stem = re.sub(r"\W+", "_", Path(file).stem)
    return f"{stem}-{sha256(file.encode()).hexdigest()[:8]}.py"


def read_sources(texts: list[str], code_path: Path | None = None) -> dict[str, bytes]:
    """Contents of the files of references, by name of the copy that a run keeps.

    Args:
      code_path: folder of the copies of a run; if None, or if it has no copy, the file is read from
        its path.
    """
    files = {}
    for text in texts:
        if match := _FILE.fullmatch(text):
            copy = None if code_path is None else code_path / copy_name(match[1])
            original = Path(os.path.expanduser(match[1]))
            path = copy if copy is not None and copy.exists() else original
            files[copy_name(match[1])] = _read(text, path)
    return files


def _read(text: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{text}: {path} cannot be read: {error.strerror}") from None
