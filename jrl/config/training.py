"""Settings of the training loop: steps, devices, warm start and evaluation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jrl.checks import check_seed
from jrl.setting import setting

AUTO = "auto"
"""The layout of a command line that leaves the choice to the planner; no run has it."""


@dataclass(frozen=True)
class TrainingSettings:
    """Steps, seed and devices."""

    steps: int = setting(
        60,
        minimum=0,
        changeable=True,
        sft="Training steps, each one optimizer step on a batch. 0 takes as many as --epochs.",
    )
    """Training steps; each samples completions once and trains on them. 0 ends after the warm
    start, whose weights other runs can start from."""
    seed: int = 0
    """Random seed of the run. The same seed on the same kind of machine gives the same run."""
    layout: str = setting("dp1", changeable=True)
    """Layout of the devices (parallelism), for example "tp2 dp2 / ep4"; "auto" takes the layout of
    all devices that the planner (`moe.planner`) predicts to be fastest."""
    devices: int | None = setting(None, minimum=1, changeable=True)
    """Number of fake CPU devices, over all processes; None takes the real ones."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's first moment; bfloat16 takes half the memory."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """Communication dtype of gradients between sequence-parallel groups (over dp; of experts, over
    edp); bfloat16 rounds them once, sends half the bytes and sums in float32. Inside a group
    (cp and tp) they are sent in float32."""
    packing: bool | None = setting(
        None,
        changeable=True,
        sft="Sequence packing: conversations are concatenated, so that no padding is computed and "
        "the LM head sees only loss tokens. Not supported with pp. None packs where it is "
        "supported.",
    )
    """Sequence packing: updates concatenate completions, so that no padding is computed and the LM
    head sees only loss tokens; a prompt is then computed for each completion. Not supported with
    pp. None packs if a recipe samples responses in windows (tppo)."""
    memory_limit: float | None = setting(None, above=0, changeable=True)
    """GiB that a device may use. The run is refused before it compiles if its predicted peak is
    more; slots, micro-batch, vocabulary chunk and a checkpoint's response length that are not set
    are lowered to fit. None is what is free at the start."""
    max_nonfinite: int = setting(5, minimum=1, changeable=True)
    """Maximum consecutive updates that are skipped because of a non-finite loss or gradient."""

    def __post_init__(self):
        check_seed(self.seed)


@dataclass(frozen=True)
class WarmStartSettings:
    """Supervised learning before reinforcement learning, from random weights."""

    SFT: ClassVar[bool] = False

    warm_start_accuracy: float = setting(0.3, minimum=0, maximum=1)
    """Supervised learning stops at this sampled accuracy on unseen training prompts."""
    warm_start_steps: int = setting(2000, minimum=0)
    """Maximum supervised steps; 0 skips the warm start."""
    warm_start_batch: int = setting(128, minimum=1)
    """Examples per supervised step; padded with masked rows if it does not divide over the
    devices."""
    warm_start_learning_rate: float = setting(2e-3, minimum=0)
    """Learning rate of the optimizer in the warm start."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation on held-out prompts during training."""

    eval_every: int = setting(
        10, minimum=1, sft="Steps between evaluations on held-out conversations."
    )
    """Steps between evaluations on held-out prompts."""
    eval_prompts: int = setting(
        256,
        minimum=1,
        sft="Held-out conversations per evaluation, or all if there are fewer.",
    )
    """Held-out prompts per evaluation during training, or all if there are fewer."""
