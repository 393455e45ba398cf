"""``python -m benchmarks.planner.serving MODEL --hardware h20,l40s``: plans of a server."""

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.planner.serving.plan import PREFILL, DevicePair, Load
from benchmarks.planner.serving.report import draw_timeline, report
from benchmarks.planner.serving.search import Space, search
from benchmarks.planner.serving.times import (
    EMPTY_PROFILE,
    Profile,
    Utilisation,
    read_network,
    read_profile,
)
from moe.planner.__main__ import answer, model_of
from moe.planner.cost import System
from moe.planner.models import PRESETS, ModelSizes
from sharding.costs.hardware import HARDWARE, Hardware, read_hardware

PARSER = argparse.ArgumentParser(
    prog="python -m benchmarks.planner.serving",
    description="Plans a server with attention and experts on separate devices.",
)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a server; those that are not given are None."""
    load = Load()
    parser.add_argument(
        "model", help=f"directory or config.json of a checkpoint, or one of {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--hardware", required=True, help="device types to choose from, for example h20,l40s"
    )
    parser.add_argument(
        "--ignore-options",
        nargs="+",
        default=[],
        metavar="NAME",
        help="options of config.json that are passed over although they are not known",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also write a picture")
    for flag, kind, text in (
        ("--slo", str, f"maximum time between tokens, as in 150ms (default {load.slo * 1000:g}ms)"),
        ("--prompt", int, f"tokens per prompt (default {load.prompt})"),
        ("--completion", int, f"tokens per completion (default {load.completion})"),
        ("--avg-seq", float, "cached tokens per sequence (default: prompt + completion / 2)"),
    ):
        parser.add_argument(flag, type=kind, help=text)
    parser.add_argument(
        "--prefill",
        choices=(*PREFILL, "best"),
        help="devices of prefill: not counted (elsewhere, the default), a separate group, shared "
        "in turns with decoding, or the better of these two (best)",
    )
    parser.add_argument(
        "--price",
        action="append",
        metavar="DEVICE=PRICE",
        help="price of a device type; an L20 is 1",
    )
    parser.add_argument(
        "--network",
        type=Path,
        metavar="FILE",
        help="measured network: lines of message bytes,fraction of the peak rate",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measured times by batch, instead of the roofline model: JSON such as "
        '{"h20": {"attention": {"1": [[256, 3.1e-4], [608, 6.6e-4]]}}}, by device type, device '
        "group (attention or experts) and devices per node; experts for a node with one expert",
    )
    parser.add_argument("--devices", type=int, help="maximum number of devices in both groups")


_add_flags(PARSER)


def parse_seconds(text: str) -> float:
    """``"150ms"`` or ``"0.15s"``.

    Raises:
      ValueError: on another spelling.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", text)
    if match is None or not float(match[1]) > 0:
        raise ValueError(f"--slo {text} is not a time above 0: write for example 150ms or 0.15s.")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def parse_devices(text: str) -> list[Hardware]:
    """The devices of ``"h20,l40s"``, each a known type or a file (`read_hardware`).

    Raises:
      ValueError: on an unknown one, or one given twice.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in HARDWARE and not name.endswith(".json")]
    if unknown or len(set(names)) != len(names):
        raise ValueError(
            f"--hardware {text} needs a list of different device types without "
            f"numbers: write for example h20,l40s, of {', '.join(HARDWARE)}."
        )
    return [read_hardware(name) if name.endswith(".json") else HARDWARE[name] for name in names]


def parse_prices(
    overrides: list[str] | None, hardware_types: Sequence[Hardware] = ()
) -> dict[str, float]:
    """Prices by device; those in `overrides` override the published ones.

    Args:
      hardware_types: devices to choose from, which may have prices of their own.

    Raises:
      ValueError: on another spelling.
    """
    types = {each.name: each for each in (*HARDWARE.values(), *hardware_types)}
    price_of = {name: each.price for name, each in types.items() if each.price is not None}
    for text in overrides or ():
        match = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)", text)
        if match is None or match[1] not in types or not float(match[2]) > 0:
            raise ValueError(
                f"--price {text} is not a device type and a price above 0: write for example "
                "h100=6."
            )
        price_of[match[1]] = float(match[2])
    return price_of


def device_pairs(
    hardware_types: list[Hardware],
    price_of: dict[str, float],
    efficiency: float,
    network: Utilisation | None,
    measured: dict[str, Profile],
) -> list[DevicePair]:
    """All pairs of a device for attention and one for experts.

    With a single type of device each counts as 1 instead of its price.

    Args:
      measured: times by device.

    Raises:
      ValueError: where one of multiple types has no price.
    """
    missing = [each.name for each in hardware_types if each.name not in price_of]
    if missing and len(hardware_types) > 1:
        raise ValueError(
            f"{missing[0]} has no price to compare it with other device types: set one, as in "
            f"--price {missing[0]}=2.5 (an L20 is 1)."
        )
    paid = price_of if len(hardware_types) > 1 else {hardware_types[0].name: 1.0}
    pairs = []
    for attention, experts in product(hardware_types, repeat=2):
        prices = paid[attention.name], paid[experts.name]
        profiled = (
            measured.get(attention.name, EMPTY_PROFILE).attention,
            measured.get(experts.name, EMPTY_PROFILE).experts,
        )
        pairs.append(
            DevicePair(attention, experts, prices, efficiency, (network, network), profiled)
        )
    return pairs


def plan_text(model: ModelSizes, args: argparse.Namespace, efficiency: float) -> str:
    """The plans of a server as text."""
    hardware_types = parse_devices(args.hardware)
    defaults = Load()
    load = Load(
        defaults.slo if args.slo is None else parse_seconds(args.slo),
        defaults.prompt if args.prompt is None else args.prompt,
        defaults.completion if args.completion is None else args.completion,
        args.avg_seq,
    )
    curve = None if args.network is None else read_network(args.network)
    measured = {} if args.profile is None else read_profile(args.profile)
    prefill = PREFILL[1:] if args.prefill == "best" else (args.prefill or PREFILL[0],)
    if args.devices is not None and args.devices < 2:
        raise ValueError(f"--devices {args.devices} must be at least 2: one for each group.")
    space = Space(prefill=prefill, most_devices=args.devices)
    choices = device_pairs(
        hardware_types, parse_prices(args.price, hardware_types), efficiency, curve, measured
    )
    plans = search(model, load, choices, space)
    head = (
        f"{args.model}: {model.parameters / 1e9:.4g} B parameters, {model.num_experts} experts, "
        f"{model.experts_per_token} per token; {load.cached:,.0f} cached tokens per sequence, "
        f"{load.slo * 1000:g} ms between tokens"
    )
    if args.picture is not None:
        draw_timeline(plans[0], args.picture, f"{args.model}, the first layers of a token step")
    return f"{head}\n\n{report(plans)}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the plans of a server, and returns `moe.planner.__main__.answer`'s status."""
    args = PARSER.parse_args(arguments)

    def show() -> None:
        model = model_of(args.model, args.ignore_options)
        print(plan_text(model, args, System().efficiency), flush=True)

    return answer(show)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
