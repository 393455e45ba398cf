"""Settings of the network of a run: where its weights come from, adapters, and the router."""

from dataclasses import dataclass
from typing import Literal

from jrl.published.location import checkpoint_folder, is_checkpoint
from jrl.setting import setting


@dataclass(frozen=True)
class ModelSettings:
    """Network, weights and dtype."""

    model: str = setting(
        "tiny",
        sft="A preset (tiny, tiny-dense or small), or a published checkpoint (DIR, gguf:FILE or "
        "pip:NAME), its weights and its tokenizer.",
    )
    """A preset (tiny, tiny-dense or small), or a published checkpoint with its weights and
    tokenizer: a folder (DIR or hf:DIR), a GGUF file (gguf:FILE), or an installed package that has
    one (pip:NAME). The warm start is skipped then."""
    weights: str | None = setting(None, sft="Run folder whose latest policy to start from.")
    """Run folder whose latest policy to start from; the warm start is skipped."""
    ignore_options: tuple[str, ...] = ()
    """Options of the checkpoint's config.json that have no effect, though they are not known: a run
    whose checkpoint has one names it."""
    base_name: str | None = setting(None, changeable=True)
    """Name of the checkpoint for others, for example HuggingFaceTB/SmolLM2-135M-Instruct: adapters,
    exports and their model cards state it as their base. None is the name in its config.json or
    GGUF metadata, or the name of the model as it was given."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations and weights. With bfloat16 the optimizer keeps float32 master weights,
    sharded over the devices that would replicate them (ZeRO). None is float32, or the checkpoint's
    own."""

    @property
    def checkpoint(self) -> str | None:
        """Directory of the model's published checkpoint; None for a preset."""
        return str(checkpoint_folder(self.model)) if is_checkpoint(self.model) else None


@dataclass(frozen=True)
class LoraSettings:
    """LoRA adapters."""

    lora_rank: int | None = None
    """Rank of LoRA adapters, for example 32: only they are trained, on frozen base weights. A
    critic trains its own adapters and its value head. None trains all weights."""
    lora_alpha: float | None = None
    """Alpha of LoRA: adapter outputs are scaled by alpha / rank; None is twice the rank."""
    lora_targets: str | None = None
    """Layers with adapters: some of attention,experts,dense,shared,head, or modules as PEFT names
    them (for example q_proj,v_proj or all-linear); None is all that the network has, except the
    head."""
    lora_rank_stabilised: bool = False
    """Scale adapter outputs by alpha / sqrt(rank) (rsLoRA)."""
    lora_from: str | None = None
    """Folder in PEFT's format whose adapters to start from, with its rank, alpha and targets. A KL
    term still compares with the network without adapters."""

    def __post_init__(self):
        for name in ("lora_alpha", "lora_targets", "lora_rank_stabilised"):
            if getattr(self, name) and self.lora_rank is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} changes nothing without adapters: give "
                    "--lora-rank, or leave it out."
                )


@dataclass(frozen=True)
class RouterSettings:
    """Router losses and expert capacity; a value replaces the network's own."""

    load_balance_coef: float | None = setting(None, minimum=0)
    """Weight of the load-balancing loss of each sequence; None is the preset's (checkpoints: 0)."""
    batch_balance_coef: float | None = setting(None, minimum=0)
    """Weight of the load-balancing loss of each micro-batch in a sequence-parallel group."""
    global_balance_coef: float | None = setting(None, minimum=0)
    """Weight of the load-balancing loss of each micro-batch over all devices."""
    router_z_coef: float | None = setting(None, minimum=0)
    """Weight of the router z-loss; None is the preset's; 0 for checkpoints."""
    bias_update_rate: float | None = setting(None, minimum=0)
    """Change of the expert selection bias (DeepSeek-V3) in an optimizer step; None keeps the
    checkpoint's bias."""
    capacity_factor: float | None = setting(
        None,
        sft="Capacity of an expert in training, as a multiple of its tokens under balanced "
        "routing; None is the network's own, mostly unlimited (dropless).",
    )
    """Capacity of an expert in training and scoring, as a multiple of its tokens under balanced
    routing; None is the network's own, mostly unlimited (dropless). One that drops tokens is only
    for supervised learning (--steps 0): sampling drops none, so a policy would score its samples
    with other probabilities than it sampled them with."""
    drop_policy: Literal["probs", "position"] | None = None
    """Tokens that a full expert keeps: those with the largest gate weights, or the first of the
    rows. None is the network's own, mostly probs."""
    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """Tokens that the capacity is computed from: tokens of a device, or of all devices with shards
    of the same sequences, so that cp and tp change nothing. None is the network's own, mostly
    sub_sequence."""
