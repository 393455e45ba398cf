"""Settings of a run, except for those of its recipe."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jrl.checks import check_range, check_seed, flag
from jrl.published.location import checkpoint_folder, is_checkpoint
from jrl.runs.directory import storage_path
from jrl.tasks.data.conversations import template_arguments
from jrl.tasks.data.files import KINDS
from jrl.tasks.data.split import parse_heldout
from jrl.tasks.rewards import RewardSettings

ROUTER_SETTINGS = (
    *("load_balance_coef", "batch_balance_coef", "global_balance_coef"),
    *("router_z_coef", "bias_update_rate"),
)
NETWORK_SETTINGS = (*ROUTER_SETTINGS, "capacity_factor", "drop_policy", "drop_scope")
"""Fields of `RunConfig` that replace those of the network where they are given; the first ones are
numbers from 0."""
IMPLEMENTATION_SETTINGS = (
    *("context", "dispatch", "server_devices"),
    *("attention", "decode_attention", "router", "experts"),
)
"""Fields of `RunConfig` that select an implementation for the devices; None is the best that
applies."""
POSITIVE_SETTINGS = (
    *("devices", "server_devices", "rollout_devices", "verifiers"),
    *("max_turns", "turn_length", "max_nonfinite"),
    *("rollout_micro_batches", "rollout_expert_slots", "rollout_replan"),
    *("warm_start_batch", "eval_every", "eval_prompts", "checkpoint_every"),
    *("keep_checkpoints", "samples_every", "min_processes"),
)
"""Fields of `RunConfig` that are numbers from 1, where they are given."""

AUTO = "auto"
"""The layout of a command line that leaves the choice to the planner; no run has it."""
DISAGGREGATED_SETTINGS = ("rollout_split", "rollout_m2n", "rollout_expert_slots", "rollout_replan")
"""Settings that apply to `rollout_engine="disaggregated"` only."""
TELL, DRAIN = "tell", "drain"
"""Actions of `RunConfig.on_fault`; any other text is a command."""
SINGLE_MESH_SETTINGS: dict[str, Any] = {
    "rollout_engine": "slots",
    **dict.fromkeys(DISAGGREGATED_SETTINGS),
}
"""Settings of a run that samples on one mesh."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run that do not belong to the algorithm."""

    task: str = "sort"
    """A built-in task, "jsonl:PATH", "parquet:PATH", "dataset:DIR" (of save_to_disk), "gym:NAME" or
    "gym:NAME,OPTION=VALUE", a custom one as "path/to/file.py:make" or "package.module:make", or a
    weighted mixture of tasks, "3 sort + 1 countdown"."""
    held_out: str | None = None
    """Held-out prompts to evaluate on: a share of them (0.05), a number (200), or a file of other
    prompts. None is one in ten."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """Prompts of a list with more tokens than a given prompt_length: drop and count them, or refuse
    to start."""
    answers: Literal["final", "evaluated"] = "final"
    """Required form of answers to a file's prompts: "final", a value in final form if the reference
    answer is one (42, not 17 + 25); "evaluated", any expression of the same value."""
    unreadable_answers: Literal["drop", "refuse"] = "drop"
    """Records of a file whose answer cannot be checked: drop and count them, up to a tenth of the
    file, or refuse to start."""
    reward: tuple[str, ...] = ()
    """Reward functions, path/to/file.py:name or package.module:name, instead of the task's verifier
    or reward; "task" among them is that one."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER: weights of the rewards, or of the components of one that returns several, in
    their sum; 1 by default."""
    reward_seconds: float = 5.0
    """Timeout of one call of a custom reward, in seconds."""
    unsafe_tools: bool = False
    """Run code that the policy writes as your user, where it cannot be run in a sandbox. Without
    it, a task with such a tool raises an error on a machine without bubblewrap."""
    failed_reward: float = 0.0
    """The score of a completion whose reward took longer, raised an exception, or gave no finite
    number."""
    steps: int = 60
    """Training steps; each samples completions once and trains on them. 0 ends after the warm
    start, whose weights other runs can start from."""
    seed: int = 0
    """Random seed of the run. The same seed on the same kind of machine gives the same run."""

    model: str = "tiny"
    """A preset (tiny, tiny-dense or small), or a published checkpoint with its weights and
    tokenizer: a folder (DIR or hf:DIR), a GGUF file (gguf:FILE), or an installed package that has
    one (pip:NAME). The warm start is skipped then."""
    weights: str | None = None
    """Run folder whose latest policy to start from; the warm start is skipped."""
    tokenizer: str | None = None
    """A SentencePiece .model file, or a tokenizer.json with its tokenizer_config.json in the same
    folder; None takes the checkpoint's, or trains a character model on the task's characters."""
    ignore_options: tuple[str, ...] = ()
    """Options of the checkpoint's config.json that have no effect, though they are not known: a run
    whose checkpoint has one names it."""
    chat_template: str = "checkpoint"
    """Chat template for prompts: "checkpoint" is the one that comes with the tokenizer, if there is
    one; "none" leaves prompts as they are; anything else is the path of a Jinja file."""
    system_prompt: str | None = None
    """First message of every conversation without a system message."""
    chat_template_kwargs: str | None = None
    """A JSON object of variables for the chat template, such as {"enable_thinking": false}; a
    record's "chat_template_kwargs" take precedence."""
    prompt_field: str = "prompt"
    """Field of a JSON line with the prompt, a text or a list of messages; with a dot, a nested
    field."""
    answer_field: str = "answer"
    """Field with the reference answer, a text or a number: "answer", or
    "reward_model.ground_truth"."""
    messages_field: str | None = None
    """Field with the prompt as a conversation, a list of {"role": ..., "content": ...}, instead of
    the prompt; None takes "messages" where a line has no prompt."""
    lora_rank: int | None = None
    """Rank of LoRA adapters: only they are trained, on frozen base weights. A critic trains its own
    adapters and its value head. None trains all weights."""
    lora_alpha: float | None = None
    """Alpha of LoRA: adapter outputs are scaled by alpha / rank; None is twice the rank."""
    lora_targets: str | None = None
    """Layers with adapters: some of attention,experts,dense,shared,head, or modules as PEFT names
    them (q_proj,v_proj or all-linear); None is all that the network has, except the head."""
    lora_rank_stabilised: bool = False
    """Scale adapter outputs by alpha / sqrt(rank) (rsLoRA)."""
    lora_from: str | None = None
    """Folder in PEFT's format whose adapters to start from, with its rank, alpha and targets. A KL
    term still compares with the network without adapters."""

    layout: str = "dp1"
    """Layout of the devices (parallelism), for example "tp2 dp2 / ep4"; "auto" takes the layout of
    all devices that the planner (`sharding.planner`) predicts to be fastest."""
    rollout_layout: str | None = None
    """Layout of the same devices for sampling completions, without pp and cp; None is the training
    layout with pp and cp folded into dp. Weights are resharded between the two."""
    slots: int | None = None
    """Responses decoded concurrently (continuous batching), a multiple of dp x tp of the layout
    that decodes: when one ends, the next takes its slot. None is those of a step, at most 512."""
    max_staleness: int = 0
    """Maximum staleness of the sampling policy, in steps. 0 alternates sampling and training; N
    samples a batch while the previous one is trained on, and starts rows of up to N batches, whose
    tokens are at most N versions old."""
    stale_cache: bool = False
    """Rows in flight keep the KV cache that older weights computed, instead of recomputing it when
    weights change; checkpoints then include it. Needs a max_staleness of 2 or more: with less, no
    row is in flight between two steps."""
    rollout_devices: int | None = None
    """Number of further devices, after those of the layout, that sample completions while those of
    the layout train; needs a max_staleness. None samples on the devices of the layout, alternating
    with training."""
    rollout_engine: Literal["slots", "disaggregated"] = "slots"
    """Engine that samples completions: slots on one mesh, or the same slots with attention and
    experts on separate device groups, as the rollout split says; the tokens are the same."""
    rollout_split: str | None = None
    """Device groups of disaggregated decoding, for example "tp1 dp2 / ep2": attention on tp x dp
    devices, experts on ep (x etp) others. In total they are the devices of the layout, alternating
    with training, or the rollout devices."""
    rollout_micro_batches: int = 2
    """Micro-batches of slots in flight in disaggregated decoding: while one is with the experts,
    attention works on another. 3 is enough if messages take half as long as the slower device
    group, 4 if they take as long."""
    rollout_m2n: Literal["device_put", "collective", "transfer"] | None = None
    """Transport between the device groups of disaggregated decoding: copies from device to device
    in one process, collectives over both groups, or pulls by each process from the memory of the
    others. None is copies in one process and collectives in several."""
    rollout_expert_slots: int | None = None
    """Experts per expert device in disaggregated decoding: with more than its share, experts with
    many tokens are replicated on several devices. None is its share."""
    rollout_replan: int | None = None
    """Tokens of a row between rebalancings of the expert placement, by the token counts of the
    rollout so far; None keeps the placement."""
    devices: int | None = None
    """Number of fake CPU devices, over all processes; None takes the real ones."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of activations and weights. With bfloat16 the optimizer keeps float32 master weights,
    sharded over the devices that would replicate them (ZeRO). None is float32, or the checkpoint's
    own."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's first moment; bfloat16 takes half the memory."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """Communication dtype of gradients between sequence-parallel groups (over dp, those of experts
    over edp); bfloat16 rounds them once, sends half the bytes and sums in float32. Inside a group
    (cp and tp) they are sent in float32."""

    activation_wire: Literal["float8_e4m3fn"] | None = None
    """Communication dtype of tokens sent to experts on other devices, of their outputs, and of the
    gradients of both: one byte per element and float32 scales, per token forward and per channel of
    128 tokens backward. Sampling and scoring send the same. None is the dtype of activations."""

    context: Literal["gather", "ring", "ulysses"] | None = None
    """Context-parallel attention over cp: all-gather of keys and values, a ring, or an all-to-all
    from tokens to heads and back (Ulysses). None is the one that sends least, or the all-gather.
    This and the following settings, down to vocab_chunk, change time and memory, and results only
    by the order of sums."""
    dispatch: (
        Literal["all_to_all", "all_gather", "ragged", "two_level", "two_level_ragged"] | None
    ) = None
    """Token dispatch to experts on other devices: an all-to-all, an all-gather, a ragged all-to-all
    of exactly sized slices (GPU and TPU), or a two-level all-to-all, which sends one copy of a
    token to each server of its experts and from there one to each device, with buffers of one size
    or in slices (GPU and TPU). None is the fastest of the first three by its bytes and the links
    between the devices; the run prints which."""
    server_devices: int | None = None
    """Devices of a server, for the two-level dispatch: each server has this many consecutive
    devices. None is the number that fast links join by the planner's table of devices."""
    exchange_rate: float | None = None
    """For that choice, the rate of an all-to-all as a fraction of a ring's: python -m
    benchmarks.dispatch measures it. None is the planner's number for such devices."""
    attention: Literal["plain", "blocked", "xla", "cudnn", "mosaic"] | None = None
    """Attention on one device: all scores in memory, block by block, XLA's, or FlashAttention in
    bfloat16, NVIDIA's (cudnn) or ours for Hopper (mosaic). None is the best of the others that
    applies."""
    decode_attention: Literal["plain", "mosaic"] | None = None
    """Attention of a decode step over its KV cache; mosaic is a kernel for NVIDIA's Hopper. None is
    mosaic there where it supports the heads, else plain."""
    latent: Literal["absorbed", "expanded"] | None = None
    """KV cache of multi-head latent attention: latent vectors (absorbed), or the keys and values
    computed from them (expanded). None is absorbed."""
    router: Literal["plain", "mosaic"] | None = None
    """Top-k routing of tokens to experts; mosaic is a kernel for NVIDIA's Hopper and later GPUs.
    None is mosaic there for up to 128 experts, else plain."""
    experts: (
        Literal[
            "tiles",
            "batched",
            "blocks",
            "mosaic",
            "mosaic_fused",
            "mosaic_gathered",
            "mosaic_scattered",
            "megablox",
            "ragged_dot",
            "plain",
        ]
        | None
    ) = None
    """Grouped GEMM of the experts: mosaic, mosaic_fused, mosaic_gathered and mosaic_scattered are
    kernels for NVIDIA's Hopper, megablox are JAX's for TPUs. None is mosaic on Hopper in half
    precision where widths are multiples of 64, batched on other GPUs, tiles on a CPU, blocks on a
    TPU."""
    remat: Literal["none", "selective", "projections", "full"] = "none"
    """Gradient checkpointing: what the backward pass of a layer recomputes instead of storing it;
    each choice stores less than the one before."""
    fsdp: bool = False
    """Shard weights over the devices that would replicate them (fully sharded data parallelism) and
    gather them where they are used. Needs a remat other than none."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of each layer over devices as soon as the backward pass of an update's
    last micro-batch has left the layer, overlapped with the rest of it; else after the pass.
    Compiles a separate program for that micro-batch. Not supported with pp."""
    buffer_factor: float | None = None
    """Buffer size of the experts of a device, as a multiple of their tokens under balanced routing;
    1.5 is usual, 0 means worst-case buffers. An update, a scoring pass or a prefill that
    overflows is discarded and recomputed with worst-case buffers, so that results do not depend on
    it. None is 1.5 on GPUs, else worst-case buffers."""
    expert_chunks: int = 1
    """Chunks in which the tokens of a device are sent to the experts and back, so that the
    communication of one overlaps the GEMMs of another."""
    two_batch_overlap: bool = False
    """Run the rows of a device through each layer as two independent half-batches, so that the
    communication of one overlaps the computation of the other."""
    scan_layers: bool | None = None
    """Compile one layer, or one period of repeating layer types (windows, Gated DeltaNet), and scan
    over it, so that compilation time does not grow with the number of layers. None scans over more
    than eight layers."""
    vocab_chunk: int | None = 8192
    """Vocabulary entries whose logits a device computes at a time in training; None is all."""

    packing: bool | None = None
    """Sequence packing: updates concatenate completions, so that no padding is computed and the LM
    head sees only loss tokens; a prompt is then computed for each completion. Not supported with
    pp. None packs if a recipe samples responses in windows (tppo)."""

    prompt_length: int | None = None
    """Tokens that prompts are padded to; None fits the task's longest prompt."""
    response_length: int | None = None
    """Maximum tokens of a completion; None is a quarter above the task's longest answer, and for a
    checkpoint 1024 or what its positions leave. In a conversation it bounds the tokens of policy
    and environment in total."""
    max_turns: int | None = None
    """Maximum turns of the policy in a conversation; None leaves its end to the environment and the
    response length."""

    turn_length: int | None = None
    """Maximum tokens of one turn of the policy in a conversation, including its end token: the
    environment is told that a turn was truncated. None leaves it to the response length, which a
    long first turn may use up."""

    load_balance_coef: float | None = None
    """Weight of the load-balancing loss of each sequence; None is the preset's (checkpoints: 0)."""
    batch_balance_coef: float | None = None
    """Weight of the load-balancing loss of each micro-batch in a sequence-parallel group."""
    global_balance_coef: float | None = None
    """Weight of the load-balancing loss of each micro-batch over all devices."""
    router_z_coef: float | None = None
    """Weight of the router z-loss; None is the preset's; 0 for checkpoints."""
    bias_update_rate: float | None = None
    """Change of the expert selection bias (DeepSeek-V3) in an optimizer step; None keeps the
    checkpoint's bias."""
    capacity_factor: float | None = None
    """Capacity of an expert in training and scoring, as a multiple of its tokens under balanced
    routing; None is the network's own, mostly unlimited (dropless). One that drops tokens is only
    for supervised learning (--steps 0): sampling drops none, so a policy would score its samples
    with other probabilities than it sampled them with."""
    drop_policy: Literal["probs", "position"] | None = None
    """Tokens that a full expert keeps: those with the largest gate weights, or the first of the
    rows. None is the network's own, mostly probs."""
    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """Tokens that the capacity is computed from: those of a device, or of all devices with shards
    of the same sequences, so that cp and tp change nothing. None is the network's own, mostly
    sub_sequence."""

    warm_start_accuracy: float = 0.3
    """Supervised learning stops at this sampled accuracy on unseen training prompts."""
    warm_start_steps: int = 2000
    """Maximum supervised steps; 0 skips the warm start."""
    warm_start_batch: int = 128
    """Examples per supervised step; padded with masked rows if it does not divide over the
    devices."""
    warm_start_learning_rate: float = 2e-3
    """Learning rate of AdamW in the warm start."""

    eval_every: int = 10
    """Steps between evaluations on held-out prompts."""
    eval_prompts: int = 256
    """Held-out prompts per evaluation during training, or all if there are fewer."""

    checkpoint_every: int = 50
    """Steps between checkpoints. The first is taken after the warm start, the last at the end."""
    keep_checkpoints: int = 2
    """Number of checkpoints kept; the oldest is deleted first."""
    checkpoint_dir: str | None = None
    """Directory of the checkpoints, a path or gs://BUCKET/PATH; None is one in the run folder."""
    samples_every: int = 10
    """Steps between completions written to samples.jsonl."""
    sample_tokens: int = 512
    """Number of first tokens of each of these completions to write with their advantage, entropy
    and log-probabilities, by a forward pass over these completions; 0 writes none."""
    max_nonfinite: int = 5
    """Maximum consecutive updates that are skipped because of a non-finite loss or gradient."""
    drift_alarm: float | None = 0.01
    """Raise an alarm (sampling/drift_alarm) at a step whose sampler has drifted from the trainer by
    more than this: the mean over the tokens of the first update of the k3 estimate of the KL
    divergence, in nats; None is off."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted over the batch, so that they carry no
    information."""
    verifiers: int | None = None
    """Processes that check answers or run rewards; None is one per processor core, up to 8."""
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Loggers of metrics, in addition to metrics.jsonl."""
    metrics_port: int | None = None
    """Serve Prometheus metrics (/metrics) and a health check (/health) of the run on this port of
    every machine, on all its networks; further processes of a machine take the next ports. None
    serves nothing."""
    step_deadline: float | None = None
    """Seconds from the end of a step to that of the next, after which the health check fails; None
    is none. The first step, which compiles, has none."""
    hang_deadline: float | None = None
    """Seconds that a phase (rollout, reward, update, ...) may take without a sign of progress. Then
    the process that hangs is named and stacks are written to the run folder, and after 30 s more
    (at most the deadline) the run ends. It is six times as long for checkpoints, and twelve times
    for compilations and for the first of each phase. 0 watches nothing. None is 300; a run of one
    process is then named but not ended."""

    faults: bool = False
    """Sample each process once a second into faults/ of the run folder, for python -m jrl.faults
    watch, and raise an alarm when one stands out from the others. The numbers stay the same."""
    faults_continuity: float = 240.0
    """Seconds for which a process has to stand out before an alarm names it."""
    faults_port: int | None = None
    """Serve the newest sample to Prometheus on this port of localhost, plus the number of the
    process; None serves nothing."""
    on_fault: str | None = None
    """Action at an alarm, in addition to the line that tells it: "tell" is none, "drain" saves a
    checkpoint and ends the run with status 75, for a restart without that machine, and any other
    text is a shell command, whose environment has JRL_FAULT_MACHINE, JRL_FAULT_METRIC,
    JRL_FAULT_START, JRL_FAULT_END (Unix times) and JRL_FAULT_LINE. None is tell."""
    drain_every: float = 3600.0
    """Fewest seconds between two drains of the run; alarms in between are told."""
    min_processes: int | None = None
    """Elastic training: fewest processes with which the run continues, on a layout with a smaller
    dp, after a drain or where it is started with fewer devices than its layout has. Without a legal
    layout alarms are told, and the start is an error. `elastic` of python -m jrl.launch sets it.
    None leaves the processes to the scheduler, and the layout as it is."""

    @property
    def checkpoint(self) -> str | None:
        """Directory of the model's published checkpoint; None for a preset."""
        return str(checkpoint_folder(self.model)) if is_checkpoint(self.model) else None

    @property
    def fault_command(self) -> str | None:
        """Shell command for each alarm; None without one."""
        return None if self.on_fault in (None, TELL, DRAIN) else self.on_fault

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template in addition to the messages."""
        return template_arguments(self.chat_template_kwargs)

    @property
    def rewards(self) -> RewardSettings:
        """Reward settings: functions, weights, time limit and the score of a failed reward."""
        return RewardSettings(
            self.reward, self.reward_weights, self.reward_seconds, self.failed_reward
        )

    def __post_init__(self):
        check_seed(self.seed)
        _ = self.rewards, self.template_arguments
        parse_heldout(self.held_out)
        check_range(self, POSITIVE_SETTINGS, 1)
        check_range(self, ("warm_start_steps", "warm_start_learning_rate"), 0)
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must not be negative: 0 is only the warm start.")
        for name in (*ROUTER_SETTINGS, "sample_tokens", "max_staleness"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must not be negative: 0 is none.")
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
        for name in ("lora_alpha", "lora_targets", "lora_rank_stabilised"):
            if getattr(self, name) and self.lora_rank is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} changes nothing without adapters: give "
                    "--lora-rank, or leave it out."
                )
        self._check_rollout()
        if self.checkpoint_dir is not None:
            storage_path(self.checkpoint_dir)
        if self.drift_alarm is not None and not 0 < self.drift_alarm < math.inf:
            raise ValueError(f"drift_alarm={self.drift_alarm} must be above 0 nats; None is off.")
        if not any(f"{kind}:" in self.task for kind in KINDS):
            for name, default in (("prompt", "prompt"), ("answer", "answer"), ("messages", None)):
                if getattr(self, f"{name}_field") != default:
                    raise ValueError(
                        f"{name}_field={getattr(self, f'{name}_field')!r} needs --task jsonl:FILE, "
                        f"not {self.task!r}: leave it out."
                    )
        check_range(self, ("warm_start_accuracy",), 0, 1)
        if not 0 < self.faults_continuity < math.inf:
            raise ValueError(f"faults_continuity={self.faults_continuity} must be above 0 seconds.")
        for name in ("faults_port", "on_fault"):
            if getattr(self, name) is not None and not self.faults:
                raise ValueError(f"{name}={getattr(self, name)!r} needs --faults.")
        self._check_drain()
        check_range(self, ("faults_port", "metrics_port"), 1, 2**16 - 1)
        check_range(self, ("step_deadline",), 0, above=True)
        check_range(self, ("hang_deadline",), 0)
        if self.step_deadline is not None and self.metrics_port is None:
            raise ValueError(
                f"step_deadline={self.step_deadline} is of the health check: give --metrics-port."
            )

    def _check_drain(self) -> None:
        """Raises a ValueError for settings of drains that cannot be."""
        if not 0 < self.drain_every < math.inf:
            raise ValueError(f"drain_every={self.drain_every} must be above 0 seconds.")
        if self.min_processes is None:
            return
        for name in ("rollout_devices", "rollout_split", "stale_cache"):
            if getattr(self, name):
                raise ValueError(
                    f"min_processes={self.min_processes} cannot be combined with {flag(name)}, "
                    "whose devices do not shrink with dp: leave out one of them."
                )

    def _check_rollout(self) -> None:
        """Raises a ValueError for rollout settings that are incompatible."""
        if self.rollout_engine == "slots":
            for name in DISAGGREGATED_SETTINGS:
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} needs --rollout-engine disaggregated: "
                        f"give it, or leave out {flag(name)}."
                    )
            return
        if self.rollout_split is None:
            raise ValueError(
                "rollout_engine='disaggregated' needs the devices of attention and of experts: "
                'give --rollout-split, for example "tp1 dp2 / ep2".'
            )
        if self.rollout_layout is not None:
            raise ValueError(
                f"rollout_layout={self.rollout_layout!r} is a layout of one mesh, and "
                f"rollout_split={self.rollout_split!r} has two: leave out --rollout-layout."
            )
        if self.stale_cache:
            raise ValueError(
                "stale_cache saves the KV cache in checkpoints, which "
                "rollout_engine='disaggregated' does not support: leave out --stale-cache."
            )


@dataclass(frozen=True)
class SplitSettings:
    """Attention and expert device groups for serving a policy. A `RunConfig` has the same
    settings, with ``rollout_`` before each name; None is unset."""

    split: str | None = None
    micro_batches: int | None = None
    expert_slots: int | None = None
    replan: int | None = None

    def with_defaults_from(self, run: object) -> "SplitSettings":
        """These settings, with those of a run where they are unset."""
        values = {
            name: getattr(run, f"rollout_{name}") if value is None else value
            for name, value in vars(self).items()
        }
        return SplitSettings(**values)
