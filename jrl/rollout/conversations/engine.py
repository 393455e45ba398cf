"""Rollout engine of multi-turn conversations: environments answer, and rows continue."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import broadcast_from_main, is_main_process
from jrl.report.warnings import FewWarnings
from jrl.rollout.conversations.turns import Turns
from jrl.rollout.decoding.programs.slots import Pool
from jrl.rollout.decoding.protocol import RolloutEngine
from jrl.rollout.decoding.requests import Request, Sampled, Trajectory
from jrl.rollout.decoding.usage import Usage
from jrl.rollout.sampling import Sampling
from jrl.tasks import Example, Task
from jrl.tasks.environments.host import Host, Reply
from jrl.tasks.parts import environments_of
from jrl.text.conversation import answer_ids, environment_messages, message_of
from jrl.text.prompt_format import PromptFormat
from moe.weights import Transformer
from sharding.folding import FoldedMesh


@dataclass(frozen=True)
class _Asked:
    """Row that waits for the answer of its environment.

    Attributes:
      trajectory: up to the end of the policy's turn.
      turns: with that turn's message.
      reply: the pending answer; None in processes other than the first.
    """

    trajectory: Trajectory
    turns: Turns
    reply: "Future[Reply] | None"


class ConversationEngine:
    """Multi-turn responses, on top of a single-turn engine.

    Where a stop token ends a turn of a request with `Request.turns`, or the limit of a turn
    truncates it, its environment is called; the row's slot is free from then on, for waiting
    requests. With the answer appended, and the end-of-turn tokens before that if the turn was
    truncated, the row is admitted again, its log-probabilities kept, and continues with the next
    turn. Whatever the timing, a row's tokens depend on the weights, the seed, its prompt and sample
    ids and the tokens so far. The limit of a response bounds the tokens of policy and environment.

    Args:
      engine: that decodes.
      task: provides the environments.
      format: converts messages to tokens.
      max_turns: maximum turns of the policy; None leaves the end to the environment.
      turn_length: maximum tokens of one turn; None leaves it to the limit of the response.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        task: Task,
        format: PromptFormat,
        max_turns: int | None = None,
        turn_length: int | None = None,
    ):
        self._engine, self._task, self._format = engine, task, format
        self._max_turns, self._turn_length, self._sampling = max_turns, turn_length, Sampling()
        self._asked: list[_Asked] = []
        self._numbers: dict[tuple[int, int], tuple[int, Example]] = {}
        self._next = 0
        self._warnings = FewWarnings()

    @property
    def mesh(self) -> FoldedMesh:
        return self._engine.mesh

    @property
    def num_idle(self) -> int:
        # Slots are reserved for rows that wait for an answer.
        return max(0, self._engine.num_idle - len(self._asked))

    @property
    def usage(self) -> Usage:
        return self._engine.usage

    def load(
        self,
        weights: Transformer[Array],
        version: int,
        entropy: EntropyStatistics[Array] | None = None,
    ) -> None:
        self._engine.load(weights, version, entropy)

    def release(self) -> None:
        assert not self._asked, "conversations are under way"
        self._engine.release()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._sampling = sampling
        self._engine.submit([self._bounded(request) for request in requests], sampling)

    def _bounded(self, request: Request) -> Request:
        """Copy of the request with the length limit of its next turn."""
        turns = request.turns
        if turns is None or self._turn_length is None:
            return request
        whole = request.max_new_tokens if turns.limit is None else turns.limit
        own = min(whole, turns.begin + self._turn_length)
        return request._replace(max_new_tokens=own, turns=replace(turns, limit=whole))

    def poll(self, alone: bool = False) -> list[Trajectory]:
        # The inner engine is never polled `alone`: rows come back when environments have answered.
        done: list[Trajectory] = []
        while not done:
            done = self._go_on(self._replies(block=False))
            ended = self._engine.poll()
            if not ended and not self._asked:
                break
            done += self._ask(ended)
            if not ended:
                # Nothing is decoded: only answers are missing.
                done += self._go_on(self._replies(block=True))
        return done

    def cancel(self, prompts: Sequence[int]) -> None:
        dropped = set(prompts)
        self._engine.cancel(prompts)
        self._asked = [a for a in self._asked if a.trajectory.request.prompt not in dropped]
        for row in [row for row in self._numbers if row[0] in dropped]:
            number, example = self._numbers.pop(row)
            self._host(example).end(number)

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        raise RuntimeError("conversations cannot be taken back: their environments are no state")

    def take_pool(self) -> Pool[Array]:
        return self._engine.take_pool()

    def give_pool(self, pool: Pool[Array]) -> None:
        self._engine.give_pool(pool)

    def _ask(self, ended: Sequence[Trajectory]) -> list[Trajectory]:
        """Calls the environments of rows whose turn has ended; returns finished trajectories."""
        done = []
        for trajectory in ended:
            turns = trajectory.request.turns
            if turns is None:
                done.append(trajectory)
                continue
            begin = turns.begin
            before = [*trajectory.request.tokens.tolist(), *trajectory.tokens[:begin].tolist()]
            message = message_of(self._format, trajectory.tokens[begin:], before)
            turn = len(turns.said)
            turns = replace(turns, messages=(*turns.messages, ("assistant", message)))
            if trajectory.finish != "stop":
                if trajectory.length >= _whole(trajectory.request):
                    # The response limit truncated the turn: the environment does not answer it.
                    done.append(self._over(trajectory, turns))
                    continue
                turns = replace(turns, cut=(*turns.cut, turn))
            row, reply = _row(trajectory), None
            if row not in self._numbers:
                self._numbers[row] = self._next, turns.example
                self._next += 1
            if is_main_process():
                number, example = self._numbers[row]
                said = environment_messages(self._format, example, turns.said, turns.cut)
                reply = self._host(example).say(number, example, said)
            self._asked.append(_Asked(trajectory, turns, reply))
        return done

    def _replies(self, *, block: bool) -> list[tuple[_Asked, Reply]]:
        """Removes and returns the answers that have arrived, at least one with `block`; the first
        process broadcasts them to all."""
        if not self._asked:
            return []
        found: list[Any] = []
        if is_main_process():
            futures = [asked.reply for asked in self._asked if asked.reply is not None]
            if block:
                wait(futures, return_when=FIRST_COMPLETED)
            done = [place for place, future in enumerate(futures) if future.done()]
            found = [[place, list(futures[place].result())] for place in done]
        came = {
            place: Reply(tuple((role, text) for role, text in messages), *rest)
            for place, (messages, *rest) in broadcast_from_main(found)
        }
        taken = [(self._asked[place], reply) for place, reply in came.items()]
        self._asked = [asked for place, asked in enumerate(self._asked) if place not in came]
        # Slots are assigned in the order of prompts and samples.
        return sorted(taken, key=lambda each: _row(each[0].trajectory))

    def _go_on(self, replies: Sequence[tuple[_Asked, Reply]]) -> list[Trajectory]:
        """Submits answered rows to the engine again; returns finished trajectories."""
        done, going = list[Trajectory](), list[tuple[Trajectory, Turns, np.ndarray]]()
        for asked, reply in replies:
            trajectory, turns, length = asked.trajectory, asked.turns, asked.trajectory.length
            if reply.failure is not None:
                done.append(self._over(trajectory, turns, failure=reply.failure))
                continue
            rewards = (*turns.rewards, (length - 1, reply.reward))
            before = turns.messages
            turns = replace(turns, rewards=rewards, messages=(*before, *reply.messages))
            if reply.done:
                done.append(self._over(trajectory, turns))
                continue
            if self._max_turns is not None and len(turns.said) >= self._max_turns:
                done.append(self._over(trajectory, replace(turns, turn_limit=True)))
                continue
            ended = len(turns.said) - 1 not in turns.cut
            try:
                after = answer_ids(self._format, turns.example, before, reply.messages, ended=ended)
            except ValueError as error:
                # An invalid answer, or one that the template rejects, must not end the run.
                self._warn(f"{error}")
                done.append(self._over(trajectory, turns, failure="invalid"))
                continue
            end = length + len(after)
            if end >= _whole(trajectory.request):
                # No token would be left for the policy.
                done.append(self._over(replace(trajectory, finish="length"), turns))
                continue
            turns = replace(turns, answers=(*turns.answers, (length, end)))
            going.append((trajectory, turns, np.array(after, np.int32)))
        requests = [
            trajectory.request._replace(turns=turns, sampled=_answered(trajectory.sampled, after))
            for trajectory, turns, after in going
        ]
        if requests:
            self._engine.submit([self._bounded(each) for each in requests], self._sampling)
        return done

    def _over(self, trajectory: Trajectory, turns: Turns, failure: str | None = None) -> Trajectory:
        """Finishes a conversation: ends its environment, and adds the verdict to the trajectory."""
        host, known = self._host(turns.example), self._numbers.pop(_row(trajectory), None)
        if known is not None and is_main_process():
            host.end(known[0])
        verdict = host.scoring.verdict([reward for _, reward in turns.rewards], failure)
        whole, turns = _whole(trajectory.request), replace(turns, verdict=verdict)
        request = trajectory.request._replace(max_new_tokens=whole, turns=turns)
        return replace(trajectory, request=request)

    def _warn(self, message: str) -> None:
        self._warnings.warn(
            message,
            f"an answer of task={self._task.name} cannot be written ({message}); its "
            "conversation ends and counts under verifier/invalid",
        )

    def _host(self, example: Example) -> Host:
        host = environments_of(self._task, example)
        assert host is not None, f"task={self._task.name} has no environments"
        return host


def _row(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.request.prompt, trajectory.request.sample


def _whole(request: Request) -> int:
    """Length limit of the whole response, whatever that of its turn is."""
    turns = request.turns
    return request.max_new_tokens if turns is None or turns.limit is None else turns.limit


def _answered(sampled: Sampled, after: np.ndarray) -> Sampled:
    """Appends an environment's answer to a response, with log-probabilities of 0.

    The tokens of the answer have the version of the turn before them.
    """
    nothing = np.zeros(len(after), np.float32)
    choices = sampled.choices
    if choices is not None:
        # No record (`num_experts`): prefill routes these tokens when the row is admitted.
        shape = (len(after), *choices.shape[1:])
        choices = np.concatenate([choices, np.broadcast_to(choices[-1], shape)])
    return Sampled(
        tokens=np.concatenate([sampled.tokens, after]),
        behaviour_logprobs=np.concatenate([sampled.behaviour_logprobs, nothing]),
        old_logprobs=np.concatenate([sampled.old_logprobs, nothing]),
        versions=np.concatenate([sampled.versions, np.repeat(sampled.versions[-1:], len(after))]),
        choices=choices,
    )
