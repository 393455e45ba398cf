"""Timeline of a scheduled program: how much of its communication has work beside it.

Two streams run the program in its order. One computes, as fast as the datasheet's rates of products
and of memory allow; the other runs the collectives one after another, at the rate of the links
(`sharding.costs`). A start hands its collective to the second stream, and a done waits for it: what
it waits is exposed. A synchronous collective is exposed whole. Computation takes longer than that
on a chip, so that more can hide behind it; how collectives and kernels slow each other down is not
in it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.absent.traffic import Program
from benchmarks.absent.work import FREE, Work, work_of
from sharding.costs.hardware import HARDWARE, Hardware
from sharding.costs.transfer import Transfer
from sharding.folding import Layout
from sharding.overlap import ENTRY, Collective, Instruction, collective_of, computations


@dataclass
class Beside:
    """A collective of a program, with what lies between its start and its done.

    Attributes:
      name: of the instruction.
      collective: kind, bytes, devices.
      seconds: of one run, by its bytes.
      work: between its start and its done.
      exposed: seconds of a run that computation waits.
      times: that it runs in the program.
    """

    name: str
    collective: Collective
    seconds: float
    work: Work = field(default_factory=Work)
    exposed: float = 0.0
    times: int = 1


@dataclass
class Timeline:
    """Times of one run of a computation.

    Attributes:
      seconds: from the beginning to the end.
      work: of all its instructions.
      collectives: in it and in the computations that it calls.
    """

    seconds: float
    work: Work
    collectives: list[Beside]

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(one.times * one.seconds for one in self.collectives)

    @property
    def exposed(self) -> float:
        """Seconds of all collectives that computation waits."""
        return sum(one.times * one.exposed for one in self.collectives)

    def rows(self) -> list[dict[str, Any]]:
        """The collectives, those that take the longest first."""
        ordered = sorted(self.collectives, key=lambda one: -one.times * one.seconds)
        return [
            {
                "name": one.name,
                "kind": one.collective.kind,
                "devices": one.collective.devices,
                "bytes": one.collective.bytes,
                "times": one.times,
                "asynchronous": one.collective.is_asynchronous,
                "seconds": one.seconds,
                "exposed": one.exposed,
                "flops_beside": one.work.flops,
                "bytes_beside": one.work.bytes,
            }
            for one in ordered
        ]


def timeline(text: str, hardware: Hardware) -> Timeline:
    """Timeline of a scheduled program; loops of unknown length run once.

    Args:
      text: of ``compiled.as_text()``.
      hardware: rates of devices and links.
    """
    return _Run(computations(text), hardware).run(ENTRY)


class _Run:
    def __init__(self, program: Program, hardware: Hardware):
        self._program, self._hardware = program, hardware
        self._done: dict[str, Timeline] = {}

    def run(self, name: str) -> Timeline:
        if name not in self._done:
            self._done[name] = self._run(self._program[name])
        return self._done[name]

    def _run(self, instructions: list[Instruction]) -> Timeline:
        own = {one.name: one for one in instructions}
        in_flight: dict[str, tuple[Beside, float]] = {}
        found: list[Beside] = []
        now = links_free = 0.0
        total = Work()
        for one in instructions:
            started = _starts(one, in_flight)
            if one.operation.endswith(("-done", "-update")) or one.operation in FREE:
                if started is None:
                    continue
                beside, end = in_flight[started]
                if one.operation.endswith("-done"):
                    del in_flight[started]
                    beside.exposed = max(0.0, end - now)
                    now = max(now, end)
                else:
                    # The same collective under another name.
                    in_flight[one.name] = in_flight.pop(started)
                continue
            collective = collective_of(one, own, self._program)
            if collective is not None:
                beside = Beside(one.name, collective, self._seconds(collective))
                found.append(beside)
                links_free = max(now, links_free) + beside.seconds
                if one.operation.endswith("-start"):
                    in_flight[one.name] = beside, links_free
                if not collective.is_asynchronous:
                    beside.exposed, now = links_free - now, links_free
                continue
            inner = self._inner(one)
            if inner is None:
                work = work_of(one, own, self._program)
                seconds = work.seconds(self._hardware.peak, self._hardware.memory_bandwidth)
            else:
                work, seconds = inner.work, inner.seconds
                found += inner.collectives
            now += seconds
            total += work
            for beside, _ in in_flight.values():
                beside.work += work
        return Timeline(max(now, links_free), total, found)

    def _inner(self, one: Instruction) -> Timeline | None:
        """Timeline of what control flow runs; None for another instruction."""
        if one.operation == "while":
            body = self.run(one.computation("body"))
            times = self._iterations(one)
            return Timeline(
                body.seconds * times,
                body.work * times,
                [replace(each, times=each.times * times) for each in body.collectives],
            )
        if one.operation == "conditional":
            return max((self.run(name) for name in one.called), key=lambda each: each.seconds)
        if one.operation == "call":
            return self.run(one.computation("to_apply"))
        return None

    def _iterations(self, loop: Instruction) -> int:
        """Iterations of a loop; 1 if they are not known.

        A TPU's compiler does not write them down. The condition of a scan compares its index, which
        starts at 0, with a constant.
        """
        if loop.trip_count is not None:
            return loop.trip_count
        condition = self._program.get(loop.computation("condition"), [])
        if not condition or condition[-1].operation != "compare":
            return 1
        constants = {one.name: one for one in condition if one.operation == "constant"}
        limit = constants.get(condition[-1].operands[-1])
        is_below = "direction=LT" in condition[-1].attributes
        return int(limit.arguments) if limit is not None and is_below else 1

    def _seconds(self, collective: Collective) -> float:
        """Time of a collective over neighbouring devices, by its bytes."""
        n = collective.devices
        transfer = Transfer("", collective.kind, ("dp",), collective.bytes, 1)
        return transfer.seconds(Layout(dp=n), self._hardware) if n > 1 else 0.0


def _starts(one: Instruction, in_flight: dict[str, Any]) -> str | None:
    """Name of the collective in flight that an instruction ends or passes on."""
    return next((name for name in one.operands if name in in_flight), None)


def overlap(text: str, hardware: str) -> dict[str, Any]:
    """Figures of the overlap of a scheduled program.

    Args:
      hardware: of `sharding.costs.hardware.HARDWARE`.
    """
    found = timeline(text, HARDWARE[hardware])
    several = [one for one in found.collectives if one.collective.devices > 1]
    runs = sum(one.times for one in several)
    asynchronous = sum(one.times for one in several if one.collective.is_asynchronous)
    # Those of a loop: a deeper network has more of them, and of the others as many.
    repeated = [one for one in several if one.times > 1]
    return {
        "collectives": runs,
        "asynchronous": asynchronous,
        "communication": found.communication,
        "exposed": found.exposed,
        "communication_of_layers": sum(one.times * one.seconds for one in repeated),
        "exposed_of_layers": sum(one.times * one.exposed for one in repeated),
        "step": found.seconds,
        "flops": found.work.flops,
        "bytes": found.work.bytes,
        "each": found.rows(),
    }
