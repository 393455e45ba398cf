"""Settings of a run besides its layout: batch, execution and storage."""

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

from moe.execution import Execution
from sharding.folding import Layout


@dataclass(frozen=True)
class Batch:
    """Batch of one optimizer step.

    Attributes:
      rows: sequences on all devices.
      time: tokens of each.
      micro_rows: sequences of a micro-batch on each ``dp`` rank.
      micro_tokens: tokens of a micro-batch on one device, fewer than its sequences have if these
        share prompts; None counts all.
    """

    rows: int
    time: int
    micro_rows: int = 1
    micro_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.rows * self.time

    def num_micro_batches(self, layout: Layout) -> int:
        """Micro-batches of each ``dp`` rank.

        Raises:
          ValueError: where the rows do not divide.
        """
        each = layout.dp * self.micro_rows
        if self.rows % each:
            raise ValueError(
                f"rows={self.rows} cannot be split over dp={layout.dp} x micro_rows="
                f"{self.micro_rows}: choose a multiple of {each}."
            )
        return self.rows // each

    def local_tokens(self, layout: Layout) -> int:
        """Tokens of a micro-batch on one device, rows padded to ``2 cp`` zig-zag chunks."""
        if self.micro_tokens is not None:
            return self.micro_tokens
        unit = 1 if layout.cp == 1 else 2 * layout.cp
        padded = -(-self.time // unit) * unit
        return self.micro_rows * padded // (layout.cp * layout.tp)


@dataclass(frozen=True)
class Storage:
    """Bytes of a parameter.

    Attributes:
      weight: the weight as it is used.
      gradient: its sum over micro-batches.
      master: master weight, kept in shards; 0 where the weight is its own master.
      moments: optimizer state, in shards: AdamW's two moments, or `Method.state_bytes`.
      gradient_comm: a gradient as it is sent.
      weight_comm: a new weight as it is sent.
      summand: the gradient of one micro-batch, in addition to their sum; 0 where products
        accumulate into the sum.
    """

    weight: int
    gradient: int
    master: int
    moments: float
    gradient_comm: int
    weight_comm: int
    summand: int


STORAGES = {
    # Float32 weights are their own masters.
    "float32": Storage(4, 4, 0, 8, 4, 4, summand=4),
    # Weights in bfloat16 with float32 masters (`jrl.trainer.learner.learner`): 6 + 12 / G in shards
    # of G.
    "bfloat16": Storage(2, 4, 4, 8, 4, 2, summand=2),
    # Megatron-Core's mixed precision: the same, with products that add to the sum of gradients.
    "mixed": Storage(2, 4, 4, 8, 4, 2, summand=0),
    # The same with gradients that are rounded once for an all-to-all and summed in float32.
    "mixed-bfloat16-wire": Storage(2, 4, 4, 8, 2, 2, summand=0),
}
# Norms and routers that stay float32 among weights that do not.
STAYS_FLOAT32 = {"bfloat16": Storage(4, 4, 4, 8, 4, 4, summand=4)}
"""Shoeybi et al.'s distributed optimizer counts as "mixed"; Jin et al., "MegaScale-MoE", 2025,
section 5 (the wire). https://arxiv.org/abs/2505.11432"""


ALLOWED_VALUES = {
    "storage": (*STORAGES,),
    "gradient_wire": ("float32", "bfloat16"),
    "mu_dtype": ("float32", "bfloat16"),
}


def _of_weights(default: Any) -> Any:
    """Field of a `Method` on which weights, gradients and optimizer depend, and no layer."""
    return field(default=default, metadata={"weights": True})


@dataclass(frozen=True)
class Method:
    """Choices besides the layout.

    Attributes:
      execution: settings of the network's execution. A `dispatch` of None reads as "all_gather", a
        `context` of None as "gather", and an `attention` of None as a kernel that keeps scores on
        the chip (`moe.planner.memory.working_score_bytes`). Implementations of other parts do not
        matter.
      deepep_block: dispatches tokens as DeepEP does in other systems
        (`sharding.costs.transfer.TokenDispatch`), to this many neighbouring experts together; 1 if
        all sets of experts are equally likely. None dispatches as `execution` says.
      reshards: shards weights as `Execution.fsdp` does, under any rematerialisation: PyTorch's
        FSDP2 gathers them again in the backward pass.
      itemsize: bytes of an activation.
      storage: of weights, gradients and optimizer, one of `STORAGES`.
      resends: rematerialisation as in `moe.remat`: "selective" gathers tokens and sends them to
        experts again, "full" keeps what collectives return. Else as in Korthikanti et al.
        (https://arxiv.org/abs/2205.05198): "selective" repeats attention's scores, norms and
        activations, and no communication; "full" keeps a layer's input alone and repeats all.
      repeats_experts: the backward pass repeats the experts too, with their dispatch, and keeps
        nothing of them; with "none" and "selective".
      even: expert buffers have the size of even routing, as if their sizes were known at run time
        or a capacity bounded them; else they fit any routing.
      in_place: a pipeline stage writes the residuals of a chunk directly to their buffer slot; else
        to a temporary buffer first, as `sharding.pipeline` does.
      gradient_wire: communication dtype of gradients between sequence-parallel groups; "bfloat16"
        is an all-to-all of terms that are summed in float32 (`sharding.compression`).
      mu_dtype: of Adam's first moment.
      state_bytes: bytes of the optimizer state per parameter; None assumes AdamW's two moments.
      duplicates_experts: if "none" keeps the values that a layer computes, it keeps a copy of its
        experts' matrices too, as XLA's programs do on a CPU.
      fused_activation: the activation of a dense layer keeps no more than its input.
    """

    execution: Execution = field(default_factory=Execution)
    deepep_block: int | None = None
    reshards: bool = False
    itemsize: int = 2
    storage: str = _of_weights("float32")
    resends: bool = True
    repeats_experts: bool = False
    even: bool = False
    in_place: bool = False
    gradient_wire: str = _of_weights("float32")
    mu_dtype: str = _of_weights("float32")
    state_bytes: float | None = _of_weights(None)
    duplicates_experts: bool = False
    fused_activation: bool = False

    def __post_init__(self):
        for name, choices in ALLOWED_VALUES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not known: use {', '.join(choices)}."
                )

    @property
    def dispatch(self) -> str:
        """Token dispatch method."""
        if self.deepep_block is not None:
            return "deepep"
        return self.execution.dispatch or "all_gather"

    @property
    def context(self) -> str:
        """Context-parallel method."""
        return self.execution.context or "gather"

    @property
    def fsdp(self) -> bool:
        """True if weights are kept in shards and gathered layer by layer."""
        return self.execution.fsdp or self.reshards

    def streams(self, batch: Batch) -> tuple[Batch, ...]:
        """Batches that pass through a layer separately.

        With two-batch overlap they are two halves of a micro-batch's rows, the first with one more
        if their number is odd; else the whole micro-batch.
        """
        if not self.execution.two_batch_overlap or batch.micro_rows < 2:
            return (batch,)
        return _split_rows(batch)

    def repeats(self, remat: str) -> bool:
        """True if under this rematerialisation a layer keeps only what `moe.remat` names.

        It then repeats the communication of the rest in the backward pass.
        """
        return remat == "projections" or (remat == "selective" and self.resends)

    @property
    def repeats_all(self) -> bool:
        """True if the backward pass repeats all communication of the forward pass."""
        return self.execution.remat == "full" and not self.resends

    @property
    def stored(self) -> Storage:
        return self._with_moments(STORAGES[self.storage])

    @property
    def stored_precise(self) -> Storage:
        """Storage of norms and routers."""
        return self._with_moments(STAYS_FLOAT32.get(self.storage, STORAGES[self.storage]))

    def _with_moments(self, storage: Storage) -> Storage:
        if self.state_bytes is not None:
            return replace(storage, moments=self.state_bytes)
        half = self.mu_dtype == "bfloat16"
        return replace(storage, moments=storage.moments * 3 // 4) if half else storage


@functools.lru_cache(maxsize=64)
def _split_rows(batch: Batch) -> tuple[Batch, ...]:
    rows = batch.micro_rows
    return replace(batch, micro_rows=-(-rows // 2)), replace(batch, micro_rows=rows // 2)


@functools.lru_cache(maxsize=4096)
def with_fields(method: Method, **changes: Any) -> Method:
    """The method with other fields, its own or its execution's, and cached: a search needs few
    methods many times. `dispatch` may be "deepep"."""
    if changes.get("dispatch") == "deepep":
        changes |= {"dispatch": None, "deepep_block": method.deepep_block or 1}
    elif "dispatch" in changes:
        changes["deepep_block"] = None
    settings = {name: changes.pop(name) for name in OF_EXECUTION & changes.keys()}
    return replace(method, execution=replace(method.execution, **settings), **changes)


OF_EXECUTION = {item.name for item in fields(Execution)}
OF_WEIGHTS = {item.name: item.default for item in fields(Method) if "weights" in item.metadata}


def for_tokens(method: Method) -> Method:
    """A cache key of the layers' communication: fields of weights have their defaults."""
    return with_fields(method, overlap_grad_reduce=False, **OF_WEIGHTS)


@functools.lru_cache(maxsize=4096)
def for_weights(method: Method) -> Method:
    """A cache key of weights, gradients and optimizer: all other fields have their defaults."""
    of_weights = {name: getattr(method, name) for name in OF_WEIGHTS}
    execution = Execution(overlap_grad_reduce=method.execution.overlap_grad_reduce)
    return Method(execution, reshards=method.fsdp, **of_weights)
