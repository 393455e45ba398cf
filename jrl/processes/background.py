"""All-gather of host values for threads beside the main one, through JAX's coordination service.

A thread that enters a collective of devices beside the main thread would meet another collective
of the other processes. Here no device is used.
"""

import json
import threading
from typing import Any

import jax

from jrl.processes.coordinator import service_client

PATIENCE_SECONDS = 2
"""Seconds of one request for a value of another process; requests are repeated."""


class ProcessFailed(RuntimeError):
    """Failure of the same work in another process, or the end of the wait for it."""


class BackgroundGather:
    """All-gather of JSON values among the background threads of all processes.

    Every process makes one for the same work and calls it equally often. In a run of one process
    it returns its argument.

    Args:
      name: name of the work; the same in all processes, and used once in a program.

    Attributes:
      waits: event that is set as soon as this process waits for the others.
    """

    def __init__(self, name: str):
        self.waits = threading.Event()
        self._prefix, self._round = f"jrl/{name}", 0
        self._abandoned = threading.Event()
        self._process, self._count = jax.process_index(), jax.process_count()

    def __call__(self, value: Any) -> list[Any]:
        """Values of all processes, in the order of their ids.

        Raises:
          ProcessFailed: where the work of another process has failed, or was abandoned here.
        """
        if self._count == 1:
            return [value]
        self._publish({"value": value})
        self.waits.set()
        received = [self._receive(process) for process in range(self._count)]
        self._round += 1
        for process, message in enumerate(received):
            if "failed" in message:
                raise ProcessFailed(f"process {process}: {message['failed']}")
        return [message["value"] for message in received]

    def fail(self, reason: str) -> None:
        """Raises `ProcessFailed` in the other processes, which wait for this one."""
        if self._count > 1:
            self._publish({"failed": reason})

    def abandon(self) -> None:
        """Ends all waiting in this process, from any thread: another process may have ended."""
        self._abandoned.set()

    def clear(self) -> None:
        """Removes the values from the service, when all processes have received them."""
        if self._count > 1 and self._process == 0:
            service_client().key_value_delete(f"{self._prefix}/")

    def _key(self, process: int) -> str:
        return f"{self._prefix}/{self._round}/{process}"

    def _publish(self, message: dict[str, Any]) -> None:
        # A process that fails after it has published a value of this round is heard in the next.
        service_client().key_value_set(
            self._key(self._process), json.dumps(message), allow_overwrite=True
        )

    def _receive(self, process: int) -> dict[str, Any]:
        while True:
            try:
                text = service_client().blocking_key_value_get(
                    self._key(process), 1000 * PATIENCE_SECONDS
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessFailed(f"process {process} cannot be reached") from error
            else:
                return json.loads(text)
            if self._abandoned.is_set():
                raise ProcessFailed(f"process {process} was not waited for, as this one ends")
