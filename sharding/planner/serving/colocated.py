"""Co-located baseline: the best plan with attention and experts on the same devices.

Every device has its shard of both. A layer's steps are sequential: attention, dispatch, experts,
combine; with pipeline stages each holds a part of the layers and one micro-batch at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sharding.folding.layout import divisors
from sharding.planner.hardware import LINK_EFFICIENCY, Hardware
from sharding.planner.models.sizes import ModelSizes
from sharding.planner.search import MEMORY_FRACTION
from sharding.planner.serving import times
from sharding.planner.serving.network import model_utilisation
from sharding.planner.serving.plan import Load
from sharding.planner.serving.times import ITEMSIZE, Times


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
    """A plan on `devices` of one type.

    Attributes:
      tp: devices of attention that share a token; there are ``devices / pp / tp`` such groups.
      pp: pipeline stages.
      ep: groups of devices that experts are sharded over, ``devices / pp / ep`` for each expert.
      overlap: two halves of the batch, one computes while the other is sent.
      batch: tokens of a micro-batch; there are `pp` of them.
      token_latency: seconds between two tokens of a request.
    """

    devices: int
    tp: int
    pp: int
    ep: int
    overlap: bool
    batch: int
    token_latency: float

    @property
    def per_device(self) -> float:
        """Tokens per second and device."""
        return self.pp * self.batch / self.token_latency / self.devices

    def __str__(self) -> str:
        stage = self.devices // self.pp
        sizes = f"tp{self.tp} dp{stage // self.tp} pp{self.pp} / ep{self.ep} etp{stage // self.ep}"
        return sizes + (", two batches" if self.overlap else "")


class _Stage:
    """Times of one layer on the devices of a stage, and bytes on each."""

    def __init__(self, model, load, hardware: Hardware, devices, tp, pp, ep, efficiency, overlap):
        self.model, self.load, self.hardware = model, load, hardware
        self.devices, self.tp, self.pp, self.ep = devices, tp, pp, ep
        self.overlap, self.network = overlap, model_utilisation(hardware)
        stage = devices // pp
        self.stage, self.groups, self.etp = stage, stage // tp, stage // ep
        self.attention: Times = times.attention(model, hardware, tp, load.cached, efficiency)
        self.experts: Times = times.experts(
            model, hardware, self.etp, model.num_experts // ep, efficiency
        )

    def sending(self, batch):
        """Seconds of an all-to-all, one way.

        Inside one tensor-parallel group every device has every token: the experts' outputs are
        summed once, half of it counted each way.
        """
        model, hardware = self.model, self.hardware
        inside = hardware.inside * LINK_EFFICIENCY
        if self.groups == 1:
            rate = ITEMSIZE * batch * model.d_model * (self.ep - 1) / self.ep
            return rate / inside + (self.ep - 1) * hardware.latency_inside
        rows = ITEMSIZE * batch / self.stage * model.experts_per_token * model.d_model
        near = min(self.stage, hardware.domain)
        within = rows * (near - 1) / self.stage / inside
        if near == self.stage:
            return within + hardware.latency_inside
        outside = rows * (self.stage - near) / self.stage
        return np.maximum(within, self.network.seconds(outside, hardware.outside))

    def layer(self, batch):
        """Seconds of one layer."""
        num_streams = 2 if self.overlap else 1
        tokens = batch / num_streams
        computed = self.attention(tokens / self.groups)
        computed = computed + self.experts(tokens * self.model.experts_per_token / self.ep)
        sent = 2 * self.sending(tokens)
        return num_streams * (np.maximum(computed, sent) if self.overlap else computed + sent)

    def token_latency(self, batch):
        """Seconds of a token step; a stage sends its tokens through its own adapters."""
        hops = 0.0
        if self.pp > 1:
            sent = ITEMSIZE * batch * self.model.d_model / self.stage
            hops = self.pp * self.network.seconds(sent, self.hardware.outside)
        return self.model.num_layers * self.layer(batch) + hops

    def most_in_memory(self) -> int:
        """Most tokens of a micro-batch that fit in memory."""
        model = self.model
        expert_parameters = model.expert_parameters * model.num_layers
        weights = (
            ITEMSIZE
            * ((model.parameters - expert_parameters) / self.tp + expert_parameters / self.stage)
            / self.pp
        )
        budget = MEMORY_FRACTION * self.hardware.memory - weights
        cache = 2 * ITEMSIZE * self.load.cached * model.keys * model.num_layers
        # Each token's cache is sharded over its tp devices and the stages; pp micro-batches fit.
        return max(0, int(budget * self.tp * self.groups / cache))


def _stages(model, load, hardware, devices, efficiency, kind: PlanKind) -> Iterator[_Stage]:
    for pp in (n for n in divisors(devices) if model.num_layers % n == 0):
        stage = devices // pp
        for tp in (n for n in divisors(stage) if n <= hardware.domain):
            if model.num_kv_heads % tp or (tp != stage and not kind.wide):
                continue
            for ep in divisors(stage):
                etp = stage // ep
                if model.num_experts % ep or model.d_expert % etp or etp > hardware.domain:
                    continue
                yield _Stage(model, load, hardware, devices, tp, pp, ep, efficiency, kind.overlap)


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
    for num_devices in devices:
        for stage in _stages(model, load, hardware, num_devices, efficiency, kind):
            low, high = 0, stage.most_in_memory()
            while low < high:
                middle = (low + high + 1) // 2
                if stage.token_latency(middle) <= load.slo:
                    low = middle
                else:
                    high = middle - 1
            if low:
                time = float(stage.token_latency(low))
                plans.append(
                    Colocated(
                        num_devices,
                        tp=stage.tp,
                        pp=stage.pp,
                        ep=stage.ep,
                        overlap=kind.overlap,
                        batch=low,
                        token_latency=time,
                    )
                )
    return max(plans, key=lambda plan: plan.per_device, default=None)
