"""The thread that owns the engine: who waits, who is seated, what was written, which policy."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from jrl.rollout.decoding.requests import Request
from jrl.rollout.decoding.stream import Written
from jrl.rollout.row_sampling import OwnSampling
from jrl.serving.asked import Asked
from jrl.serving.engine import Engine
from jrl.serving.metrics import GONE, Metrics
from jrl.serving.policy import Served, Versions
from jrl.serving.refusal import Refused
from jrl.serving.transcript import Place, Transcript
from jrl.serving.warming import Warming

SEED_BITS = 64
HIGHEST_NUMBER = 2**31 - 1


@dataclass(frozen=True)
class Piece:
    """What a client learns of a choice at once.

    Attributes:
      index: of the choice.
      text: that can be shown.
      places: tokens that the text begins with, where they were asked for.
      num_tokens: sampled so far.
      finish: "stop" or "length" where it has ended.
      version: of the policy that writes it.
    """

    index: int
    text: str
    places: list[Place]
    num_tokens: int
    finish: str | None
    version: int


Event = Piece | Refused
"""What comes of a request: pieces, or why no more do."""


@dataclass
class _Choice:
    index: int
    transcript: Transcript
    seen: float = 0.0
    """When its newest token came."""


@dataclass(eq=False)
class Job:
    """A request between its arrival and its end.

    Attributes:
      asked: what is wanted.
      prompts: ids of each prompt.
      limits: tokens of a completion of each.
      tell: takes events, from the thread of the engine.
      arrived: when, as `time.perf_counter` has it.
      gone: whether its client has left.
      numbers: of its prompts in the engine, where it is seated.
    """

    asked: Asked
    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    tell: Callable[[Event], None]
    arrived: float = field(default_factory=time.perf_counter)
    gone: bool = False
    numbers: tuple[int, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.asked.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class Service:
    """Requests in, pieces of their choices out, from a thread of its own.

    The thread alone touches the engine and runs programs on the devices. Between two windows it
    drops whose client has left, seats who waits, first come first served, and tells what was
    written. A later policy is taken when nothing is under way: what runs is finished with the one
    that began it, and nobody is seated meanwhile.

    Args:
      engine: with room for what is served; without weights yet.
      served: the model.
      versions: where its weights come from.
      metrics: that are kept of it.
      queue: requests that may wait beside those whose choices have a free slot.
      window: tokens of a choice between two looks.
    """

    def __init__(
        self,
        engine: Engine,
        served: Served,
        versions: Versions,
        metrics: Metrics,
        *,
        queue: int,
        window: int,
    ):
        self._engine, self._served, self._versions = engine, served, versions
        self._metrics, self._queue, self._window = metrics, queue, window
        self.flush: Callable[[], None] = lambda: None
        """Called after each round of `Job.tell`, from the thread."""
        self._door = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._left: list[Job] = []
        self._loads: list[Future[int]] = []
        self.closing = False
        """Whether it takes nothing more."""
        self._jobs: dict[int, Job] = {}
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._number = 0
        self._idle = engine.slots
        self._pace = 1.0  # seconds that a request takes, about
        self.version = -1
        self.failure: BaseException | None = None
        """What ended the thread, if anything did but `close`."""
        token, longest = served.format.tokenizer.eos_id, served.length - 1
        self._warming = Warming(engine, self._next_number, token, longest, window)
        self._thread = threading.Thread(target=self._run, name="jrl engine", daemon=True)

    def start(self, warm_up: bool = True) -> None:
        """Loads the policy and begins to serve.

        Args:
          warm_up: whether the programs that short requests need are compiled first, and the others
            while nobody asks, or all of them as they are needed.

        Raises:
          ValueError: where there is no policy to load.
        """
        self._take(*self._versions.load())
        if warm_up:
            self._warming.make_common()
        else:
            self._warming.skip()
        self._thread.start()

    @property
    def num_uncompiled(self) -> int:
        """Sizes of programs that are compiled when nobody asks for anything."""
        return self._warming.num_left

    def submit(self, job: Job) -> None:
        """Asks for the choices of a request.

        Raises:
          Refused: where too many wait, and where nothing more is taken.
        """
        with self._door:
            if self.failure is not None:
                raise Refused(500, "the engine has failed: restart the server.")
            if self.closing:
                raise closing()
            free = max(0, self._idle - sum(job.num_choices for job in self._waiting))
            if not free and len(self._waiting) >= self._queue + self._idle:
                wait = self._pace * (len(self._waiting) + 1) / self._engine.slots
                raise Refused(
                    429,
                    f"{len(self._waiting)} requests wait already and no more may: try again later, "
                    "or serve with more --slots or a longer --queue.",
                    code="queue_full",
                    retry_after=max(1, round(wait)),
                )
            self._waiting.append(job)
            self._metrics.queued.set(len(self._waiting))
            self._door.notify()

    def leave(self, job: Job) -> None:
        """The client of a request has left; nothing happens where it has its end already."""
        with self._door:
            self._left.append(job)
            self._door.notify()

    def load(self) -> "Future[int]":
        """Takes the newest policy as soon as nothing is under way; the version that is served
        then."""
        future: Future[int] = Future()
        with self._door:
            if self.closing:
                raise closing()
            self._loads.append(future)
            self._door.notify()
        return future

    def close(self) -> None:
        """Takes nothing more; the thread ends when what it has is finished."""
        with self._door:
            self.closing = True
            self._door.notify()

    @property
    def ended(self) -> bool:
        """Whether the thread has come to its end."""
        return not self._thread.is_alive()

    @property
    def newest(self) -> int | None:
        """The newest version that there is to load."""
        return self._versions.newest()

    def _run(self) -> None:
        try:
            while self._round():
                self.flush()
        except BaseException as error:
            with self._door:
                self.failure = error
                everyone = {id(job): job for job in (*self._jobs.values(), *self._waiting)}
                self._waiting.clear()
            for job in everyone.values():
                job.tell(Refused(500, f"the engine has failed: {error}"))
        finally:
            for future in self._loads:
                future.cancel()
            self.flush()

    def _round(self) -> bool:
        """One look at the door and one window; False when there is nothing left to do."""
        engine = self._engine
        with self._door:
            while not (self._waiting or self._left or self._loads or engine.busy):
                if self.closing:
                    return False
                if self._warming.num_left:
                    break
                self._door.wait()
            left, self._left = self._left, []
            idle = not (self._waiting or left or self._loads or engine.busy)
        if idle:
            self._warming.make_one()
            return True
        for job in left:
            self._drop(job)
        if self._loads and not engine.busy:
            self._load()
        elif not self._loads:
            self._seat()
        if engine.busy:
            self._tell(engine.tick(self._window))
        with self._door:
            self._idle = engine.num_idle
        self._metrics.live.set(engine.num_live)
        return True

    def _seat(self) -> None:
        while self._engine.num_idle:
            with self._door:
                job = self._waiting.popleft() if self._waiting else None
                self._metrics.queued.set(len(self._waiting))
            if job is None:
                return
            if not job.gone:
                self._ask(job)
            with self._door:
                self._idle = self._engine.num_idle

    def _ask(self, job: Job) -> None:
        asked, tokenizer = job.asked, self._served.format.tokenizer
        self._metrics.prompt_tokens.inc(job.prompt_tokens)
        seed = secrets.randbits(SEED_BITS) if asked.seed is None else asked.seed % 2**SEED_BITS
        own = OwnSampling(asked.temperature, asked.top_p, seed, asked.likeliest > 0)
        numbers = list[int]()
        for place, (ids, limit) in enumerate(zip(job.prompts, job.limits, strict=True)):
            number = self._next_number()
            numbers.append(number)
            self._jobs[number] = job
            before = () if asked.chat else ids.tolist()
            # Numbered through, so that a prompt that comes twice is completed in two ways.
            choices = range(place * asked.n, (place + 1) * asked.n)
            for index in choices:
                text = Transcript(tokenizer, asked.stops, asked.logprobs, before)
                self._choices[number, index] = _Choice(index, text)
            self._engine.ask([Request(number, c, ids, limit, own=own) for c in choices])
        job.numbers = tuple(numbers)

    def _next_number(self) -> int:
        """One that no prompt under way has."""
        while self._number in self._jobs:
            self._number = (self._number + 1) % HIGHEST_NUMBER
        number, self._number = self._number, (self._number + 1) % HIGHEST_NUMBER
        return number

    def _tell(self, written: Sequence[Written]) -> None:
        now, stopped = time.perf_counter(), list[tuple[int, int]]()
        for row in written:
            key = row.request.prompt, row.request.sample
            job, choice = self._jobs[key[0]], self._choices[key]
            transcript, before = choice.transcript, choice.transcript.num_tokens
            likeliest = None
            if row.likeliest is not None:
                pairs = zip(row.likeliest.tokens, row.likeliest.logprobs, strict=True)
                wanted = job.asked.likeliest
                likeliest = [
                    [*zip(ids[:wanted].tolist(), values[:wanted].tolist(), strict=True)]
                    for ids, values in pairs
                ]
            finish: str | None = row.finish
            text, places = transcript.add(
                row.tokens.tolist(), row.logprobs.tolist(), likeliest, finish is not None
            )
            if transcript.stopped:
                if finish is None:
                    stopped.append(key)
                finish = "stop"
            self._measure(job, choice, transcript.num_tokens - before, now)
            if finish is not None:
                self._end(key, finish)
            piece = Piece(choice.index, text, places, transcript.num_tokens, finish, self.version)
            job.tell(piece)
        self._engine.drop(stopped)

    def _measure(self, job: Job, choice: _Choice, count: int, now: float) -> None:
        metrics = self._metrics
        metrics.generated_tokens.inc(count)
        if not choice.seen:
            metrics.first_token.observe(now - job.arrived)
        elif count:
            metrics.between_tokens.observe((now - choice.seen) / count)
        choice.seen = now

    def _end(self, key: tuple[int, int], finish: str) -> None:
        """A choice has come to its end, and with the last one the request."""
        number = key[0]
        self._metrics.choices.labels(finish).inc()
        del self._choices[key]
        job = self._jobs[number]
        if not any((number, index) in self._choices for index in range(job.num_choices)):
            del self._jobs[number]
            self._pace += 0.1 * (time.perf_counter() - job.arrived - self._pace)

    def _drop(self, job: Job) -> None:
        """Frees what a request has whose client left."""
        job.gone = True
        with self._door:
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.queued.set(len(self._waiting))
        choices = range(job.num_choices)
        rows = [(n, c) for n in job.numbers for c in choices if (n, c) in self._choices]
        if rows:
            self._engine.drop(rows)
        for key in rows:
            self._end(key, GONE)

    def _load(self) -> None:
        with self._door:
            futures, self._loads = self._loads, []
        try:
            self._take(*self._versions.load())
        except (ValueError, OSError) as error:
            self._metrics.loads.labels("failed").inc()
            for future in futures:
                future.set_exception(error)
            return
        self._metrics.loads.labels("loaded").inc()
        for future in futures:
            future.set_result(self.version)

    def _take(self, weights: object, version: int) -> None:
        self._engine.load(weights, version)
        self.version = version
        self._metrics.version.set(version)


def closing() -> Refused:
    """Said of anything that comes after the server was asked to end."""
    return Refused(503, "the server is ending: ask another one.", code="server_ending")
