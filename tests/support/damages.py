"""Damage to a file or a folder, for example a flipped bit or a truncated file."""

import shutil
from collections.abc import Callable
from pathlib import Path


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def cut_the_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0b100
    path.write_bytes(bytes(content))


def flip_the_first_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 0xFF
    path.write_bytes(bytes(content))


def zero(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_another(path: Path) -> None:
    """The content of the file beside it, or of its own name twice."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    path.write_bytes(others[0].read_bytes() if others else path.read_bytes() * 2)


def nest_deeply(path: Path) -> None:
    path.write_bytes(b'{"files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


DAMAGES: tuple[Callable[[Path], None], ...] = (
    delete,
    empty,
    halve,
    cut_the_last_byte,
    flip_a_bit,
    flip_the_first_byte,
    zero,
    lengthen,
    replace_by_a_folder,
    replace_by_another,
    nest_deeply,
)
