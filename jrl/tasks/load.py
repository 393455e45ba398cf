"""Loading of a task from the name that a user gives to ``--task``."""

import difflib
import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jrl.tasks.answers.verdict import FINAL
from jrl.tasks.builtin import BUILT_IN, CONVERSATIONS, MIN_DIGITS, scratchpad_of
from jrl.tasks.data.fields import Fields
from jrl.tasks.data.files import DROP, KINDS, jsonl, kind_of, prompts_of
from jrl.tasks.data.prompt_list import PromptList, drop_repeated
from jrl.tasks.data.records import check_sendable, example_of
from jrl.tasks.data.split import HeldOut, parse_heldout
from jrl.tasks.definition import ProceduralTask
from jrl.tasks.environments.definition import (
    Conversational,
    EnvironmentPrompts,
    is_conversing,
    open_example,
    tools_of,
)
from jrl.tasks.environments.host import Host, LocalHost, Scoring, WorkerHost
from jrl.tasks.gym import gym
from jrl.tasks.mixture import Mixture
from jrl.tasks.references import (
    CodeReference,
    is_code_reference,
    is_module_reference,
    parse_reference,
    read_sources,
)
from jrl.tasks.rewards import TASK_REWARD, CustomReward, Rewarded, RewardSettings, parse_weights
from jrl.tasks.task import Example, Prompts, Task
from jrl.tasks.word_problems import NAME as WORD_PROBLEMS
from jrl.tasks.word_problems import WordProblems

OUTSIDE = (*KINDS, "gym")
MIXED = re.compile(r"\s\+\s")
WEIGHT = re.compile(r"(\d+(?:\.\d+)?)\s+(\S.*)", re.DOTALL)
FORMS = (
    "scratchpad:DIGITS, scratchpad:MIN-MAX, jsonl:PATH, csv:PATH, parquet:PATH, dataset:DIR, "
    "gym:NAME[,OPTION=VALUE...], a custom one as path/to/file.py:make, and weighted mixtures as "
    '"3 sort + 1 countdown"'
)


def load_task(
    spec: str,
    seed: int,
    fields: Fields | None = None,
    workers: int | None = None,
    *,
    held_out: str | None = None,
    rewards: RewardSettings | None = None,
    code: Mapping[str, bytes] | None = None,
    answers: str = FINAL,
    unreadable_answers: str = DROP,
    needs_rewards: bool = True,
) -> Task:
    """Makes the task that `spec` names.

    Args:
      spec: ``sort``, ``addition``, ``scratchpad``, ``countdown``, ``progression``, ``guess``,
        ``calculator``, ``word-problems``, one of `FORMS`, or a mixture, ``3 sort + 1 countdown``,
        in which a weight is 1 by default.
      seed: selects the stream of training prompts.
      fields: names of the fields of a file's lines; None is `Fields()`. Other tasks have none.
      workers: processes that check answers, if the task has some; None is one per processor
        core, up to 8.
      held_out: which prompts are held out (`jrl.tasks.data.split.parse_heldout`).
      rewards: settings of custom rewards; None is the task's own verifier or reward.
      code: contents of a run's copies of custom code (`custom_files`); None reads the originals.
      answers: required form of the answers of a file's prompts, one of
        `jrl.tasks.answers.verdict.RULES`.
      unreadable_answers: treatment of a file's records whose answer cannot be checked, one of
        `jrl.tasks.data.files.UNREADABLE`.
      needs_rewards: false if a file of prompts without answers will do, whose completions are not
        verified.

    Returns:
      A task; close it when it is no longer needed.

    Raises:
      ValueError: there is no such task, or it cannot be loaded.
    """
    settings = RewardSettings() if rewards is None else rewards
    heldout = parse_heldout(held_out)
    answered = answers, unreadable_answers, needs_rewards
    loader = _Loader(seed, fields, workers, heldout, settings, code, *answered)
    specs = _weighted_specs(spec)
    if len(specs) == 1:
        return loader.load(spec)
    with ExitStack() as stack:
        tasks = []
        for _, part in specs:
            tasks.append(loader.load(part))
            stack.callback(tasks[-1].close)
        mixture = Mixture(spec, tasks, [weight for weight, _ in specs])
        stack.pop_all()
    return mixture


def custom_files(
    spec: str, rewards: tuple[str, ...], code_path: Path | None = None
) -> dict[str, bytes]:
    """Contents of the files with the custom code of a task and its rewards, by name of the copy;
    arguments as of `read_sources`."""
    return read_sources(_custom_names(spec, rewards), code_path)


def custom_modules(spec: str, rewards: tuple[str, ...]) -> tuple[str, ...]:
    """References to modules with the custom code of a task and its rewards."""
    return tuple(filter(is_module_reference, _custom_names(spec, rewards)))


def _custom_names(spec: str, rewards: tuple[str, ...]) -> list[str]:
    """Names in a task and its rewards that are not the library's."""
    names = [part for _, part in _weighted_specs(spec) if _kind(part) is None]
    return [*names, *(text for text in rewards if text != TASK_REWARD)]


def listed_names(spec: str) -> frozenset[str]:
    """The files and custom tasks of a specification, as written there; built-in tasks, which
    generate their prompts, are omitted."""
    return frozenset(part for _, part in _weighted_specs(spec) if _kind(part) in (None, *KINDS))


def _weighted_specs(spec: str) -> list[tuple[float, str]]:
    """The weights and names of the tasks in a specification."""
    specs = []
    for part in map(str.strip, MIXED.split(spec)):
        match = WEIGHT.fullmatch(part)
        weight, name = (1.0, part) if match is None else (float(match[1]), match[2])
        if not weight > 0:
            raise ValueError(f"task: the weight of {part!r} must be above 0; leave the task out")
        specs.append((weight, name))
    return specs


def _kind(spec: str) -> str | None:
    """The kind of a built-in task; None for any other."""
    kind, _, rest = spec.partition(":")
    if spec in (*BUILT_IN, *CONVERSATIONS, WORD_PROBLEMS) or (kind in OUTSIDE and rest):
        return kind
    return "scratchpad" if kind == "scratchpad" and rest else None


@dataclass(frozen=True)
class _Loader:
    """Makes tasks with the same settings but different names."""

    seed: int
    fields: Fields | None
    workers: int | None
    heldout: HeldOut
    settings: RewardSettings
    code: Mapping[str, bytes] | None
    answers: str
    unreadable_answers: str
    needs_rewards: bool

    def load(self, spec: str) -> Task:
        kind, _, rest = spec.partition(":")
        settings = self.settings
        if _kind(spec) is None and is_code_reference(spec):
            return self._load_custom(spec)
        if spec in CONVERSATIONS:
            return self._load_environment(spec)
        if settings.weights and not settings.rewards:
            raise ValueError(
                f"reward_weights={' '.join(settings.weights)} needs --reward, or a "
                "custom task: leave it out."
            )
        verifies = TASK_REWARD in settings.rewards
        if not (settings.rewards or self.needs_rewards) and kind in KINDS and rest:
            prompts = prompts_of(kind, rest, self.seed, self.fields, self.heldout)
            if not any(example.answer for example in prompts.examples):
                return self._add_rewards(prompts)
        if settings.rewards and not verifies and kind in KINDS and rest:
            return self._add_rewards(prompts_of(kind, rest, self.seed, self.fields, self.heldout))
        task = self._load_library(spec)
        if not settings.rewards:
            return task
        return self._add_rewards(task, verifier=task if verifies else None)

    def _load_custom(self, spec: str) -> Task:
        code = parse_reference(spec, self.code)
        definition: Any = code.make()
        if is_conversing(definition):
            return self._load_conversing(spec, code, definition)
        prompts = custom_prompts(code, definition, self.seed, self.heldout)
        if self.settings.rewards and TASK_REWARD not in self.settings.rewards:
            return self._add_rewards(prompts)
        return self._add_rewards(prompts, code, definition)

    def _load_conversing(self, spec: str, code: CodeReference, definition: Any) -> Task:
        self._check_environment_rewards(spec)
        settings = self.settings
        host = WorkerHost(
            code,
            seconds=settings.seconds,
            workers=self.workers,
            scoring=Scoring(getattr(definition, "full_marks", 1.0), settings.failed),
        )
        with ExitStack() as stack:
            stack.callback(host.close)
            prompts = custom_prompts(code, definition, self.seed, self.heldout, host)
            stack.pop_all()
        return Conversational(prompts, host)

    def _check_environment_rewards(self, spec: str) -> None:
        if self.settings.rewards or self.settings.weights:
            raise ValueError(
                f"task={spec} is rewarded by its environment: leave out --reward and "
                "--reward-weights"
            )

    def _add_rewards(
        self,
        prompts: Prompts,
        custom: CodeReference | None = None,
        definition: Any = None,
        verifier: Task | None = None,
    ) -> Rewarded:
        """Adds the rewards of the settings, after the reward of a custom task."""
        settings = self.settings
        weights = {**getattr(definition, "weights", {}), **parse_weights(settings.weights)}
        with ExitStack() as stack:
            if isinstance(prompts, Task):
                stack.callback(prompts.close)
            texts = [text for text in settings.rewards if text != TASK_REWARD]
            codes = [parse_reference(text, self.code) for text in texts]
            rewards = []
            for code in codes if custom is None else [custom, *codes]:
                reward = CustomReward(
                    code, makes=code is custom, seconds=settings.seconds, workers=self.workers
                )
                stack.callback(reward.close)
                rewards.append(reward)
            rewarded = Rewarded(
                prompts,
                rewards,
                verifier,
                weights=weights,
                full_marks=getattr(definition, "full_marks", None),
                failed=settings.failed,
            )
            stack.pop_all()
        return rewarded

    def _load_library(self, spec: str) -> Task:
        kind, _, rest = spec.partition(":")
        seed, heldout = self.seed, self.heldout
        if spec in BUILT_IN:
            return _hold_out(BUILT_IN[spec](seed), heldout)
        if spec == WORD_PROBLEMS:
            heldout.check_no_file(spec, "draws")
            return WordProblems(seed, heldout)
        if kind == "scratchpad" and (lengths := re.fullmatch(r"(?:(\d+)-)?(\d+)", rest)):
            min_digits, max_digits = int(lengths[1] or MIN_DIGITS), int(lengths[2])
            return _hold_out(scratchpad_of(min_digits, max_digits, seed), heldout)
        if kind in KINDS and rest:
            return jsonl(
                rest,
                seed,
                fields=self.fields,
                workers=self.workers,
                kind=kind,
                heldout=heldout,
                answers=self.answers,
                unreadable=self.unreadable_answers,
            )
        if kind == "gym" and rest:
            name, options = _parse_options(spec, rest)
            return gym(name, seed, workers=self.workers, options=options, heldout=heldout)
        if spec and (path := Path(rest if kind == "csv" else spec)).exists():
            raise ValueError(f"task={spec!r} is a path without its kind: {_kind_hint(path)}")
        names = [*BUILT_IN, *CONVERSATIONS, WORD_PROBLEMS]
        near = difflib.get_close_matches(kind, [*names, *OUTSIDE], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"task={spec!r} is unknown: {hint}The tasks are {', '.join(names)}, {FORMS}"
        )

    def _load_environment(self, spec: str) -> Task:
        self._check_environment_rewards(spec)
        definition = CONVERSATIONS[spec]()
        host = LocalHost(definition, Scoring(failed=self.settings.failed))
        prompts = ProceduralTask(spec, self.seed, EnvironmentPrompts(spec, definition, host))
        return Conversational(_hold_out(prompts, self.heldout), host)


def _kind_hint(path: Path) -> str:
    """Advice on naming a file or folder as a task."""
    return f"give {path}:NAME" if path.suffix == ".py" else f"give {kind_of(path)}:{path}"


def _hold_out(task: ProceduralTask, heldout: HeldOut) -> ProceduralTask:
    heldout.check_no_file(task.name, "draws")
    return replace(task, heldout_size=heldout.count, heldout_share=heldout.generated_share)


def _parse_options(spec: str, text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of ``NAME,OPTION=VALUE,...``; values are JSON or texts."""
    name, *rest = re.split(r",(?=\w+=)", text)
    options: dict[str, Any] = {}
    for part in rest:
        option, _, value = part.partition("=")
        if option in options:
            raise ValueError(f"task={spec!r} has {option} twice: give each option once")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return name, options


SIZES = ("max_prompt_length", "max_response_length", "characters")
"""Attributes that bound the prompts and answers that a task can generate."""


def custom_prompts(
    reference: CodeReference, definition: Any, seed: int, heldout: HeldOut, host: Host | None = None
) -> Prompts:
    """The prompts of a custom task (`jrl.tasks.definition`).

    Args:
      definition: the custom task, made by the reference.
      seed: selects the stream of prompts, or the order of the training examples.
      host: host of its environments, for a multi-turn task.

    Raises:
      ValueError: if it is not a task, or one of its records is invalid.
    """
    name, stream = reference.text, reference.name
    judged = host is not None or callable(getattr(definition, "reward", None))
    if not hasattr(definition, "prompts") or not judged:
        raise ValueError(
            f"task={name} makes a {type(definition).__name__} without prompts or reward: give it "
            "prompts, a list of records, and reward(prompt, completion, **record) or "
            "environment(**record)"
        )
    if callable(definition.prompts):
        missing = [size for size in SIZES if not hasattr(definition, size)]
        if missing:
            raise ValueError(
                f"task={name} generates its prompts and does not define {', '.join(missing)}: set "
                "them to the lengths of the longest prompt and answer, and to all characters of "
                "both"
            )
        endless = definition if host is None else EnvironmentPrompts(name, definition, host)
        task = _hold_out(ProceduralTask(name, seed, endless, stream=stream), heldout)
        check_sendable(task.train(0), f"task={name}")
        return task
    tools = tools_of(definition)
    examples, repeated = _examples(definition.prompts, f"task={name}: prompts", host, tools)
    others, repeated_others = None, 0
    if (records := getattr(definition, "heldout", None)) is not None:
        if heldout != HeldOut() and not heldout.everything:
            raise ValueError(
                f"task={name} has its own held-out prompts, and --held-out selects others: leave "
                "it out"
            )
        others, repeated_others = _examples(records, f"task={name}: heldout", host, tools)
    return PromptList(
        name, examples, seed, heldout, others, stream, num_repeated=repeated + repeated_others
    )


def _examples(
    records: Any, location: str, host: Host | None, tools: tuple[str, ...]
) -> tuple[list[Example], int]:
    """The examples of records, with distinct prompts, and the number of records left out."""
    examples = []
    # Iterating a DataFrame or a mapping gives its column names, which would be taken as prompts.
    if isinstance(records, str | Mapping) or hasattr(records, "columns"):
        raise ValueError(
            f"{location} is a {type(records).__name__}: give a list of records, of a DataFrame its "
            "to_dict('records')"
        )
    for index, record in enumerate(records):
        where = f"{location}[{index}]"
        record = {"prompt": record} if isinstance(record, str) else record
        if host is None:
            example = example_of(record, where)
        else:
            example = open_example(record, where, host, tools)
        check_sendable(example, where)
        examples.append(example)
    return drop_repeated(examples)
