"""Settings of a task: its prompts, their reference answers and their rewards."""

from dataclasses import dataclass
from typing import Literal

from jrl.setting import setting
from jrl.tasks.data.files import KINDS
from jrl.tasks.data.split import parse_heldout
from jrl.tasks.rewards import RewardSettings


@dataclass(frozen=True)
class TaskSettings:
    """Task, held-out prompts, answers and rewards."""

    task: str = setting(
        "sort",
        sft="The conversations: jsonl:PATH, csv:PATH, parquet:PATH or dataset:DIR, each "
        "with messages, or with a prompt and a completion.",
    )
    """A built-in task, "jsonl:PATH", "csv:PATH", "parquet:PATH", "dataset:DIR" (of save_to_disk),
    "gym:NAME" or "gym:NAME,OPTION=VALUE", a custom one as "path/to/file.py:make" or
    "package.module:make", or a weighted mixture, for example "3 sort + 1 countdown"."""
    held_out: str | None = setting(
        None,
        of_task=True,
        sft="Held-out conversations to measure the loss on: a share of them (0.05), a number "
        "(200), or a file of other conversations. None is one in ten.",
    )
    """Held-out prompts to evaluate on: a share of them (for example 0.05), a number (200), or a
    file of other prompts. None is one in ten."""
    overlong_prompts: Literal["drop", "refuse"] = setting("drop", sft=False)
    """Prompts of a list with more tokens than a given prompt_length: drop and count them, or refuse
    to start."""
    answers: Literal["final", "evaluated"] = setting("final", before="evaluated", sft=False)
    """Required form of answers to a file's prompts: "final", a value in final form if the reference
    answer is one (for example 42, not 17 + 25); "evaluated", any expression of the same value."""
    unreadable_answers: Literal["drop", "refuse"] = setting("drop", sft=False)
    """Records of a file whose answer cannot be checked: drop and count them, up to a tenth of the
    file, or refuse to start."""
    reward: tuple[str, ...] = setting((), of_task=True, sft=False)
    """Reward functions, path/to/file.py:name or package.module:name, instead of the task's verifier
    or reward; "task" among them is that one."""
    reward_weights: tuple[str, ...] = setting((), of_task=True, sft=False)
    """NAME=NUMBER, for example accuracy=0.8: weights of the rewards, or of the components of one
    that returns several, in their sum; 1 by default."""
    reward_seconds: float = setting(5.0, sft=False)
    """Timeout of one call of a custom reward, in seconds."""
    unsafe_tools: bool = setting(False, changeable=True, sft=False)
    """Run code that the policy writes as your user, if it cannot be run in a sandbox. Without
    it, a task with such a tool raises an error on a machine without bubblewrap."""
    failed_reward: float = setting(0.0, sft=False)
    """The score of a completion whose reward took longer, raised an exception, or gave no finite
    number."""
    shuffle_rewards: bool = setting(False, sft=False)
    """Control experiment: rewards are permuted over the batch, so that they carry no
    information."""
    verifiers: int | None = setting(None, minimum=1, changeable=True, sft=False)
    """Processes that check answers or run rewards; None is one per processor core, up to 8."""
    prompt_field: str = setting(
        "prompt",
        of_task=True,
        sft="Field of a record with the prompt, a text, if the record has no messages.",
    )
    """Field of a JSON line with the prompt, a text or a list of messages; with a dot, a nested
    field, for example "extra.prompt"."""
    answer_field: str = setting(
        "answer",
        of_task=True,
        sft='Field with the completion, if the record has no "completion".',
    )
    """Field with the reference answer, a text or a number: "answer", or
    "reward_model.ground_truth"."""
    messages_field: str | None = setting(
        None,
        of_task=True,
        sft="Field with the conversation, a list of {role, content}; None takes "
        '"messages" where a record has no prompt.',
    )
    """Field with the prompt as a conversation, a list of {"role": ..., "content": ...}, instead of
    the prompt; None takes "messages" if a line has no prompt."""

    @property
    def rewards(self) -> RewardSettings:
        """Reward settings: functions, weights, time limit and the score of a failed reward."""
        return RewardSettings(
            self.reward, self.reward_weights, self.reward_seconds, self.failed_reward
        )

    def __post_init__(self):
        _ = self.rewards
        parse_heldout(self.held_out)
        if any(f"{kind}:" in self.task for kind in KINDS):
            return
        for name in ("prompt_field", "answer_field", "messages_field"):
            if (value := getattr(self, name)) != getattr(TaskSettings, name):
                raise ValueError(
                    f"{name}={value!r} needs --task jsonl:FILE, not {self.task!r}: leave it out."
                )
