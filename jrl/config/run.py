"""Settings of a run, except for those of its recipe."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from jrl.config.numbers import check_least, check_range, check_seed
from jrl.config.rollout import check_rollout
from jrl.tasks.data.conversations import template_arguments
from jrl.tasks.data.files import KINDS
from jrl.tasks.data.split import parse_heldout
from jrl.tasks.rewards.settings import RewardSettings

ROUTER_SETTINGS = (
    "load_balance_coef",
    "batch_balance_coef",
    "global_balance_coef",
    "router_z_coef",
    "bias_update_rate",
)
NETWORK_SETTINGS = (*ROUTER_SETTINGS, "capacity_factor", "drop_policy", "drop_scope")
"""Fields of `RunConfig` that replace those of the network where they are given; the first ones are
numbers from 0."""
IMPLEMENTATION_SETTINGS = (
    "context",
    "dispatch",
    "attention",
    "decode_attention",
    "router",
    "experts",
)
"""Fields of `RunConfig` that select an implementation for the devices; None is the best that
applies."""
POSITIVE_SETTINGS = (
    *("devices", "rollout_devices", "verifiers"),
    *("max_turns", "turn_length", "max_nonfinite"),
    *("rollout_micro_batches", "rollout_expert_slots", "rollout_replan"),
    *("warm_start_batch", "eval_every", "eval_prompts", "checkpoint_every"),
    *("keep_checkpoints", "samples_every"),
)
"""Fields of `RunConfig` that are numbers from 1, where they are given."""

AUTO = "auto"
"""The layout of a command line that leaves the choice to the planner; no run has it."""


@dataclass(frozen=True)
class RunConfig:
    """Settings of a run that do not belong to the algorithm."""

    task: str = "sort"
    """A built-in task, "jsonl:PATH", "parquet:PATH", "dataset:DIR" (of save_to_disk), "gym:NAME" or
    "gym:NAME,OPTION=VALUE", one of your own as "path/to/file.py:make" or "package.module:make", or
    several mixed by weight, "3 sort + 1 countdown"."""
    held_out: str | None = None
    """Which prompts are held out to evaluate on: a share of them (0.05), a number (200), or a file
    of others. None is one in ten."""
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    """What becomes of a list's prompts with more tokens than a prompt_length that is given: they
    are left out and counted, or nothing begins."""
    answers: Literal["final", "evaluated"] = "final"
    """What the answers of a file's prompts have to be: "final", a value in final form where the
    gold answer is one (42, and not 17 + 25); "evaluated", anything that has its value."""
    reward: tuple[str, ...] = ()
    """Functions that reward completions, path/to/file.py:name or package.module:name, in place of
    the task's own verifier or reward; "task" is that one among them."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER: what the rewards, or the parts of one that gives several, weigh in their sum; 1
    where nothing is said."""
    reward_seconds: float = 5.0
    """How long one call of a reward of your own may take."""
    unsafe_tools: bool = False
    """Run code that the policy writes as your user, where it cannot be run in a sandbox: without,
    a task with such a tool is refused on a machine that has no bubblewrap."""
    failed_reward: float = 0.0
    """The score of a completion whose reward took longer, raised an exception, or gave no finite
    number."""
    steps: int = 80
    """Training steps; each samples completions once and learns from them. 0 ends after the warm
    start, from whose weights other runs can begin."""
    seed: int = 0
    """Of everything random. The same seed on the same kind of machine gives the same run."""

    model: str = "tiny"
    """A preset (tiny, tiny-dense or small), or hf:DIR for a public checkpoint, its weights and its
    tokenizer; the warm start is skipped then."""
    weights: str | None = None
    """A run folder whose last policy to start from; the warm start is skipped."""
    tokenizer: str | None = None
    """A SentencePiece .model file, or a tokenizer.json with its tokenizer_config.json beside it;
    None takes the checkpoint's own, or trains a character model on the task's characters."""
    chat_template: str = "checkpoint"
    """How prompts become conversations: "checkpoint" writes them with the template that comes with
    the tokenizer, if there is one; "none" takes them as they are; anything else is the path of a
    Jinja file."""
    system_prompt: str | None = None
    """The first message of every conversation that has no system message of its own."""
    chat_template_kwargs: str | None = None
    """A JSON object of names that the chat template is given, such as {"enable_thinking": false}; a
    record's own "chat_template_kwargs" come before them."""
    prompt_field: str = "prompt"
    """Field of a JSON line with the prompt, a text or a list of messages; with a dot, a field of a
    field."""
    answer_field: str = "answer"
    """Field with the gold answer, a text or a number: "answer", or "reward_model.ground_truth"."""
    messages_field: str | None = None
    """Field with the prompt as a conversation, a list of {"role": ..., "content": ...}, in place of
    the prompt; None takes "messages" where a line has no prompt."""
    lora_rank: int | None = None
    """Rank of adapters (LoRA): they alone learn, beside weights that stay as they are. Of a critic
    its own adapters and its value head learn. None learns all weights."""
    lora_alpha: float | None = None
    """What adapters add counts by alpha / rank; None is twice the rank."""
    lora_targets: str | None = None
    """What has adapters, some of attention,experts,dense,shared,head; None is all that the network
    has of them but the head."""
    lora_rank_stabilised: bool = False
    """What adapters add counts by alpha / sqrt(rank) (rsLoRA)."""
    lora_from: str | None = None
    """A folder of PEFT's format whose adapters to start from, with its rank, alpha and targets. A
    KL term still compares with the network without adapters."""

    layout: str = "dp1"
    """How the devices are laid out, for example "tp2 dp2 / ep4"; "auto" takes the layout of all
    devices that the planner (`sharding.planner`) predicts to be fastest."""
    rollout_layout: str | None = None
    """How the same devices are laid out to sample completions, without pp and cp; None is the
    layout of training, its pp and cp made part of dp. The weights are moved between the two."""
    slots: int | None = None
    """Responses that are decoded at a time, a multiple of dp x tp of the layout that decodes: where
    one ends, the next takes its place. None takes those of a step, 512 at most."""
    max_staleness: int = 0
    """Steps that the policy which samples may be behind the one that learns. 0 samples and learns
    by turns; N samples a batch while the one before is learned from, and begins rows of up to N
    batches, whose tokens are at most N versions old."""
    stale_cache: bool = False
    """Rows in flight keep the keys and values that older weights computed, instead of having them
    computed again when weights change; they are part of the checkpoint then. Needs a max_staleness
    of 2 or more: with less, no row is in flight between two steps."""
    rollout_devices: int | None = None
    """So many further devices, after those of the layout, sample completions while those of the
    layout learn; needs a max_staleness. None is the devices of the layout, by turns."""
    rollout_engine: Literal["slots", "disaggregated"] = "slots"
    """What samples completions: slots on one mesh, or the same slots with attention and experts on
    devices of their own, as the rollout split says; the tokens are the same."""
    rollout_split: str | None = None
    """The devices of both sides, for example "tp1 dp2 / ep2": attention on tp x dp of them, experts
    on ep (x etp) others. Together they are those of the layout, by turns with learning, or the
    rollout devices."""
    rollout_micro_batches: int = 2
    """Parts of the slots that are under way at a time on the two sides: while one is with the
    experts, attention works on another. 3 is enough where messages take half as long as the slower
    side, 4 where they take as long."""
    rollout_m2n: Literal["device_put", "collective", "transfer"] | None = None
    """How messages go between the two sides: copied from device to device in one process, by
    collectives over both, or pulled by each process from the memory of the others. None copies in
    one process and takes collectives in several."""
    rollout_expert_slots: int | None = None
    """Experts that a device of theirs has room for on the two sides: with more than its share, hot
    ones are held by several devices. None is its share."""
    rollout_replan: int | None = None
    """Tokens of a row after which experts are placed anew, by the tokens that each of them had
    since the rollout began; None leaves them where they are."""
    devices: int | None = None
    """Number of fake CPU devices, in all processes together; None takes the real
    ones."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of activations, and of weights as the network computes and samples with them. In bfloat16 the
    optimizer steps float32 masters of them, in parts on the devices that would hold the same. None
    is float32, and for hf:DIR what the checkpoint is in."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the optimizer's first moment; bfloat16 takes half its memory."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """In which gradients are sent between sequence-parallel groups (over dp, those of experts over
    edp); bfloat16 rounds them once, sends half the bytes and sums in float32. Inside a group (cp
    and tp) they are sent in float32."""

    activation_wire: Literal["float8_e4m3fn"] | None = None
    """In which tokens are sent to the experts of other devices, their sums back, and the gradients
    of both: a byte an element and float32 scales, of each token forward and of each channel of 128
    tokens backward. Sampling and scoring send the same. None is their own dtype."""

    context: Literal["gather", "ring", "ulysses"] | None = None
    """How attention crosses the devices of cp: keys and values are gathered on all of them, go
    round a ring, or tokens are traded for heads and back (Ulysses). None sends least, or gathers.
    This and what follows, down to vocab_chunk, changes time and memory, and no number but for the
    order of sums."""
    dispatch: Literal["all_to_all", "all_gather", "ragged"] | None = None
    """How tokens reach the experts of other devices: each goes where its experts are, all go
    everywhere, or in slices as long as they are (GPU and TPU). None is the one that takes least
    time by what it sends and the links between the devices; the run says which."""
    exchange_rate: float | None = None
    """For that choice, the rate of an all-to-all as a part of a ring's: python -m
    benchmarks.dispatch measures it. None is the planner's number for such devices."""
    attention: Literal["plain", "blocked", "xla", "cudnn", "mosaic"] | None = None
    """Attention on one device: all scores at once, block by block, XLA's, or FlashAttention in
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
    precision where widths are multiples of 64, tiles on a CPU, else blocks."""
    remat: Literal["none", "selective", "projections", "full"] = "none"
    """What the backward pass of a layer computes again instead of keeping it in memory: each keeps
    less than the one before."""
    fsdp: bool = False
    """Keep weights in parts on the devices that would all hold the same (fully sharded data
    parallelism) and join them where they are used. Needs a remat other than none."""
    overlap_grad_reduce: bool = False
    """Sum the gradients of each layer over devices as soon as the backward pass of an update's last
    micro-batch has left the layer, beside what comes after; else when all are there. Compiles that
    micro-batch besides. Not on a pipeline."""
    buffer_factor: float | None = None
    """Room for what routers send to the experts of a device, as a multiple of what even routing
    sends; 1.5 is usual. An update, a scoring pass or an admission of prompts that needs more is not
    used and run again with room for any routing, so that numbers do not depend on it. None is room
    for any routing."""
    expert_chunks: int = 1
    """Parts that the tokens of a device go to the experts and back in, so that one part may travel
    while another is multiplied."""
    two_batch_overlap: bool = False
    """Send the rows of a device through each layer in two halves that nothing orders, so that one
    half may communicate while the other is multiplied."""
    scan_layers: bool | None = None
    """Compile one program for all layers, or for the few after which their kinds (windows, Gated
    DeltaNet) come again, in place of one for each, so that compilation does not take longer the
    more they are. None does where there are more than eight."""
    vocab_chunk: int | None = 8192
    """Columns of the head whose logits a device has at a time in training; None is all of them."""

    packing: bool | None = None
    """Whether updates lay the tokens of completions end to end, so that no padding is computed and
    the head sees only what is learned from; a prompt is then computed for each completion. Not on
    a pipeline. None packs where a recipe writes responses in windows (tppo)."""

    prompt_length: int | None = None
    """Tokens that prompts are padded to; None fits the task's longest."""
    response_length: int | None = None
    """Limit of a completion in tokens; None is a quarter above the task's longest answer, and for
    hf:DIR 1024 or what the checkpoint's positions leave. Of a conversation it bounds the tokens of
    both sides together."""
    max_turns: int | None = None
    """Turns of the policy in a conversation at most; None leaves its end to the environment, and to
    the response length."""

    turn_length: int | None = None
    """Limit of one turn of the policy in a conversation, in tokens, its end included: a turn that
    is cut there goes to the environment, which is told so. None leaves it to the response length,
    which a long first turn may use up."""

    load_balance_coef: float | None = None
    """Weight of the load-balancing loss of each sequence; None is the preset's, 0 for hf:DIR."""
    batch_balance_coef: float | None = None
    """The same of each micro-batch in a sequence-parallel group."""
    global_balance_coef: float | None = None
    """The same of each micro-batch over all devices."""
    router_z_coef: float | None = None
    """Weight of the router z-loss; None is the preset's, 0 for hf:DIR."""
    bias_update_rate: float | None = None
    """How far a bias that experts are selected by (DeepSeek-V3) moves in an optimizer step; None
    leaves it where the checkpoint has it."""
    capacity_factor: float | None = None
    """Tokens that an expert takes at most while learning and scoring, as a multiple of those of
    even routing; None is the network's own, mostly any number. One that drops is for supervised
    learning alone (--steps 0): sampling drops none, so a policy would score its samples with other
    probabilities than it drew them with."""
    drop_policy: Literal["probs", "position"] | None = None
    """Which tokens a full expert keeps: those with the largest probs, or the first of the rows.
    None is the network's own, mostly probs."""
    drop_scope: Literal["sub_sequence", "full_sequence"] | None = None
    """The tokens of which the capacity is a part: those of a device, or of all that hold parts of
    the same sequences, so that cp and tp change nothing. None is the network's own, mostly
    sub_sequence."""

    warm_start_accuracy: float = 0.3
    """Supervised learning stops at this sampled accuracy on fresh training prompts."""
    warm_start_steps: int = 2000
    """Supervised steps at most; 0 skips the warm start."""
    warm_start_batch: int = 128
    """Examples per supervised step; filled up with rows that do not count where it does not divide
    over the devices."""
    warm_start_learning_rate: float = 2e-3
    """Of AdamW, for the warm start."""

    eval_every: int = 10
    """Steps between evaluations on held-out prompts."""
    eval_prompts: int = 256
    """Held-out prompts of an evaluation during training, or all there are if they are fewer."""

    checkpoint_every: int = 50
    """Steps between checkpoints. The first is taken after the warm start, the last at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept; the oldest goes first."""
    samples_every: int = 10
    """Steps between completions written to samples.jsonl."""
    sample_tokens: int = 512
    """Tokens of each of these completions, its first, that are written with their advantage,
    entropy and log-probabilities, by a forward pass over these completions; 0 writes none."""
    max_nonfinite: int = 5
    """Updates in a row that may be skipped for a loss or gradient that is not finite."""
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
    """Where metrics go besides metrics.jsonl."""

    faults: bool = False
    """Sample each process once a second into faults/ of the run folder, for python -m jrl.faults
    watch, and raise an alarm when one stands out from the others. The numbers stay the same."""
    faults_continuity: float = 240.0
    """Seconds for which a process has to stand out before it is named."""
    faults_port: int | None = None
    """Serve the newest sample to Prometheus on this port of localhost, plus the number of the
    process; None serves nothing."""
    on_fault: str | None = None
    """A shell command for each alarm; its environment has JRL_FAULT_MACHINE, JRL_FAULT_METRIC,
    JRL_FAULT_START, JRL_FAULT_END (Unix times) and JRL_FAULT_LINE."""

    @property
    def checkpoint(self) -> str | None:
        """Directory of the model's public checkpoint; None for a preset."""
        return self.model.removeprefix("hf:") if self.model.startswith("hf:") else None

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
        check_least(self, POSITIVE_SETTINGS)
        check_range(self, ("warm_start_steps", "warm_start_learning_rate"), 0)
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must not be negative: 0 is the warm start alone.")
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
                f"rollout_devices={self.rollout_devices} would wait for the devices that learn, "
                "and those for them: give --max-staleness 1 or more, or leave it out."
            )
        for name in ("lora_alpha", "lora_targets", "lora_rank_stabilised"):
            if getattr(self, name) and self.lora_rank is None:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} changes nothing without adapters: give "
                    "--lora-rank, or leave it out."
                )
        check_rollout(self)
        if self.drift_alarm is not None and not 0 < self.drift_alarm < math.inf:
            raise ValueError(f"drift_alarm={self.drift_alarm} must be above 0 nats; None is off.")
        if not any(f"{kind}:" in self.task for kind in KINDS):
            for name, default in (("prompt", "prompt"), ("answer", "answer"), ("messages", None)):
                if getattr(self, f"{name}_field") != default:
                    raise ValueError(
                        f"{name}_field={getattr(self, f'{name}_field')!r} needs --task jsonl:FILE, "
                        f"not {self.task!r}: leave it out."
                    )
        if not 0 <= self.warm_start_accuracy <= 1:
            raise ValueError(f"warm_start_accuracy={self.warm_start_accuracy} must lie in 0..1.")
        if not 0 < self.faults_continuity < math.inf:
            raise ValueError(f"faults_continuity={self.faults_continuity} must be above 0 seconds.")
        for name in ("faults_port", "on_fault"):
            if getattr(self, name) is not None and not self.faults:
                raise ValueError(f"{name}={getattr(self, name)!r} needs --faults.")
        if self.faults_port is not None and not 0 < self.faults_port < 2**16:
            raise ValueError(f"faults_port={self.faults_port} must lie in 1..65535.")
