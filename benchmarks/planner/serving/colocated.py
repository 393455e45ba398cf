"""Co-located baseline: the best plan with attention and experts on the same devices.

Every device has its shard of both. A layer's steps are sequential: attention, dispatch, experts,
combine; with pipeline stages each holds a part of the layers and one micro-batch at a time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from benchmarks.planner.serving import times
from benchmarks.planner.serving.plan import Load
from benchmarks.planner.serving.times import ITEMSIZE, model_utilisation
from moe.planner.models import ModelSizes
from moe.planner.search import MEMORY_FRACTION
from sharding.costs.hardware import LINK_EFFICIENCY, Hardware
from sharding.folding import Layout
from sharding.folding.layout import divisors


@dataclass(frozen=True)
class PlanKind:
    """Kind of co-located plans.

    Attributes:
      wide: attention may be replicated over the groups of a stage, as in today's wide expert
        parallelism; without it a stage is one tensor-parallel group inside a server.
      overlap: two-batch overlap of the halves of the batch.
    """

    wide: bool = True
    overlap: bool = False


PLAN_KINDS = {
    "one tensor-parallel group per stage": PlanKind(wide=False),
    "attention replicated, experts over all": PlanKind(),
    "the same with two-batch overlap": PlanKind(overlap=True),
}


@dataclass(frozen=True)
class Colocated:
    """A plan on devices of one type.

    Attributes:
      layout: of its devices: ``dp`` groups of ``tp`` on each of ``pp`` stages share a token's
        attention, and experts are sharded over ``ep`` groups of ``etp``.
      overlap: two halves of the batch, one computes while the other is sent.
      batch: tokens of a micro-batch; there are ``pp`` of them.
      token_latency: seconds between two tokens of a request.
    """

    layout: Layout
    overlap: bool
    batch: int
    token_latency: float

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.layout.pp * self.batch / self.token_latency / self.layout.num_devices

    def __str__(self) -> str:
        layout = self.layout
        sizes = f"tp{layout.tp} dp{layout.dp} pp{layout.pp} / ep{layout.ep} etp{layout.etp}"
        return sizes + (", two batches" if self.overlap else "")


class _Stage:
    """Times of one layer on the devices of a stage, and bytes on each."""

    def __init__(
        self,
        model: ModelSizes,
        load: Load,
        hardware: Hardware,
        layout: Layout,
        efficiency: float,
        overlap: bool,
    ):
        self.model, self.load, self.hardware, self.layout = model, load, hardware, layout
        self.overlap, self.network = overlap, model_utilisation(hardware)
        self.devices = layout.tp * layout.dp
        self.attention = times.attention(model, hardware, layout.tp, load.cached, efficiency)
        self.experts = times.experts(
            model, hardware, layout.etp, model.num_experts // layout.ep, efficiency
        )

    def sending(self, batch):
        """Seconds of an all-to-all, one way.

        Inside one tensor-parallel group every device has every token: the experts' outputs are
        summed once, half of it counted each way.
        """
        model, hardware = self.model, self.hardware
        inside = hardware.inside * LINK_EFFICIENCY
        if self.layout.dp == 1:
            rate = ITEMSIZE * batch * model.d_model * (self.layout.ep - 1) / self.layout.ep
            return rate / inside + (self.layout.ep - 1) * hardware.latency_inside
        rows = ITEMSIZE * batch / self.devices * model.experts_per_token * model.d_model
        near = min(self.devices, hardware.domain)
        within = rows * (near - 1) / self.devices / inside
        if near == self.devices:
            return within + hardware.latency_inside
        outside = rows * (self.devices - near) / self.devices
        return np.maximum(within, self.network.seconds(outside, hardware.outside))

    def layer(self, batch):
        """Seconds of one layer."""
        num_streams = 2 if self.overlap else 1
        tokens = batch / num_streams
        computed = self.attention(tokens / self.layout.dp)
        computed = computed + self.experts(tokens * self.model.experts_per_token / self.layout.ep)
        sent = 2 * self.sending(tokens)
        return num_streams * (np.maximum(computed, sent) if self.overlap else computed + sent)

    def token_latency(self, batch):
        """Seconds of a token step; a stage sends its tokens through its own adapters."""
        hops = 0.0
        if self.layout.pp > 1:
            sent = ITEMSIZE * batch * self.model.d_model / self.devices
            hops = self.layout.pp * self.network.seconds(sent, self.hardware.outside)
        return self.model.num_layers * self.layer(batch) + hops

    def most_in_memory(self) -> int:
        """Most tokens of a micro-batch that fit in memory."""
        budget = MEMORY_FRACTION * self.hardware.memory
        weights = weight_bytes(self.model, self.layout)
        return max(0, int((budget - weights) / cache_bytes(self.model, self.layout, self.load)))


def weight_bytes(model: ModelSizes, layout: Layout) -> float:
    """Bytes of the weights on a device of a co-located plan.

    Args:
      layout: of one stage's devices and the stages: ``ep x etp`` equals ``tp x dp``.
    """
    expert_parameters = model.expert_parameters * model.num_expert_layers
    rest = (model.parameters - expert_parameters) / layout.tp
    experts = expert_parameters / (layout.tp * layout.dp)
    return ITEMSIZE * (rest + experts) / layout.pp


def cache_bytes(model: ModelSizes, layout: Layout, load: Load) -> float:
    """Bytes of the KV cache on a device for a token of each of ``pp`` micro-batches."""
    # The cache of a token is sharded over the stages, and pp micro-batches fit.
    return ITEMSIZE * load.cached * model.cached(layout.tp) * model.num_layers / layout.dp


def _layouts(
    model: ModelSizes, hardware: Hardware, devices: int, kind: PlanKind
) -> Iterator[Layout]:
    for pp in (n for n in divisors(devices) if model.num_layers % n == 0):
        stage = devices // pp
        for tp in (n for n in divisors(stage) if n <= hardware.domain):
            if model.num_kv_heads % tp or (tp != stage and not kind.wide):
                continue
            for ep in divisors(stage):
                etp = stage // ep
                if model.num_experts % ep or model.d_expert % etp or etp > hardware.domain:
                    continue
                yield Layout(tp=tp, dp=stage // tp, pp=pp, ep=ep, etp=etp)


def best_colocated(
    model: ModelSizes,
    load: Load,
    hardware: Hardware,
    efficiency: float = 0.6,
    devices: Sequence[int] = (8, 16, 32, 64),
    kind: PlanKind | None = None,
) -> Colocated | None:
    """The plan with most tokens per second and device under the latency limit, or None.

    Args:
      devices: numbers of devices to try.
      kind: of the plans.
    """
    times.check(model)
    kind, plans = kind or PlanKind(), []
    for layout in chain(*(_layouts(model, hardware, n, kind) for n in devices)):
        stage = _Stage(model, load, hardware, layout, efficiency, kind.overlap)
        batches = range(1, stage.most_in_memory() + 1)
        batch = bisect_right(batches, load.slo, key=stage.token_latency)
        if batch:
            token_latency = float(stage.token_latency(batch))
            plans.append(Colocated(layout, kind.overlap, batch, token_latency))
    return max(plans, key=lambda plan: plan.per_device, default=None)
