"""An engine whose responses are conversations: environments answer, and rows go on."""

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
    """A row whose environment has been asked.

    Attributes:
      trajectory: up to the end of the policy's turn.
      turns: with that turn's message.
      reply: to come; None in processes other than the first.
    """

    trajectory: Trajectory
    turns: Turns
    reply: "Future[Reply] | None"


class ConversationEngine:
    """Responses of several turns, by an engine that knows of none.

    Where a stop token ends a turn of a request with `Request.turns`, or the limit of a turn cuts
    it, its environment is asked; the row's slot is free from then on, for those that wait for one.
    With the answer after it, and the end of the turn before that where it was cut, the row is
    admitted again, its log-probabilities kept, and goes on with the next turn. Whatever takes
    how long, a row's tokens depend on the weights, the seed, the numbers of its prompt and sample
    and the tokens so far. The limit of a response is one of both sides' tokens together.

    Args:
      engine: that decodes.
      task: whose environments answer.
      format: how messages become tokens.
      max_turns: of the policy at most; None leaves the end to the environment.
      turn_length: tokens of one of them at most; None leaves it to the limit of the response.
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
        # Who waits for an answer comes back.
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
        """The request with the limit of the turn that is written next."""
        turns = request.turns
        if turns is None or self._turn_length is None:
            return request
        whole = request.max_new_tokens if turns.limit is None else turns.limit
        own = min(whole, turns.begin + self._turn_length)
        return request._replace(max_new_tokens=own, turns=replace(turns, limit=whole))

    def poll(self, alone: bool = False) -> list[Trajectory]:
        # Never `alone` further in: rows come back when environments have answered.
        done: list[Trajectory] = []
        while not done:
            done = self._go_on(self._replies(block=False))
            ended = self._engine.poll()
            if not ended and not self._asked:
                break
            done += self._ask(ended)
            if not ended:
                # Nothing is decoded: what is missing are answers.
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
        """Asks the environments of rows whose turn is over; gives those that end here."""
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
                    # The turn is not whole, and nobody answers it.
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
        """Answers that have come, at least one where it may `block`, of the first process in all;
        taken from those asked for."""
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
        # Seats are given in the order of prompts and samples.
        return sorted(taken, key=lambda each: _row(each[0].trajectory))

    def _go_on(self, replies: Sequence[tuple[_Asked, Reply]]) -> list[Trajectory]:
        """Hands rows that were answered back to the engine; gives those that are over."""
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
                # Of what others write a run does not die, nor of what a template makes of it.
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
        """The trajectory of a conversation that does not go on, with its verdict."""
        host, known = self._host(turns.example), self._numbers.pop(_row(trajectory), None)
        if known is not None and is_main_process():
            host.end(known[0])
        verdict = host.scoring.verdict([reward for _, reward in turns.rewards], failure)
        whole, turns = _whole(trajectory.request), replace(turns, verdict=verdict)
        request = trajectory.request._replace(max_new_tokens=whole, turns=turns)
        return replace(trajectory, request=request)

    def _warn(self, message: str) -> None:
        self._warnings.say(
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
    """The limit of a response, whatever that of its turn is."""
    turns = request.turns
    return request.max_new_tokens if turns is None or turns.limit is None else turns.limit


def _answered(sampled: Sampled, after: np.ndarray) -> Sampled:
    """A response so far with an answer behind it, of which nothing was sampled.

    Its tokens carry the version of the turn before them: they are no older than that, and no newer.
    """
    nothing = np.zeros(len(after), np.float32)
    choices = sampled.choices
    if choices is not None:
        # Past every expert: what is run when the row is admitted chooses for itself.
        shape = (len(after), *choices.shape[1:])
        choices = np.concatenate([choices, np.broadcast_to(choices[-1], shape)])
    return Sampled(
        tokens=np.concatenate([sampled.tokens, after]),
        behaviour_logprobs=np.concatenate([sampled.behaviour_logprobs, nothing]),
        old_logprobs=np.concatenate([sampled.old_logprobs, nothing]),
        versions=np.concatenate([sampled.versions, np.repeat(sampled.versions[-1:], len(after))]),
        choices=choices,
    )
