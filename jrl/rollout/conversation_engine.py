"""Rollout engine of multi-turn conversations: environments answer, and rows continue."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from jrl.losses import EntropyStatistics
from jrl.processes.agreement import broadcast_from_main, is_main_process
from jrl.processes.progress import ENVIRONMENT, phase
from jrl.report.warnings import FewWarnings
from jrl.rollout.conversation import Conversation
from jrl.rollout.decoding.protocol import RolloutEngine, Usage
from jrl.rollout.decoding.requests import Request, Sampled, Trajectory
from jrl.rollout.decoding.slots import SlotPool
from jrl.rollout.sampling import Sampling
from jrl.tasks import Example, Task
from jrl.tasks.environments.host import Host, Reply
from jrl.tasks.mixture import environments_of
from jrl.text.conversation import answer_ids, environment_messages, message_of
from jrl.text.prompt_format import PromptFormat
from moe.weights import Transformer
from sharding.folding import FoldedMesh


class _PendingReply(NamedTuple):
    """Row that waits for the answer of its environment: its trajectory up to the end of the
    policy's turn, the conversation with that turn's message, and the answer, which is None in
    processes other than the first."""

    trajectory: Trajectory
    conversation: Conversation
    reply: "Future[Reply] | None"


class ConversationEngine:
    """Multi-turn responses, on top of a single-turn engine.

    If a stop token ends a turn of a request with `Request.conversation`, or the limit of a turn
    truncates it, its environment is called; the row's slot is free from then on, for waiting
    requests. With the answer appended, and the end-of-turn tokens before that if the turn was
    truncated, the row is admitted again, its log-probabilities kept, and continues with the next
    turn. Whatever the timing, a row's tokens depend on the weights, the seed, its prompt and sample
    ids and the tokens so far. The limit of a response bounds the tokens of policy and environment.

    Args:
      engine: the single-turn engine that decodes.
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
        self._pending: list[_PendingReply] = []
        self._environment_ids: dict[tuple[int, int], tuple[int, Example]] = {}
        self._new_ids = count()
        self._warnings = FewWarnings()

    @property
    def mesh(self) -> FoldedMesh:
        return self._engine.mesh

    @property
    def num_idle(self) -> int:
        # Slots are reserved for rows that wait for an answer.
        return max(0, self._engine.num_idle - len(self._pending))

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
        assert not self._pending, "conversations are in flight"
        self._engine.release()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._sampling = sampling
        self._engine.submit([self._limit_turn(request) for request in requests], sampling)

    def _limit_turn(self, request: Request) -> Request:
        """Copy of the request with the length limit of its next turn."""
        conversation = request.conversation
        if conversation is None or self._turn_length is None:
            return request
        max_length = _max_response_length(request)
        turn_end = min(max_length, conversation.begin + self._turn_length)
        return request._replace(
            max_new_tokens=turn_end, conversation=replace(conversation, limit=max_length)
        )

    def poll(self, draining: bool = False) -> list[Trajectory]:
        # The inner engine is never polled with `draining`: rows return when environments answer.
        done: list[Trajectory] = []
        while not done:
            done = self._continue_rows(self._collect_replies(block=False))
            ended = self._engine.poll()
            if not ended and not self._pending:
                break
            done += self._call_environments(ended)
            if not ended:
                # Nothing is decoded: only answers are missing.
                done += self._continue_rows(self._collect_replies(block=True))
        return done

    def cancel(self, prompts: Sequence[int]) -> None:
        dropped = set(prompts)
        self._engine.cancel(prompts)
        self._pending = [a for a in self._pending if a.trajectory.request.prompt not in dropped]
        for row in [row for row in self._environment_ids if row[0] in dropped]:
            environment, example = self._environment_ids.pop(row)
            self._environment_host(example).end(environment)

    def suspend(self, keep_pool: bool = False) -> list[Request]:
        raise RuntimeError("conversations cannot be suspended: their environments cannot be saved")

    def take_pool(self) -> SlotPool[Array]:
        return self._engine.take_pool()

    def give_pool(self, pool: SlotPool[Array]) -> None:
        self._engine.give_pool(pool)

    def _call_environments(self, ended: Sequence[Trajectory]) -> list[Trajectory]:
        """Calls the environments of rows whose turn has ended; returns finished trajectories."""
        done = []
        for trajectory in ended:
            conversation = trajectory.request.conversation
            if conversation is None:
                done.append(trajectory)
                continue
            begin = conversation.begin
            before = [*trajectory.request.tokens.tolist(), *trajectory.tokens[:begin].tolist()]
            message = message_of(self._format, trajectory.tokens[begin:], before)
            turn = len(conversation.policy_messages)
            conversation = replace(
                conversation, messages=(*conversation.messages, ("assistant", message))
            )
            if trajectory.finish != "stop":
                if trajectory.length >= _max_response_length(trajectory.request):
                    # The response limit truncated the turn: the environment does not answer it.
                    done.append(self._finish_conversation(trajectory, conversation))
                    continue
                conversation = replace(
                    conversation, truncated_turns=(*conversation.truncated_turns, turn)
                )
            row, reply = _row_id(trajectory), None
            if row not in self._environment_ids:
                self._environment_ids[row] = next(self._new_ids), conversation.example
            if is_main_process():
                environment, example = self._environment_ids[row]
                messages = environment_messages(
                    self._format,
                    example,
                    conversation.policy_messages,
                    conversation.truncated_turns,
                )
                with phase(ENVIRONMENT):  # one of the library answers in this thread
                    reply = self._environment_host(example).say(environment, example, messages)
            self._pending.append(_PendingReply(trajectory, conversation, reply))
        return done

    def _collect_replies(self, *, block: bool) -> list[tuple[_PendingReply, Reply]]:
        """Removes and returns the answers that have arrived, at least one with `block`; the first
        process broadcasts them to all."""
        if not self._pending:
            return []
        finished: list[Any] = []
        if is_main_process():
            futures = [pending.reply for pending in self._pending if pending.reply is not None]
            if block:
                with phase(ENVIRONMENT):
                    wait(futures, return_when=FIRST_COMPLETED)
            indices = [index for index, future in enumerate(futures) if future.done()]
            finished = [[index, list(futures[index].result())] for index in indices]
        replies = {
            index: Reply(tuple((role, text) for role, text in messages), *rest)
            for index, (messages, *rest) in broadcast_from_main(finished)
        }
        answered = [(self._pending[index], reply) for index, reply in replies.items()]
        self._pending = [
            pending for index, pending in enumerate(self._pending) if index not in replies
        ]
        # Slots are assigned in the order of prompts and samples.
        return sorted(answered, key=lambda each: _row_id(each[0].trajectory))

    def _continue_rows(self, replies: Sequence[tuple[_PendingReply, Reply]]) -> list[Trajectory]:
        """Submits answered rows to the engine again; returns finished trajectories."""
        rows = [self._answer(pending, reply) for pending, reply in replies]
        requests = [self._limit_turn(row) for row in rows if isinstance(row, Request)]
        if requests:
            self._engine.submit(requests, self._sampling)
        return [row for row in rows if isinstance(row, Trajectory)]

    def _answer(self, pending: _PendingReply, reply: Reply) -> Request | Trajectory:
        """Request that continues a row after a reply; its trajectory if the conversation is
        over."""
        trajectory, conversation, _ = pending
        if reply.failure is not None:
            return self._finish_conversation(trajectory, conversation, reply.failure)
        length, before = trajectory.length, conversation.messages
        conversation = replace(
            conversation,
            rewards=(*conversation.rewards, (length - 1, reply.reward)),
            messages=(*before, *reply.messages),
        )
        if reply.done:
            return self._finish_conversation(trajectory, conversation)
        num_messages = len(conversation.policy_messages)
        if self._max_turns is not None and num_messages >= self._max_turns:
            return self._finish_conversation(trajectory, replace(conversation, turn_limit=True))
        ended = num_messages - 1 not in conversation.truncated_turns
        try:
            answer = answer_ids(
                self._format, conversation.example, before, reply.messages, ended=ended
            )
        except ValueError as error:
            # An invalid answer, or one that the template rejects, must not end the run.
            self._warnings.warn(
                f"{error}",
                f"an answer of task={self._task.name} cannot be encoded ({error}); its "
                "conversation ends and counts under verifier/invalid",
            )
            return self._finish_conversation(trajectory, conversation, "invalid")
        end = length + len(answer)
        if end >= _max_response_length(trajectory.request):
            # No token would be left for the policy.
            return self._finish_conversation(replace(trajectory, finish="length"), conversation)
        conversation = replace(conversation, answers=(*conversation.answers, (length, end)))
        sampled = _append_answer(trajectory.sampled, np.array(answer, np.int32))
        return trajectory.request._replace(conversation=conversation, sampled=sampled)

    def _finish_conversation(
        self, trajectory: Trajectory, conversation: Conversation, failure: str | None = None
    ) -> Trajectory:
        """Finishes a conversation: ends its environment, and adds the verdict to the trajectory."""
        host = self._environment_host(conversation.example)
        entry = self._environment_ids.pop(_row_id(trajectory), None)
        if entry is not None and is_main_process():
            host.end(entry[0])
        verdict = host.scoring.verdict([reward for _, reward in conversation.rewards], failure)
        max_length = _max_response_length(trajectory.request)
        conversation = replace(conversation, verdict=verdict)
        request = trajectory.request._replace(max_new_tokens=max_length, conversation=conversation)
        return replace(trajectory, request=request)

    def _environment_host(self, example: Example) -> Host:
        host = environments_of(self._task, example)
        assert host is not None, f"task={self._task.name} has no environments"
        return host


def _row_id(trajectory: Trajectory) -> tuple[int, int]:
    return trajectory.request.prompt, trajectory.request.sample


def _max_response_length(request: Request) -> int:
    """Length limit of the whole response, whatever the limit of its turn is."""
    conversation = request.conversation
    if conversation is None or conversation.limit is None:
        return request.max_new_tokens
    return conversation.limit


def _append_answer(sampled: Sampled, answer: np.ndarray) -> Sampled:
    """Appends an environment's answer to a response, with log-probabilities of 0 and the version of
    the turn before it."""
    after, choices = (0, len(answer)), sampled.choices
    if choices is not None:
        # No record (`num_experts`): prefill routes these tokens when the row is admitted.
        choices = np.pad(choices, (after, (0, 0), (0, 0)), "edge")
    return Sampled(
        tokens=np.concatenate([sampled.tokens, answer]),
        behaviour_logprobs=np.pad(sampled.behaviour_logprobs, after),
        old_logprobs=np.pad(sampled.old_logprobs, after),
        versions=np.pad(sampled.versions, after, "edge"),
        choices=choices,
    )
