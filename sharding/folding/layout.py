"""Layout: sizes of the parallel axes, their notation and their consistency checks."""

import re
from dataclasses import dataclass, fields

ATTENTION = ("dp", "cp", "tp")
"""Axes of attention below the pipeline, slowest first (the rank order of Megatron-Core)."""
EXPERT = ("edp", "ep", "etp")
"""Axes of the experts below the pipeline, slowest first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. The expert data axis follows from ``tp cp dp == etp ep edp``.

    Args:
      tp: tensor parallelism of attention and dense layers.
      cp: context parallelism.
      dp: data parallelism.
      pp: pipeline stages, shared by attention and experts.
      ep: expert parallelism.
      etp: tensor parallelism inside an expert.
      vpp: chunks of layers on each pipeline stage (virtual stages, the interleaved schedule).
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self):
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1: use 1 for an unused axis.")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"vpp={self.vpp} (interleaved pipeline chunks) needs pp of at least 2, not pp=1: "
                "set pp, or leave vpp out."
            )
        stage = self.tp * self.cp * self.dp
        if stage % (self.ep * self.etp):
            near = [f"ep={ep} etp={etp}" for ep, etp in self._nearest_experts(stage)]
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} does not divide tp x cp x dp = {stage}: "
                f"the nearest legal {'are ' if near[1:] else 'is '}{' or '.join(near)}."
            )

    def _nearest_experts(self, stage: int) -> list[tuple[int, int]]:
        """Up to three legal sizes of ``ep`` and ``etp``, those off by the smallest factor first."""
        legal = [(ep, etp) for ep in divisors(stage) for etp in divisors(stage // ep)]
        off = {pair: _ratio(pair[0], self.ep) * _ratio(pair[1], self.etp) for pair in legal}
        return sorted(legal, key=off.__getitem__)[:3]

    def check_experts(self, num_experts: int) -> None:
        """Checks that a network without experts has no ``ep`` and ``etp``.

        Raises:
          ValueError: if it has, with the layout to write instead.
        """
        if num_experts or self.ep * self.etp == 1:
            return
        axes = " ".join(f"{axis}{n}" for axis in ("ep", "etp") if (n := getattr(self, axis)) > 1)
        raise ValueError(
            f"layout {self}: {axes} needs experts, and a dense network has none: write "
            f'"{self.attention}".'
        )

    @property
    def edp(self) -> int:
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def num_devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout written as ``"tp2 dp2 / ep4"``; axes not named have size 1.

        ``edp`` may be named too, as `str` does; it must be what follows from the others.

        Raises:
          ValueError: on an unknown axis, an axis named twice, or sizes that cannot agree.
        """
        sizes: dict[str, int] = {}
        names = [*(field.name for field in fields(cls)), "edp"]
        for word in text.replace("/", " ").split():
            match = re.fullmatch(r"([a-z]+)(\d+)", word)
            if match is None or match[1] not in names:
                raise ValueError(
                    f"layout {text!r}: {word!r} is not an axis and a size; "
                    f'write for example "tp2 dp2 / ep4" with axes among {", ".join(names)}.'
                )
            if match[1] in sizes:
                raise ValueError(f"layout {text!r} names the axis {match[1]} twice.")
            sizes[match[1]] = int(match[2])
        edp = sizes.pop("edp", None)
        layout = cls(**sizes)
        if edp not in (None, layout.edp):
            raise ValueError(
                f"layout {text!r}: edp={edp}, but the other sizes leave edp={layout.edp}: "
                "leave it out."
            )
        return layout

    @property
    def attention(self) -> str:
        """The axes of attention, for example ``"tp2 cp1 dp4 pp1"``."""
        axes = [f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp", "dp", "pp")]
        return " ".join(axes + ([f"vpp{self.vpp}"] if self.vpp > 1 else []))

    def __str__(self) -> str:
        return f"{self.attention} / ep{self.ep} etp{self.etp} edp{self.edp}"


def divisors(number: int) -> list[int]:
    """All divisors, 1 and the number itself included, in rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def prime_factors(number: int) -> tuple[int, ...]:
    """Prime factors with their multiplicity, in rising order."""
    factors = []
    for prime in divisors(number)[1:]:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
    return tuple(factors)


def _ratio(size: int, target: int) -> float:
    return max(size, target) / min(size, target)
