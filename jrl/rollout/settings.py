"""Settings of sampling: lengths, the engine, and asynchronous rollouts."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from jrl.checks import flag
from jrl.rollout.decoding.scheduling.sizes import ROLLOUTS
from jrl.setting import setting


@dataclass(frozen=True)
class LengthSettings:
    """Lengths of prompts, completions and conversations."""

    prompt_length: int | None = setting(None, of_task=True, sft=False)
    """Tokens that prompts are padded to; None fits the task's longest prompt."""
    response_length: int | None = setting(
        None,
        sft="Maximum tokens of the sample completions in samples.jsonl; None is a quarter above "
        "the longest held-out answer, and at least 16 tokens.",
    )
    """Maximum tokens of a completion; None is a quarter above the task's longest answer, and for a
    checkpoint 1024 or what its positions leave. In a conversation it bounds the tokens of policy
    and environment in total."""
    max_turns: int | None = setting(None, minimum=1, of_task=True)
    """Maximum turns of the policy in a conversation; None leaves its end to the environment and the
    response length."""
    turn_length: int | None = setting(None, minimum=1, of_task=True)
    """Maximum tokens of one turn of the policy in a conversation, including its end token: the
    environment is told that a turn was truncated. None leaves it to the response length, which a
    long first turn may use up."""


@dataclass(frozen=True)
class SplitSettings:
    """Disaggregated decoding: attention and experts on separate device groups."""

    CHANGEABLE: ClassVar[bool] = True
    SFT: ClassVar[bool] = False

    rollout_split: str | None = None
    """Device groups of disaggregated decoding, for example "tp1 dp2 / ep2": attention on tp x dp
    devices, experts on ep (x etp) others. In total they are the devices of the layout, alternating
    with training, or the rollout devices."""
    rollout_micro_batches: int = setting(2, minimum=1)
    """Micro-batches of slots in flight in disaggregated decoding: while one is with the experts,
    attention works on another. 3 is enough if messages take half as long as the slower device
    group, 4 if they take as long."""
    rollout_m2n: Literal["device_put", "collective", "transfer"] | None = None
    """Transport between the device groups of disaggregated decoding: copies from device to device
    in one process, collectives over both groups, or pulls by each process from the memory of the
    others. None is copies in one process and collectives in several."""
    rollout_expert_slots: int | None = setting(None, minimum=1)
    """Experts per expert device in disaggregated decoding: with more than its share, experts with
    many tokens are replicated on several devices. None is its share."""
    rollout_replan: int | None = setting(None, minimum=1)
    """Tokens of a row between rebalancings of the expert placement, by the token counts of the
    rollout so far; None keeps the placement."""

    @property
    def changed(self) -> dict[str, Any]:
        """Settings that are not the default, by name."""
        values = {item.name: getattr(self, item.name) for item in fields(SplitSettings)}
        return {name: v for name, v in values.items() if v != getattr(SplitSettings, name)}


@dataclass(frozen=True)
class RolloutSettings:
    """Devices and engine that sample completions."""

    CHANGEABLE: ClassVar[bool] = True
    SFT: ClassVar[bool] = False

    rollout_layout: str | None = None
    """Layout of the same devices for sampling completions, without pp and cp, for example "tp2
    dp4"; None is the training layout with pp and cp folded into dp. Weights are resharded between
    the two."""
    slots: int | None = None
    """Responses decoded concurrently (continuous batching), a multiple of dp x tp of the layout
    that decodes: when one ends, the next takes its slot. None is the responses of a step, at most
    512."""
    prefill_tokens: int = setting(ROLLOUTS.prefill_tokens, minimum=1)
    """Prompt tokens of a device in one prefill, approximately: fewer need less memory."""
    max_staleness: int = setting(0, minimum=0, changeable=False)
    """Maximum staleness of the sampling policy, in steps. 0 alternates sampling and training; N,
    for example 1, samples a batch while the previous one is trained on, and starts rows of up to N
    batches, whose tokens are at most N versions old."""
    stale_cache: bool = setting(False, changeable=False)
    """Rows in flight keep the KV cache that older weights computed, instead of recomputing it when
    weights change; checkpoints then include it. Needs a max_staleness of 2 or more: with less, no
    row is in flight between two steps."""
    rollout_devices: int | None = setting(None, minimum=1)
    """Number of further devices, after the layout's, that sample completions while the
    devices of the layout train; needs a max_staleness. None samples on the devices of the layout,
    alternating with training."""
    rollout_engine: Literal["slots", "disaggregated"] = "slots"
    """Engine that samples completions: slots on one mesh, or the same slots with attention and
    experts on separate device groups, as the rollout split says; the tokens are the same."""
    drift_alarm: float | None = setting(0.01, above=0)
    """Raise an alarm (sampling/drift_alarm) at a step whose sampler has drifted from the trainer by
    more than this: the mean over the tokens of the first update of the k3 estimate of the KL
    divergence, in nats; None is off."""

    def __post_init__(self):
        if self.stale_cache and self.max_staleness < 2:
            raise ValueError(
                f"stale_cache changes nothing at max_staleness={self.max_staleness}: no row is in "
                "flight between two steps. Give --max-staleness 2 or more, or leave it out."
            )
        if self.rollout_devices is not None and not self.max_staleness:
            raise ValueError(
                f"rollout_devices={self.rollout_devices} and the training devices would wait for "
                "each other: give --max-staleness 1 or more, or leave it out."
            )


def check_engine(rollout: RolloutSettings, split: SplitSettings) -> None:
    """Raises ValueError for settings that the engine does not have."""
    if rollout.rollout_engine == "slots":
        for name, value in split.changed.items():
            raise ValueError(
                f"{name}={value!r} needs --rollout-engine disaggregated: "
                f"give it, or leave out {flag(name)}."
            )
        return
    if split.rollout_split is None:
        raise ValueError(
            "rollout_engine='disaggregated' needs the devices of attention and of experts: "
            'give --rollout-split, for example "tp1 dp2 / ep2".'
        )
    if rollout.rollout_layout is not None:
        raise ValueError(
            f"rollout_layout={rollout.rollout_layout!r} is a layout of one mesh, and "
            f"rollout_split={split.rollout_split!r} has two: leave out --rollout-layout."
        )
    if rollout.stale_cache:
        raise ValueError(
            "stale_cache saves the KV cache in checkpoints, which "
            "rollout_engine='disaggregated' does not support: leave out --stale-cache."
        )
