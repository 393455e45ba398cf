"""Programs of published networks that are compiled whole, over one device and over hundreds: their
devices, layouts, rows and settings."""

from typing import Any, NamedTuple

from benchmarks.absent.work import PROMPT, RESPONSE
from benchmarks.gpu.shapes import (
    DEEPSEEK_V3,
    MIXTRAL_8X22B,
    QWEN3_06B,
    QWEN3_235B,
    QWEN3_A3B,
)

KERNELS = {
    "experts": "mosaic",
    "attention": "mosaic",
    "router": "mosaic",
    "remat": "selective",
    "buffer_factor": 1.5,
}
"""Fields of `moe.execution.Execution` that name every kernel for Hopper."""
UPDATE, SCORING, PREFILL, DECODING = "update", "scoring", "prefill", "decoding"
ATTENTION_OF_PREFILL, EXPERTS_OF_PREFILL = "attention of prefill", "experts of prefill"
ATTENTION_OF_DECODING, EXPERTS_OF_DECODING = "attention of decoding", "experts of decoding"
OF_PREFILL = ATTENTION_OF_PREFILL, EXPERTS_OF_PREFILL
OF_DECODING = ATTENTION_OF_DECODING, EXPERTS_OF_DECODING
OF_ATTENTION = ATTENTION_OF_PREFILL, ATTENTION_OF_DECODING
DISAGGREGATED = *OF_PREFILL, *OF_DECODING
"""Programs of attention and experts on separate devices."""


class Step(NamedTuple):
    """A program of GRPO.

    Attributes:
      device, shape: of `compilers.devices`.
      layout: of the devices; a split (`moe.disaggregated.split.Split`) of the programs of
        `DISAGGREGATED`.
      title: of the network and its settings.
      sizes: of the network.
      execution: fields of `moe.execution.Execution`; what is not given is selected as in a run.
      kind: the update of an optimizer step, a scoring pass, the largest prefill of an engine,
        decoding steps in their loop, or one of `DISAGGREGATED`.
      rows: completions of the mini-batch, as many on each device; slots in prefill and decoding.
      micro_batches: of the mini-batch; in disaggregated decoding those in flight.
      prompt, response: tokens of each.
      run: fields of `jrl.config.run.RunConfig` besides: dispatch, and dtypes of gradients and
        moments.
      options: of the compiler, besides those of a run.
      scheduled: its row has the overlap of its schedule.
      quick: it is one of the quick check.
    """

    device: str
    shape: str | None
    layout: str
    title: str
    sizes: dict[str, Any]
    execution: dict[str, Any]
    kind: str = UPDATE
    rows: int = 16
    micro_batches: int = 1
    prompt: int = PROMPT
    response: int = RESPONSE
    run: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    scheduled: bool = False
    quick: bool = False

    @property
    def label(self) -> str:
        """Device, program and layout."""
        return f"{self.device} {self.title} {self.layout}"


def prompts_of_prefill(step: Step, dp: int, max_tokens: int | None = None) -> int:
    """Prompts on each rank of ``dp`` in the largest prefill of an engine.

    Args:
      max_tokens: bound of the backend, `jrl.rollout.decoding.mesh_backend.MeshBackend`.
    """
    from jrl.rollout.decoding.scheduling.sizes import ROLLOUTS

    most = ROLLOUTS.prefill_tokens
    tokens = most if max_tokens is None else min(most, max_tokens)
    return min(max(1, tokens // step.prompt), step.rows // dp)


ONE_LAYER, TWO_LAYERS = QWEN3_A3B | {"num_layers": 1}, QWEN3_A3B | {"num_layers": 2}
SELECTIVE, FULL = {"remat": "selective"}, {"remat": "full"}
BUFFERS = {"buffer_factor": 1.5}
At = tuple[str, str | None, str]
"""Device, shape and layout of a `Step`."""
ONE: At = "h100", "1x1x1", "dp1"
EIGHT: At = "h100", "1x1x8", "dp8 / ep8"
ONE_TPU: At = "v5p", "v5p:1x1x1", "dp1"
EIGHT_TPUS: At = "v5p", None, "dp8 / ep8"
QWEN3_235B_AT: At = "h100", "1x8x8", "tp4 dp16 / ep64"
QWEN3_235B_AT_TPUS: At = "v5p", "v5p:4x4x4", "tp4 dp16 / ep64"
# The planner's first layouts for 2 and 4 x 2^20 tokens a step on 128 and on 512; on 1,024 that of
# 128 with more dp, the planner's third.
MIXTRAL_AT: At = "h100", "1x16x8", "cp2 dp8 pp8 / ep8"
MIXTRAL_AT_1024: At = "h100", "1x128x8", "cp2 dp64 pp8 / ep8"
DEEPSEEK_AT: At = "h100", "1x64x8", "tp4 dp4 pp32 / ep8"
_FSDP = FULL | {"fsdp": True}
SELECTED = Step(
    *(*EIGHT, "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE),
    run={"mu_dtype": "bfloat16"},
    scheduled=True,
)
"""Implementations are those that None selects. With a float32 first moment it needs 93% of the
memory."""
ON_64 = Step(*QWEN3_235B_AT, "Qwen3-235B-A22B", QWEN3_235B, _FSDP, scheduled=True)


def _served(at: At, name: str, sizes: dict[str, Any], rows: int) -> tuple[Step, ...]:
    """Prefill and decoding on one mesh."""
    kinds = PREFILL, DECODING
    return tuple(Step(*at, f"{name}, {kind}", sizes, {}, kind, rows) for kind in kinds)


def _split(
    at: At, name: str, sizes: dict[str, Any], rows: int, micro_batches: int
) -> tuple[Step, ...]:
    """Prefill and decoding with attention and experts on separate devices."""
    return tuple(
        Step(*at, f"{name}, {kind}", sizes, {}, kind, rows, micro_batches) for kind in DISAGGREGATED
    )


def _scored(at: At, name: str, sizes: dict[str, Any], execution: dict[str, Any], rows: int) -> Step:
    """Scoring of all completions of a step, in the layout of an update."""
    return Step(*at, f"{name}, scoring", sizes, execution, SCORING, rows)


_QUICK = (
    Step(*EIGHT, "Qwen3-30B-A3B, 2 layers, kernels", TWO_LAYERS, KERNELS, quick=True),
    Step(*EIGHT_TPUS, "Qwen3-30B-A3B, 1 layer", ONE_LAYER, SELECTIVE | BUFFERS, quick=True),
)
_QWEN3_06B = (
    Step(*ONE, "Qwen3-0.6B", QWEN3_06B, SELECTIVE, rows=32, micro_batches=8),
    _scored(ONE, "Qwen3-0.6B", QWEN3_06B, SELECTIVE, rows=64),
    *_served(ONE, "Qwen3-0.6B", QWEN3_06B, rows=256),
)
_QWEN3_30B = (
    SELECTED,
    Step(*("b200", "1x1x8", "dp8 / ep8", "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE)),
    Step(
        *("h100", "1x1x8", "tp4 pp2 vpp12 / ep4", "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE),
        micro_batches=16,
        run={"mu_dtype": "bfloat16"},
    ),
    _scored(EIGHT, "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE, rows=64),
    *_served(EIGHT, "Qwen3-30B-A3B", QWEN3_A3B, rows=256),
    *_split(("h100", "1x1x8", "dp4 / ep4"), "Qwen3-30B-A3B", QWEN3_A3B, 1024, 4),
)
_QWEN3_235B = (
    ON_64,
    _scored(QWEN3_235B_AT, "Qwen3-235B-A22B", QWEN3_235B, _FSDP, rows=256),
    *_served(QWEN3_235B_AT, "Qwen3-235B-A22B", QWEN3_235B, rows=2048),
    # One server, the planner's first plan for 50 ms between tokens.
    *_split(("h100", "1x16x8", "dp64 / ep64"), "Qwen3-235B-A22B", QWEN3_235B, 8192, 4),
)
_MIXTRAL = (
    Step(
        *(*MIXTRAL_AT, "Mixtral-8x22B", MIXTRAL_8X22B, SELECTIVE | {"scan_layers": True}),
        rows=1024,
        micro_batches=128,
    ),
    Step(
        *(*MIXTRAL_AT_1024, "Mixtral-8x22B", MIXTRAL_8X22B, SELECTIVE | {"scan_layers": True}),
        rows=8192,
        micro_batches=128,
    ),
    _scored(MIXTRAL_AT, "Mixtral-8x22B", MIXTRAL_8X22B, SELECTIVE, rows=1024),
    _scored(MIXTRAL_AT_1024, "Mixtral-8x22B", MIXTRAL_8X22B, SELECTIVE, rows=8192),
    # The layouts that sampling derives from those of the updates.
    *_served(("h100", "1x16x8", "dp128 / ep8"), "Mixtral-8x22B", MIXTRAL_8X22B, rows=4096),
    *_served(("h100", "1x128x8", "dp1024 / ep8"), "Mixtral-8x22B", MIXTRAL_8X22B, rows=32768),
    # One server, of the planner's first plan 8 of 9 attention nodes: whole hosts of eight.
    *_split(("h100", "1x4x8", "tp2 dp8 / ep8 etp2"), "Mixtral-8x22B", MIXTRAL_8X22B, 1920, 3),
)
_DEEPSEEK = (
    Step(
        *(*DEEPSEEK_AT, "DeepSeek-V3", DEEPSEEK_V3, SELECTIVE),
        rows=2048,
        micro_batches=512,
    ),
    _scored(DEEPSEEK_AT, "DeepSeek-V3", DEEPSEEK_V3, SELECTIVE, rows=2048),
    # Experts over the 8 devices of training are larger than a device: over 64.
    *_served(("h100", "1x64x8", "tp4 dp128 / ep64"), "DeepSeek-V3", DEEPSEEK_V3, rows=16384),
    # The planner has no plan for it. As few devices as hold the experts in half of their memory,
    # and as many for attention.
    *_split(("h100", "1x8x8", "tp4 dp8 / ep32"), "DeepSeek-V3", DEEPSEEK_V3, 2048, 4),
)
_TPUS = (
    Step(*ONE_TPU, "Qwen3-0.6B", QWEN3_06B, SELECTIVE, rows=32, micro_batches=8),
    _scored(ONE_TPU, "Qwen3-0.6B", QWEN3_06B, SELECTIVE, rows=64),
    *_served(ONE_TPU, "Qwen3-0.6B", QWEN3_06B, rows=128),
    Step(*EIGHT_TPUS, "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE | BUFFERS, scheduled=True),
    _scored(EIGHT_TPUS, "Qwen3-30B-A3B", QWEN3_A3B, SELECTIVE | BUFFERS, rows=64),
    *_served(EIGHT_TPUS, "Qwen3-30B-A3B", QWEN3_A3B, rows=256),
    Step(*QWEN3_235B_AT_TPUS, "Qwen3-235B-A22B", QWEN3_235B, _FSDP | BUFFERS),
    _scored(*(QWEN3_235B_AT_TPUS, "Qwen3-235B-A22B", QWEN3_235B, _FSDP | BUFFERS), rows=256),
    *_served(QWEN3_235B_AT_TPUS, "Qwen3-235B-A22B", QWEN3_235B, rows=2048),
)

STEPS = _QUICK + _QWEN3_06B + _QWEN3_30B + _QWEN3_235B + _MIXTRAL + _DEEPSEEK + _TPUS
