"""Flags of the supervised stage: those without effect there, and those with another meaning."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from jrl.config.run import RunConfig
from jrl.recipes import Recipe

IDLE_FIELDS = frozenset(
    {
        # Prompts, rewards and verifiers.
        *("overlong_prompts", "prompt_length", "answers"),
        *("reward", "reward_weights", "reward_seconds"),
        *("failed_reward", "shuffle_rewards", "verifiers", "unsafe_tools"),
        *("reward_correct", "reward_wrong"),
        # Sampling of training completions.
        *("slots", "max_staleness", "stale_cache", "rollout_layout", "rollout_devices"),
        *("rollout_engine", "rollout_split", "rollout_micro_batches", "sample_tokens"),
        *("rollout_m2n", "rollout_expert_slots", "rollout_replan"),
        *("drift_alarm", "prompts", "group_size", "mini_batch", "temperature", "top_k", "top_p"),
        *("dynamic_sampling", "max_generation_rounds", "overlong_filter"),
        # The mismatch of sampler and trainer, and the policy's loss.
        *("old_logprobs", "mismatch", "mismatch_denominator", "mismatch_level", "mismatch_low"),
        *("mismatch_high", "mismatch_mean", "rejection", "rejection_over", "rejection_low"),
        *("rejection_high", "router_replay", "clip_low", "clip_high", "clip_dual"),
        *("entropy_coef", "kl_coef"),
        *("warm_start_accuracy", "warm_start_steps", "warm_start_batch"),
        "warm_start_learning_rate",
    }
)
"""Fields of a run and of its recipe that have no effect here: they are no flags."""

DEFAULTS: Mapping[str, Any] = {"steps": 0, "warm_start_steps": 0}
"""Defaults of a run's fields that differ from those of reinforcement learning."""

HELP = {
    "task": "The conversations: jsonl:PATH, parquet:PATH or dataset:DIR (of save_to_disk), each "
    "with messages, or with a prompt and a completion.",
    "held_out": (
        "Held-out conversations to measure the loss on: a share of them (0.05), a number (200), "
        "or a file of other conversations. None is one in ten."
    ),
    "steps": "Training steps, each one optimizer step on a batch. 0 takes as many as --epochs.",
    "model": "A preset (tiny, tiny-dense or small), or hf:DIR for a public checkpoint, its weights "
    "and its tokenizer.",
    "weights": "Run folder whose latest policy to start from.",
    "chat_template": 'Chat template for conversations: "checkpoint" is the one that comes with '
    'the tokenizer, if there is one; "none" uses none; anything else is the path of a Jinja file.',
    "prompt_field": "Field of a record with the prompt, a text, if the record has no messages.",
    "answer_field": 'Field with the completion, if the record has no "completion".',
    "messages_field": "Field with the conversation, a list of {role, content}; None takes "
    '"messages" where a record has no prompt.',
    "packing": (
        "Sequence packing: conversations are concatenated, so that no padding is computed and the "
        "LM head sees only loss tokens. Not supported with pp. None packs where it is supported."
    ),
    "response_length": (
        "Maximum tokens of the sample completions in samples.jsonl; None is a quarter above the "
        "longest held-out answer, and at least 16 tokens."
    ),
    "eval_every": "Steps between evaluations on held-out conversations.",
    "eval_prompts": "Held-out conversations per evaluation, or all if there are fewer.",
    "checkpoint_every": "Steps between checkpoints. The first is taken before the first step, the "
    "last at the end.",
    "samples_every": "Steps between completions of held-out prompts written to samples.jsonl.",
    "aggregation": (
        "Aggregation of token losses: token-mean weighs all loss tokens equally, the others each "
        "conversation."
    ),
    "capacity_factor": (
        "Capacity of an expert in training, as a multiple of its tokens under balanced routing; "
        "None is the network's own, mostly unlimited (dropless)."
    ),
}
"""Help texts of flags that mean something else here, or more."""


def default_run(kind: type[Recipe]) -> RunConfig:
    """Default run settings of a command line with this recipe."""
    return RunConfig(**DEFAULTS) if kind.supervised else RunConfig()


def idle_fields(kind: type[Recipe]) -> frozenset[str]:
    """Fields without effect in this recipe, which are no flags of it."""
    return IDLE_FIELDS if kind.supervised else frozenset()


def check_idle(run: RunConfig, recipe: Recipe) -> None:
    """Rejects values in a settings file for fields that have no effect.

    Raises:
      ValueError: naming the field.
    """
    kind = type(recipe)
    for record, defaults in ((run, default_run(kind)), (recipe, kind)):
        for field in fields(record):
            if field.name not in idle_fields(kind):
                continue
            value = getattr(record, field.name)
            default = field.default if defaults is kind else getattr(defaults, field.name)
            if default is not MISSING and value != default:
                raise ValueError(
                    f"{field.name}={value!r} changes nothing in {recipe.name}: leave it out."
                )


def drop_idle(config: Mapping[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """Contents of config.json without the fields that are no flags."""
    groups = {name: v for name, v in config.items() if isinstance(v, Mapping)}
    remaining = {
        name: {key: value for key, value in group.items() if key not in idle_fields(kind)}
        for name, group in groups.items()
    }
    return {**config, **remaining}
