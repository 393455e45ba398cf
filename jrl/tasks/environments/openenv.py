"""Adapter from OpenEnv environments to the environments of a task.

OpenEnv's clients call servers that run in containers, with the interface of Gymnasium: `reset`,
`step`, an observation, a reward, `done`. Only a client is needed here; the package comes from the
environment:

    class Blackjack:
        prompts = [{"seed": seed} for seed in range(500)]

        def environment(self, seed):
            client = BlackjackEnv(base_url="http://localhost:8000")
            return OpenEnvironment(client, action=Move, text=str, seed=seed)
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jrl.tasks.tools.tool import Stepped


class OpenEnvironment:
    """One episode of an OpenEnv client, or of anything with its `reset` and `step`.

    Its observations must depend on the seed and the actions only (`jrl.tasks.environments`).

    Args:
      client: connected or about to connect; its methods may be coroutines.
      action: makes the client's action from the policy's text. If it raises a ValueError, the
        message goes to the policy, which may try again.
      text: makes a text from the client's observation.
      seed: seed of `reset`; None passes none.
      most: number of invalid actions that ends the conversation.
    """

    def __init__(
        self,
        client: Any,
        *,
        action: Callable[[str], Any],
        text: Callable[[Any], str] = str,
        seed: int | None = None,
        most: int = 3,
    ):
        self._client, self._action, self._text = client, action, text
        self._seed, self._left = seed, most

    async def reset(self) -> list[dict[str, str]]:
        """The first observation, as the user's message."""
        seed = {} if self._seed is None else {"seed": self._seed}
        result = await _await_value(self._client.reset(**seed))
        return [self._message(result)]

    async def step(self, message: Mapping[str, str]) -> Stepped:
        """The next observation, its reward (0 if there is none), and whether the episode is
        over."""
        try:
            action = self._action(message["content"])
        except ValueError as error:
            self._left -= 1
            return [{"role": "user", "content": f"error: {error}"}], 0.0, self._left <= 0
        result = await _await_value(self._client.step(action))
        reward = 0.0 if result.reward is None else float(result.reward)
        return [self._message(result)], reward, bool(result.done)

    async def close(self) -> None:
        """Closes the client's connection, if it has a method for it."""
        if (close := getattr(self._client, "close", None)) is not None:
            await _await_value(close())

    def _message(self, result: Any) -> dict[str, str]:
        return {"role": "user", "content": self._text(result.observation)}


async def _await_value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
