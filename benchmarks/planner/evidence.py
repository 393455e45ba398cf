"""Evidence: published speeds of training runs in bfloat16, each with its settings and source."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from benchmarks.planner.calibration import CLUSTERS, MAPPINGS, MEGASCALE, SCALING, is_fitted
from moe.planner.models import PRESETS
from sharding.costs.hardware import HARDWARE
from sharding.folding import Layout

Unit = Literal["MFU", "TFLOP/s", "tokens/s", "s"]
"""Percent of peak; per device; per device; of a step."""

DEVICES = HARDWARE | {
    # Grand Teton: H100s of 96 GB HBM2e, at the power limit of these servers.
    "h100 500 W": replace(HARDWARE["h100"].limited(500), memory=103e9, memory_bandwidth=2.4e12),
    "h200 by 4": replace(HARDWARE["h200"], domain=4),
}
"""Devices of the rows by name: those of `HARDWARE`, and of sources that say more."""


@dataclass(frozen=True)
class Evidence:
    """A published measurement.

    Attributes:
      system: whose program, one of `moe.planner.cost.SYSTEMS`.
      model: one of `PRESETS`.
      hardware: one of `DEVICES`.
      layout: its mapping; ``vpp`` is chosen by the planner where `micro_rows` is None.
      rows: sequences of a step.
      time: tokens of each.
      measured: in `unit`.
      source: where it is published.
      micro_rows: sequences of a micro-batch; None where it is not published.
      remat: rematerialisation; None where it is not published.
      repeats_experts: whole layers of experts are recomputed too.
      fsdp: weights in shards.
      overlaps_experts: the all-to-all of one micro-batch runs while another computes.
      dispatch: of tokens, where `micro_rows` is published.
      expert_block: neighbouring experts that a token is sent to together.
      graphs: layers are launched as CUDA graphs.
      fitted: used for fitting.
    """

    system: str
    model: str
    hardware: str
    layout: str
    rows: int
    time: int
    measured: float
    unit: Unit
    source: str
    micro_rows: int | None = None
    remat: str | None = None
    repeats_experts: bool = False
    fsdp: bool = False
    overlaps_experts: bool = False
    dispatch: str = "deepep"
    expert_block: int = 1
    graphs: bool = False
    fitted: bool = False

    @property
    def num_devices(self) -> int:
        return Layout.parse(self.layout).num_devices

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one device, as measured."""
        flops = PRESETS[self.model].training_flops(self.time)
        return {
            "MFU": self.measured / 100 * DEVICES[self.hardware].peak / flops,
            "TFLOP/s": self.measured * 1e12 / flops,
            "tokens/s": self.measured,
            "s": self.rows * self.time / self.measured / self.num_devices,
        }[self.unit]


FOLDING = "MoE Parallel Folding, arXiv 2504.14960"
MEGASCALE_MOE = "MegaScale-MoE, arXiv 2505.11432, table 3"
MODEL_ZOO = "Megatron-MoE-ModelZoo, best_practice/qwen3"
BRIDGE = "Megatron-Bridge, performance summary"
AUTOMODEL = "NeMo AutoModel, performance summary, 2025-10"
TIERING = "MaxText, docs/reference/models/tiering.md"
RECIPES = "tpu-recipes, training on v5p with MaxText"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md"
KEMPNER = "KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md"


def _of_papers() -> Iterable[Evidence]:
    """Rows of `benchmarks.planner.calibration`, without those that ran out of memory."""
    sources = {"Megatron-Core": FOLDING, "MegaScale-MoE": MEGASCALE_MOE}
    for row in chain(*MAPPINGS.values(), *SCALING.values(), MEGASCALE):
        system = f"{row.system} with FSDP" if row.fsdp else row.system
        if row.mfu is not None:
            yield Evidence(
                *(system, row.model, CLUSTERS[row.system].name, row.layout, row.rows, row.time),
                *(row.mfu, "MFU", sources[row.system]),
                fsdp=row.fsdp,
                fitted=is_fitted(row),
            )


def _longer(layout: str, rows: int, time: int, mfu: float) -> Evidence:
    """A row of table 5 of the paper on folding."""
    where = f"{FOLDING}, table 5"
    return Evidence("Megatron-Core", "mixtral-8x22b", "h100", layout, rows, time, mfu, "MFU", where)


def _zoo(layout: str, time: int, measured: float, unit: Unit, **settings) -> Evidence:
    settings = {"rows": 2048, "micro_rows": 1, "remat": "selective"} | settings
    model = "qwen3-235b-a22b"
    rows, hardware = settings.pop("rows"), settings.pop("hardware", "h100")
    return Evidence(
        "Megatron-Core", model, hardware, layout, rows, time, measured, unit, MODEL_ZOO, **settings
    )


# Norms and whole layers of experts are recomputed.
LONG: dict[str, Any] = {"rows": 256, "remat": "none", "repeats_experts": True}


def _bridge(
    model: str,
    hardware: str,
    layout: str,
    rows: int,
    time: int,
    rate: int,
    version: str,
    **settings,
) -> Evidence:
    return Evidence(
        *("Megatron-Core", model, hardware, layout, rows, time, rate, "tokens/s"),
        source=f"{BRIDGE} {version}",
        **settings,
    )


def _automodel(model: str, layout: str, rows: int, rate: int, **settings) -> Evidence:
    """Its benchmark's balanced router sends each token to neighbouring experts."""
    return Evidence(
        *("AutoModel", model, "h100", layout, rows, 4096, rate, "tokens/s", AUTOMODEL),
        expert_block=PRESETS[model].experts_per_token,
        **settings,
    )


def _maxtext(model: str, hardware: str, rate: int, fitted: bool = False) -> Evidence:
    """Eight sequences of a device: for v6e by the logs of tpu-recipes, for v5p not published."""
    return Evidence(
        *("MaxText", model, hardware, "dp256", 2048, 4096, rate, "tokens/s", TIERING),
        fsdp=True,
        fitted=fitted,
    )


def _alternating(
    *rows: tuple[str, str, str, str, int, int, int, str, float, str],
) -> Iterable[Evidence]:
    """Rows of sharded weights, one for fitting and one held out by turns: the odd ones are fitted.

    A row has the program, model, hardware, layout, sequences of a micro-batch, micro-batches,
    tokens of a sequence, rematerialisation, tokens per second and source.
    """
    for index, row in enumerate(rows):
        system, model, hardware, layout, micro, number, time, remat, rate, source = row
        sequences = micro * number * Layout.parse(layout).dp
        yield Evidence(
            *(system, model, hardware, layout),
            *(sequences, time, rate, "tokens/s", source),
            micro_rows=micro,
            remat=remat,
            fsdp=True,
            fitted=index % 2 == 0,
        )


# MaxText's batches of Llama3.1-8B, of 405B on v6e and of Llama2-70B on v5p are assumed. It keeps
# some values of a layer in the host's memory, where "full" recomputes all.
DENSE_AND_LATER = tuple(
    _alternating(
        ("MaxText", "llama2-70b", "v6e", "dp256", 4, 1, 4096, "full", 900, TIERING),
        ("MaxText", "llama3.1-8b", "v6e", "dp256", 3, 1, 8192, "full", 7207, TIERING),
        ("MaxText", "llama3.1-70b", "v6e", "dp256", 5, 1, 8192, "full", 960, TIERING),
        ("MaxText", "llama3.1-405b", "v6e", "dp256", 1, 1, 8192, "full", 123, TIERING),
        ("MaxText", "llama2-70b", "v5p", "dp512", 4, 1, 4096, "full", 692, TIERING),
        ("MaxText", "llama3.1-405b", "v5p", "dp512", 2, 1, 8192, "full", 124.6, RECIPES),
        ("MaxText", "deepseek-v3", "v5p", "dp512", 6, 1, 8192, "full", 542, RECIPES),
        ("torchtitan", "llama3.1-8b", "h100 500 W", "dp8", 2, 1, 8192, "selective", 6667, TITAN),
        ("torchtitan", "llama3.1-8b", "h100 500 W", "dp128", 2, 1, 8192, "selective", 6514, TITAN),
        (
            *("torchtitan", "llama3.1-8b", "h100 500 W", "tp8 dp8"),
            *(12, 1, 8192, "selective", 4378, TITAN_TP),
        ),
        (
            *("torchtitan", "llama3.1-70b", "h100 500 W", "tp8 dp32"),
            *(16, 1, 8192, "full", 597, TITAN_TP),
        ),
        ("torchtitan", "llama3.1-8b", "a100", "dp64", 1, 1, 8192, "selective", 2904, TITAN_A100),
        ("torchtitan", "llama3.1-70b", "a100", "dp64", 1, 1, 8192, "full", 331, TITAN_A100),
        ("KempnerForge", "llama3.1-8b", "h200 by 4", "dp4", 4, 2, 4096, "full", 9746, KEMPNER),
        ("KempnerForge", "llama3.1-8b", "h200 by 4", "tp2 dp2", 4, 2, 4096, "full", 6495, KEMPNER),
        ("KempnerForge", "llama3.1-8b", "h200 by 4", "tp4", 4, 2, 4096, "full", 6284, KEMPNER),
        ("KempnerForge", "kempner-13b", "h200 by 4", "dp8", 4, 4, 4096, "full", 4426, KEMPNER),
        ("KempnerForge", "kempner-13b", "h200 by 4", "tp4 dp2", 4, 4, 4096, "full", 3418, KEMPNER),
    )
)
"""Published after the planner was first fitted: dense models, and one mixture on TPUs."""

EVIDENCE: tuple[Evidence, ...] = (
    *_of_papers(),
    _longer("tp2 cp4 dp2 pp8 / ep8", 1024, 16384, 47.6),
    _longer("tp2 cp8 dp2 pp8 / ep8", 512, 32768, 45.1),
    _longer("tp4 cp8 dp2 pp8 / ep8", 256, 65536, 44.5),
    _longer("tp8 cp8 dp2 pp8 / ep8", 128, 131072, 42.9),
    _zoo("tp2 dp16 pp8 vpp4 / ep32", 4096, 320, "TFLOP/s", overlaps_experts=True, graphs=True),
    _zoo("tp2 dp16 pp8 vpp4 / ep32", 4096, 17.6, "s", overlaps_experts=True),
    # The table says tp2 and four micro-batches, the repository's script tp1, hence two.
    _zoo("tp2 dp128 / ep8", 4096, 17.6, "s", micro_rows=4, remat="full", fsdp=True),
    _zoo("tp2 dp16 pp8 vpp4 / ep32", 4096, 19.7, "s"),
    _zoo("tp2 dp4 pp32 vpp3 / ep8", 4096, 24.2, "s", dispatch="ragged"),
    _zoo("tp4 dp8 pp8 vpp4 / ep8", 4096, 29.0, "s", remat="none"),
    _zoo("tp4 dp8 pp8 vpp4 / ep8", 16384, 295, "TFLOP/s", **LONG),
    _zoo("tp4 cp2 dp4 pp8 vpp4 / ep8", 32768, 335, "TFLOP/s", **LONG),
    _zoo("tp4 cp4 dp2 pp8 vpp4 / ep8", 65536, 368, "TFLOP/s", **LONG),
    _zoo("tp4 cp8 pp8 vpp4 / ep8", 131072, 389, "TFLOP/s", **LONG),
    _zoo(
        *("dp32 pp8 / ep8", 4096, 750, "TFLOP/s"),
        hardware="gb200",
        rows=8192,
        remat="none",
        graphs=True,
        fitted=True,
    ),
    _bridge(
        *("qwen3-235b-a22b", "gb200", "dp32 pp8 vpp3 / ep32", 8192, 4096, 4916, "25.11"),
        micro_rows=1,
        graphs=True,
    ),
    _bridge(
        *("deepseek-v3", "gb200", "dp64 pp4 vpp4 / ep64", 4096, 4096, 3139, "25.11"),
        micro_rows=1,
        graphs=True,
    ),
    _bridge("gpt-oss-120b", "h100", "dp16 pp4 / ep8", 1280, 4096, 5984, "26.02.01", micro_rows=1),
    _bridge("gpt-oss-120b", "h100", "dp16 pp4 / ep8", 512, 4096, 5630, "25.11", micro_rows=4),
    _bridge("gpt-oss-120b", "gb200", "dp64 / ep64", 1280, 4096, 15754, "26.02.01", micro_rows=4),
    _bridge("gpt-oss-120b", "gb200", "dp64 / ep64", 1280, 8192, 15876, "25.11", micro_rows=1),
    _bridge("gpt-oss-120b", "b200", "dp64 / ep8", 1280, 4096, 13722, "26.02.01", micro_rows=4),
    _bridge("gpt-oss-120b", "b200", "dp64 / ep64", 1280, 4096, 8047, "26.02", micro_rows=4),
    _bridge("gpt-oss-120b", "b300", "dp64 / ep8", 1280, 4096, 15031, "26.02.01", micro_rows=4),
    _bridge("gpt-oss-120b", "b300", "dp64 / ep64", 1280, 4096, 8359, "26.02", micro_rows=4),
    _automodel("deepseek-v3", "dp64 pp4 vpp8 / ep64", 512, 1002, micro_rows=1, remat="full"),
    _automodel("deepseek-v3", "dp256 pp4 vpp8 / ep64", 8192, 865, micro_rows=1, remat="full"),
    _automodel("kimi-k2", "dp32 pp8 vpp4 / ep32", 512, 924, micro_rows=1, remat="full"),
    _automodel(
        "qwen3-30b-a3b", "dp8 / ep8", 512, 12040, micro_rows=4, remat="full", fsdp=True, fitted=True
    ),
    _automodel("gpt-oss-120b", "dp64 / ep64", 512, 7626, micro_rows=2, remat="none", fsdp=True),
    _maxtext("mixtral-8x7b", "v6e", 3899, fitted=True),
    _maxtext("mixtral-8x22b", "v6e", 1326),
    _maxtext("mixtral-8x7b", "v5p", 2909),
    *DENSE_AND_LATER,
)
