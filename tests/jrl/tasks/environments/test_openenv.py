"""Adapter of OpenEnv clients: observation, reward and end of a step."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from jrl.tasks.environments.definition import Environment
from jrl.tasks.environments.openenv import OpenEnvironment
from jrl.tasks.workers.user_code import Conversations


@dataclass
class Result:
    """As OpenEnv's `StepResult`."""

    observation: SimpleNamespace
    reward: float | None
    done: bool


class Client:
    """Counts down from its seed by the number in an action."""

    def __init__(self):
        self.left, self.closed = 0, False

    def reset(self, seed):
        self.left = seed
        return Result(SimpleNamespace(left=seed), None, False)

    def step(self, action):
        self.left -= action
        return Result(SimpleNamespace(left=self.left), 0.5, self.left <= 0)

    def close(self):
        self.closed = True


class AsyncClient:
    """`Client` with async methods."""

    def __init__(self):
        self._client = Client()

    @property
    def closed(self):
        return self._client.closed

    async def reset(self, seed):
        return self._client.reset(seed)

    async def step(self, action):
        return self._client.step(action)

    async def close(self):
        self._client.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_open_environment_episode(kind):
    clients = []

    def make(fields):
        clients.append(kind())
        text = "{0.left} left".format
        made = OpenEnvironment(clients[-1], action=int, text=text, seed=fields["seed"])
        assert isinstance(made, Environment)
        return made

    loop = asyncio.new_event_loop()
    conversations = Conversations(make, loop.run_until_complete)
    assert conversations.opening_messages({"seed": 5}) == [["user", "5 left"]]
    said = ["2"]
    first = conversations.answer(1, {"seed": 5}, said)
    assert first == {"messages": [["user", "3 left"]], "reward": 0.5, "done": False}
    said.append("many")
    wrong = conversations.answer(1, {"seed": 5}, said)
    assert wrong["messages"][0][1].startswith("error: invalid literal") and not wrong["done"]
    said.append("3")
    assert conversations.answer(1, {"seed": 5}, said)["done"]
    assert all(client.closed for client in clients) and len(clients) == 2
    loop.close()


def test_open_environment_close_is_optional():
    reset = Client().reset
    clients = [SimpleNamespace(reset=reset), SimpleNamespace(reset=reset, close=lambda: 1 / 0)]
    loop = asyncio.new_event_loop()
    bare, other = (
        Conversations(
            lambda _, client=client: OpenEnvironment(client, action=int, seed=3),
            loop.run_until_complete,
        )
        for client in clients
    )
    assert bare.opening_messages({}) == [["user", "namespace(left=3)"]]
    with pytest.raises(ZeroDivisionError):
        other.opening_messages({})
    loop.close()
