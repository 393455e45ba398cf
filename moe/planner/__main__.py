"""Command line: prints the best layouts of a model on a cluster, and what rules out others."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from moe.execution import Execution
from moe.planner.cost import DISPATCHES, METHODS, System, library_system, system_on
from moe.planner.method import Method
from moe.planner.models import PRESETS, ModelSizes, sizes_from
from moe.planner.report import draw, report
from moe.planner.search import Choices, SearchResult, search
from sharding.compression import ACTIVATION_DTYPES
from sharding.costs.hardware import HARDWARE, TPUS, Hardware, parse
from sharding.costs.transfer import GPU_BUFFER_FACTOR

PARSER = argparse.ArgumentParser(
    description="Finds the fastest parallel layout of a model on a cluster. No device is needed.",
)
PARSER.add_argument(
    "model", help=f"directory or config.json of a checkpoint, or one of {', '.join(PRESETS)}"
)
PARSER.add_argument(
    "--hardware",
    required=True,
    help="device type and number, for example h100x64, or a file of one's own and a number, "
    f'"FILE.json x64"; types: {", ".join(HARDWARE)}',
)
PARSER.add_argument(
    "--ignore-options",
    nargs="+",
    default=[],
    metavar="NAME",
    help="options of config.json that are passed over although they are not known",
)
PARSER.add_argument("--tokens", default="4M", help="tokens per optimizer step; 4M is 4 x 2^20")
PARSER.add_argument("--seq", default="4096", help="tokens per sequence")
PARSER.add_argument(
    "--program",
    choices=("jrl", "megatron-core", "megascale-moe"),
    default="jrl",
    help="training system to model: its overlap, storage and recomputation",
)
PARSER.add_argument(
    "--activation-wire",
    nargs="+",
    choices=("none", *ACTIVATION_DTYPES),
    default=["none"],
    help="communication dtypes of token dispatch to try (only --program jrl)",
)
PARSER.add_argument(
    "--gradient-wire",
    nargs="+",
    choices=("float32", "bfloat16"),
    default=["float32"],
    help="communication dtypes of gradients to try (only --program jrl)",
)
PARSER.add_argument(
    "--expert-chunks",
    nargs="+",
    type=int,
    default=[1],
    help="numbers of token dispatch chunks to try (only --program jrl)",
)
for flag, what in (
    ("--two-batch-overlap", "also try two-batch overlap"),
    ("--overlap-grad-reduce", "also try gradient reduction inside the backward pass"),
):
    PARSER.add_argument(flag, action="store_true", help=f"{what} (only --program jrl)")
PARSER.add_argument("--top", type=int, default=8, help="number of layouts to print")
PARSER.add_argument("--picture", type=Path, metavar="FILE", help="also write a picture of them")
PARSER.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)


COMPILE = "python -m benchmarks.absent plan"
"""Command of a checkout that compiles layouts for absent devices, of the kinds that it names."""
SERVE = "python -m benchmarks.planner.serving"
"""Command of a checkout that plans servers."""
LIBRARY_FLAGS = (
    *("activation_wire", "gradient_wire", "expert_chunks"),
    *("two_batch_overlap", "overlap_grad_reduce"),
)
"""Flags of `--program jrl` only."""


def join_numbers(words: Sequence[str]) -> list[str]:
    """Words of a command line, with ``FILE.json x64`` as one of them, quoted or not."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].endswith(".json") and re.fullmatch(r"x[1-9]\d*", word):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
    return joined


def parse_count(text: str) -> int:
    """``"4M"`` as 4 x 2^20, ``"8K"`` as 8 x 2^10, digits as they are.

    Raises:
      ValueError: on another spelling.
    """
    match = re.fullmatch(r"([1-9]\d*)([KM]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens: write for example 4M, 8K or 4096.")
    return int(match[1]) * {"": 1, "K": 2**10, "M": 2**20}[match[2]]


def model_of(text: str, ignore: Sequence[str] = ()) -> ModelSizes:
    """A preset, or a checkpoint.

    Args:
      ignore: options of config.json that are passed over.

    Raises:
      ValueError: for another name.
    """
    if text in PRESETS:
        return PRESETS[text]
    if not Path(text).exists():
        raise ValueError(f"model {text!r} is neither a checkpoint nor one of {', '.join(PRESETS)}.")
    return sizes_from(text, ignore)


def program_of(args: argparse.Namespace, hardware: Hardware) -> tuple[Method, System, Choices]:
    """Method and system of a program, and the choices that are left to the search.

    Raises:
      ValueError: for fewer than one chunk, and for choices that the program does not support.
    """
    name = args.program
    options = {flag: getattr(args, flag) for flag in LIBRARY_FLAGS}
    if min(args.expert_chunks) < 1:
        raise ValueError(
            f"--expert-chunks {min(args.expert_chunks)} must be at least 1; 1 sends all tokens "
            "in one chunk."
        )
    if name == "jrl":
        system, is_gpu = library_system(hardware), hardware.name not in (*TPUS, "laptop")
        dtypes = [None if dtype == "none" else dtype for dtype in args.activation_wire]
        options["activation_wire"] = dtypes
        # Buffers of GPUs have the factor that a run uses by default.
        factor = GPU_BUFFER_FACTOR if is_gpu else None
        method = Method(Execution(buffer_factor=factor), even=is_gpu, storage="bfloat16")
        return method, system, Choices(storage=(method.storage,), **options)
    for flag, value in options.items():
        if value != PARSER.get_default(flag):
            value_text = "" if value is True else f" {value[0]}"
            raise ValueError(
                f"--{flag.replace('_', '-')}{value_text} is only for --program jrl, not {name}: "
                "leave it out."
            )
    title = {key.lower(): key for key in METHODS}[name]
    method = METHODS[title]
    dispatch = DISPATCHES.get(title, (method.dispatch,))
    system = system_on(title, hardware.name)
    return method, system, Choices(dispatch, storage=(method.storage,))


def main(arguments: list[str] | None = None) -> int:
    """Prints the best layouts, and returns `answer`'s exit status."""
    PARSER.prog = "jrl plan" if Path(sys.argv[0]).stem == "jrl" else "python -m moe.planner"
    args = PARSER.parse_args(join_numbers(sys.argv[1:] if arguments is None else arguments))
    return answer(lambda: _print_plans(args))


def answer(command: Callable[[], None]) -> int:
    """The exit status: 0; 2 when there is no answer, with the reason; 1 when the reader of the
    output has exited, as `head` does; 130 after Ctrl-C."""
    try:
        command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as reason:
        print("error:", reason, file=sys.stderr)
        return 2
    return 0


def _print_plans(args: argparse.Namespace) -> None:
    if args.serve:
        raise ValueError(f"--serve plans servers, in a checkout: run {SERVE} {args.model}.")
    model = model_of(args.model, args.ignore_options)
    hardware, _ = parse(args.hardware)
    rows, time = batch_sizes(args)
    result = result_of(args, model)
    print(
        f"{args.model}: {model.parameters / 1e9:.4g} B parameters, "
        f"{model.training_flops(time) / 1e9:.4g} GFLOP per token, "
        f"steps of {rows:,} x {time:,} tokens on {args.hardware}\n"
    )
    print(report(result, model, rows, time, hardware, args.top))
    if args.picture is not None:
        title = f"{args.model} on {args.hardware}, {rows:,} x {time:,} tokens"
        draw(result.plans[: args.top], hardware, args.picture, title)
    if args.program == "jrl" and hardware.name != "laptop":
        print(f"\n{COMPILE} with these arguments compiles them without the devices.")


def batch_sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Sequences of an optimizer step, and tokens of each.

    Raises:
      ValueError: where the tokens are no whole number of sequences.
    """
    time, tokens = parse_count(args.seq), parse_count(args.tokens)
    if tokens % time:
        raise ValueError(
            f"--tokens {args.tokens} is not a multiple of --seq {args.seq}: choose one."
        )
    return tokens // time, time


def result_of(args: argparse.Namespace, model: ModelSizes) -> SearchResult:
    """The search that a command line asks for.

    Raises:
      ValueError: for invalid arguments, and if no layout fits.
    """
    hardware, devices = parse(args.hardware)
    rows, time = batch_sizes(args)
    method, system, choices = program_of(args, hardware)
    result = search(model, devices, rows, time, hardware, method, system, choices)
    if result.plans:
        return result
    if result.too_large:
        least = min(result.too_large, key=result.too_large.__getitem__)
        raise ValueError(
            f"no layout fits on {args.hardware}: the smallest, {least}, needs "
            f"{result.too_large[least] / 1e9:.0f} GB per device. Use more devices."
        )
    rules = ", ".join(rule for rule, _ in result.illegal.most_common(3))
    raise ValueError(f"no layout of {args.hardware} is valid: {rules}.")


if __name__ == "__main__":
    sys.exit(main())
