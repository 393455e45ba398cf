"""The compilers of absent accelerators: where they are, topologies, and compilation.

Nothing here imports JAX before `prepare` has set the environment that JAX and its plugins read.
"""

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.absent.descriptions import GPUS, TPUS, target_config
from benchmarks.absent.machine_code import Kernel, read_dumps

PACKAGES = {
    "cuda": (
        *("jax-cuda13-plugin", "jax-cuda13-pjrt"),
        *("nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-nvjitlink"),
    ),
    "tpu": ("libtpu",),
}
"""Packages that compile for a platform; the extra `absent` has them."""
OTHERS = ("jax", "jaxlib")
SCHEDULED = "scheduled.txt"
"""File with the scheduled program in a folder that is kept."""
DUMP = "MOSAIC_GPU_DUMP_"
"""Variables that make Mosaic GPU leave files of each kernel start so. It then leaves the code after
each of its passes too, 30 MB a kernel, and runs a disassembler."""
DUMPS = ("PTX", "PTXAS", "SASS", "RESOURCES", "HOST_LLVM")
"""Files that are read."""


class Program(NamedTuple):
    """A program that was compiled for absent devices.

    Attributes:
      text: the scheduled program.
      arguments, temporaries: bytes of each on a device.
      kernels: the Mosaic kernels in it, each once, where they were read.
      seconds: processor time that compilation took, of all threads and processes.
      results: bytes of results on a device, without those in the memory of donated arguments.
      others: bytes that are in use besides; 0 where nothing is known of them.
    """

    text: str
    arguments: int
    temporaries: int
    kernels: list[Kernel]
    seconds: float
    results: int = 0
    others: int = 0


def installed(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing(platform: str) -> str | None:
    """The reason why programs for "cuda" or "tpu" cannot be compiled here; None if they can."""
    absent = [package for package in PACKAGES[platform] if installed(package) is None]
    if not absent:
        return None
    return (
        f"no compiler for {platform}: {', '.join(absent)} not installed (Python 3.12, "
        f'pip install -e ".[absent]")'
    )


def versions() -> dict[str, str]:
    """Versions of the compilers and of JAX, of those that are installed."""
    names = [*OTHERS, *(name for packages in PACKAGES.values() for name in packages)]
    return {name: found for name in names if (found := installed(name)) is not None}


def prepare() -> None:
    """Sets the environment in which compilers are found, before JAX is first used."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    # A TPU belongs to one process; its compiler need not.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # What a cache returns was not compiled: kernels would leave no machine code.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    toolkits = sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*/bin/ptxas"))
    if toolkits:
        root = toolkits[-1].parent.parent
        os.environ["PATH"] = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
        os.environ["CUDA_ROOT"] = str(root)
        # Autotuning would run candidates on a device.
        flags = f"--xla_gpu_cuda_data_dir={root} --xla_gpu_autotune_level=0"
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()


def devices(kind: str, shape: str | None = None) -> list[Any]:
    """Absent devices.

    Args:
      kind: a name of `descriptions.GPUS` or `descriptions.TPUS`.
      shape: of GPUs "slices x hosts x devices of a host", such as "1x16x8", None one host of eight;
        of TPUs "v5p:2x2x2", None the topology of the description.
    """
    from jax.experimental import topologies

    if kind in TPUS:
        name = shape or TPUS[kind].topology
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=kind,
        topology=shape or "1x1x8",
        target_config=target_config(GPUS[kind]),
    )
    return list(described.devices)


def platform_of(kind: str) -> str:
    """The platform of a kind of device: "cuda" or "tpu"."""
    return "tpu" if kind in TPUS else "cuda"


def compile_for(
    kind: str,
    function: Callable[..., Any],
    *operands: Any,
    keep: Path | None = None,
    reads_kernels: bool = True,
    options: dict[str, Any] | None = None,
) -> Program:
    """Compiles a function for absent devices.

    Args:
      kind: of the devices.
      function: is passed to `jax.jit`, unless it can be traced already.
      operands: shapes with shardings over `devices`, and static arguments.
      keep: folder in which PTX, machine code and reports of the kernels stay, and the scheduled
        program; None removes them.
      reads_kernels: else `Program.kernels` is empty, unless their files are kept.
      options: of the compiler, besides those of the function.
    """
    import jax

    folder = keep or Path(tempfile.mkdtemp(prefix="absent-"))
    for name in (*DUMPS, "TO"):
        os.environ.pop(f"{DUMP}{name}", None)
    if reads_kernels or keep is not None:
        os.environ |= {f"{DUMP}{name}": "1" for name in DUMPS} | {f"{DUMP}TO": str(folder)}
    # A kernel that this process compiled before would leave nothing.
    jax.clear_caches()
    began = _processor_time()
    try:
        trace = getattr(function, "trace", None) or jax.jit(function).trace
        traced = trace(*operands)
        lowered = traced.lower(lowering_platforms=(platform_of(kind),))
        compiled = lowered.compile(compiler_options=options)
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        assert memory is not None, "every compiler of absent devices says what memory it takes"
        if keep is not None:
            (keep / SCHEDULED).write_text(text)
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        kernels = read_dumps(folder)
        seconds = _processor_time() - began
        return Program(text, arguments, temporaries, kernels, seconds, results)
    finally:
        if keep is None:
            shutil.rmtree(folder)


def _processor_time() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
