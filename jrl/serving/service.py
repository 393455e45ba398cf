"""Scheduler thread that owns the engine: request queue, slots, generated text, policy version."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.requests import Request, StreamChunk
from jrl.rollout.sampling import RequestSampling
from jrl.serving.api.fields import ApiError
from jrl.serving.api_request import ApiRequest
from jrl.serving.metrics import CLIENT_GONE, Metrics, NoMetrics
from jrl.serving.policy import ApiModel, Versions
from jrl.serving.prompt_scoring import PromptScoring
from jrl.serving.responses import ChoiceDelta, Job
from jrl.serving.transcript import Transcript
from jrl.serving.turn_stream import TurnDelta, TurnStream
from jrl.serving.warm_up import WarmUp

SEED_BITS = 64
MAX_PROMPT_ID = 2**31 - 1


@dataclass
class _Choice:
    index: int
    transcript: Transcript
    turn: TurnStream | None
    """Reader of its text; None if it is no chat."""
    seen: float = 0.0
    """Time of its newest token."""


class Service:
    """Generation service: takes requests and emits deltas of their choices, from its own thread.

    Only this thread touches the engine and runs computations on the devices. Between two windows it
    drops requests of disconnected clients, admits queued requests first come first served, and
    emits the generated text. A later policy is loaded when no request is in flight: running
    requests are finished with the policy that they started with, and none is admitted meanwhile.

    Args:
      engine: engine of sufficient capacity; without weights yet.
      versions: source of the weights.
      metrics: that it counts in.
      queue: choices that may be queued in addition to those with a slot.
      window: tokens of a choice between two scheduler steps.
    """

    def __init__(
        self,
        engine: Engine,
        served: ApiModel,
        versions: Versions,
        metrics: Metrics | NoMetrics,
        *,
        queue: int,
        window: int,
    ):
        self._engine, self._served, self._versions = engine, served, versions
        self._metrics, self._queue, self._window = metrics, queue, window
        self.flush: Callable[[], None] = lambda: None
        """Called after each round of `Job.tell`, from the thread."""
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._loads: list[Future[int]] = []
        self.closing = False
        """True if it accepts no more requests."""
        self._jobs: dict[int, Job] = {}
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._candidate_id = 0
        self._num_unfinished = 0  # choices that have not finished, running or queued
        self._num_live = 0
        self._mean_seconds = 1.0  # moving average of a request's seconds
        self._weights: Any = None
        self.version = -1
        self.failure: BaseException | None = None
        """Exception that ended the thread, if any."""
        self._scoring = PromptScoring(engine, served.decoder)
        token, longest = served.format.tokenizer.eos_id, served.length - 1
        self._warm_up = WarmUp(
            engine, self._next_id, token, longest, window, served.default_adjustments
        )
        self._thread = threading.Thread(target=self._run, name="jrl engine", daemon=True)

    def start(self, warm_up: bool = True) -> None:
        """Loads the policy and starts to serve.

        Args:
          warm_up: true compiles the functions of short requests first, and the others while the
            server is idle; false compiles each when it is needed.

        Raises:
          ValueError: if there is no policy to load.
        """
        self._load_weights(*self._versions.load())
        if warm_up:
            self._warm_up.compile_common()
        else:
            self._warm_up.skip()
        self._thread.start()

    @property
    def num_uncompiled(self) -> int:
        """Warm-up trials that are left; they compile functions while the server is idle."""
        return self._warm_up.num_left

    def submit(self, job: Job) -> None:
        """Queues the choices of a request.

        Raises:
          ApiError: for more choices than slots and queue hold, where the queue is full, and where
            no more requests are accepted.
        """
        count, capacity = job.num_choices, self._engine.slots + self._queue
        if job.request.scores_prompts and not self._engine.scores_prompts:
            param = "echo" if job.request.output.prompt_logprobs is None else "prompt_logprobs"
            raise ApiError(
                400,
                f"{param} needs the log-probabilities of the prompt, which disaggregated devices "
                "do not compute: leave it out (or logprobs beside echo), or serve without "
                "--split.",
                param,
                "unsupported_parameter",
            )
        if count > capacity:
            raise ApiError(
                400,
                f"the request has {count} choices, n of each prompt, and this server takes "
                f"{capacity} at a time: request fewer, or serve with more --slots or a longer "
                "--queue.",
                code="too_many_choices",
            )
        with self._changed:
            self._check_open()
            if self._num_unfinished + count > capacity:
                num_before = self._num_unfinished - self._num_live + 1
                wait = self._mean_seconds * num_before / self._engine.slots
                raise ApiError(
                    429,
                    f"{self._num_unfinished} choices are decoded or queued already, of at most "
                    f"{capacity}, and {count} more do not fit: try again later, or serve with "
                    "more --slots or a longer --queue.",
                    code="queue_full",
                    retry_after=max(1, round(wait)),
                )
            self._num_unfinished += count
            self._waiting.append(job)
            self._count_waiting()
            self._changed.notify()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise ApiError(500, "the engine has failed: restart the server.")
        if self.closing:
            raise closing_error()

    def _count_waiting(self) -> None:
        self._metrics.queued.set(max(0, self._num_unfinished - self._num_live))

    def cancel(self, job: Job) -> None:
        """Cancels the request of a client that has left; no effect if it has finished."""
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify()

    def load(self) -> "Future[int]":
        """Loads the newest policy as soon as no request is in flight; a future of its version."""
        future: Future[int] = Future()
        with self._changed:
            self._check_open()
            self._loads.append(future)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Accepts no more requests; the thread ends when those it has are finished."""
        with self._changed:
            self.closing = True
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most this many seconds."""
        self._thread.join(timeout)

    @property
    def ended(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()

    @property
    def newest(self) -> int | None:
        """The newest version available to load."""
        return self._versions.newest()

    def _run(self) -> None:
        try:
            while self._step():
                self.flush()
        except BaseException as error:
            failure = ApiError(500, f"the engine has failed: {error}")
            with self._changed:
                self.failure = error
                loads, self._loads = self._loads, []
                jobs = (*self._jobs.values(), *self._scoring.jobs(), *self._waiting)
                jobs = {id(job): job for job in jobs}
                self._waiting.clear()
            for job in jobs.values():
                job.on_event(failure)
            for future in loads:
                if future.set_running_or_notify_cancel():
                    future.set_exception(failure)
        finally:
            self.flush()

    def _step(self) -> bool:
        """One scheduler step and one decoding window; False when there is nothing left to do."""
        engine = self._engine
        with self._changed:
            while not (self._waiting or self._cancelled or self._loads or self._busy):
                if self.closing:
                    return False
                if self._warm_up.num_left:
                    break
                self._changed.wait()
            cancelled, self._cancelled = self._cancelled, []
            idle = not (self._waiting or cancelled or self._loads or self._busy)
        if idle:
            self._warm_up.compile_next()
            return True
        for job in cancelled:
            self._remove(job)
        if self._loads and not self._busy:
            self._load()
        elif not self._loads:
            self._admit()
        if self._scoring.busy:
            for job in self._scoring.step(self.version):
                self._generate(job)
        if engine.busy:
            self._emit(engine.stream(self._window))
        with self._changed:
            self._num_live = engine.num_live
            self._count_waiting()
        self._metrics.live.set(engine.num_live)
        return True

    @property
    def _busy(self) -> bool:
        """True if any request is in flight."""
        return self._engine.busy or self._scoring.busy

    def _admit(self) -> None:
        while self._engine.num_idle:
            with self._changed:
                job = self._waiting.popleft() if self._waiting else None
            if job is None:
                return
            self._metrics.prompt_tokens.inc(job.prompt_tokens)
            if job.request.scores_prompts:
                self._scoring.add(job)
            else:
                self._generate(job)

    def _generate(self, job: Job) -> None:
        """Submits the choices of a request to the engine; choices of 0 tokens are complete."""
        request, grammar = job.request, job.grammar
        seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed % 2**SEED_BITS
        sampling = RequestSampling(
            request.temperature, request.top_p, seed, request.top_logprobs > 0
        )
        for prompt_index, (ids, limit) in enumerate(zip(job.prompts, job.limits, strict=True)):
            prompt_id = self._next_id()
            self._jobs[prompt_id] = job
            job.prompt_ids = (*job.prompt_ids, prompt_id)
            # Indices run over all prompts, so that a repeated prompt gets different completions.
            choices = range(prompt_index * request.n, (prompt_index + 1) * request.n)
            for index in choices:
                self._choices[prompt_id, index] = _Choice(
                    index,
                    self._served.transcript(request, ids.tolist()),
                    self._served.turn_stream(request, ids.tolist()),
                )
            if limit:
                adjustments = [self._served.adjustments(request, grammar) for _ in choices]
                requests = [
                    Request(prompt_id, index, ids, limit, sampling=sampling._replace(adjustments=a))
                    for index, a in zip(choices, adjustments, strict=True)
                ]
                self._engine.submit(requests)
        if not any(job.limits):
            for _, index in job.rows:
                job.on_event(
                    ChoiceDelta(index, TurnDelta("", ""), [], [], 0, "length", self.version)
                )
            for row in job.rows:
                self._finish(row, "length")

    def _next_id(self) -> int:
        """Next id that no prompt in flight has."""
        while self._candidate_id in self._jobs:
            self._candidate_id = (self._candidate_id + 1) % MAX_PROMPT_ID
        prompt_id, self._candidate_id = self._candidate_id, (self._candidate_id + 1) % MAX_PROMPT_ID
        return prompt_id

    def _emit(self, rows: Sequence[StreamChunk]) -> None:
        now, stopped = time.perf_counter(), list[tuple[int, int]]()
        for row in rows:
            key = row.request.prompt, row.request.sample
            job, choice = self._jobs[key[0]], self._choices[key]
            transcript, tokens_before = choice.transcript, choice.transcript.num_tokens
            top_logprobs = None
            if row.top_tokens is not None:
                pairs = zip(row.top_tokens.tokens, row.top_tokens.logprobs, strict=True)
                num_top = job.request.top_logprobs
                top_logprobs = [
                    [*zip(ids[:num_top].tolist(), values[:num_top].tolist(), strict=True)]
                    for ids, values in pairs
                ]
            finish: str | None = row.finish
            text, logprobs = transcript.add(
                row.tokens.tolist(), row.logprobs.tolist(), top_logprobs, finish is not None
            )
            if transcript.stopped:
                if finish is None:
                    stopped.append(key)
                finish = "stop"
            count, turn = transcript.num_tokens - tokens_before, TurnDelta(text, "")
            if choice.turn is not None:
                turn = choice.turn.add(text, finish is not None)
                finish = "tool_calls" if turn.calls else finish
            self._measure(job, choice, count, row.num_cached, now)
            constraint = row.request.constraint
            if finish is not None and constraint is not None and constraint.failure is not None:
                self._finish(key, "failed")
                job.on_event(grammar_failure(job.request, constraint.failure))
                continue
            experts = None
            if finish is not None:
                if job.request.tokens_only and self._engine.records_choices:
                    # The last token was not run.
                    end = len(row.request.tokens) + transcript.num_tokens - 1
                    experts = self._engine.expert_choices(row, end)
                self._finish(key, finish)
            delta = ChoiceDelta(
                choice.index,
                turn,
                logprobs,
                row.tokens[:count].tolist(),
                transcript.num_tokens,
                finish,
                self.version,
                experts,
                row.num_cached,
            )
            job.on_event(delta)
        self._engine.cancel(rows=stopped)

    def _measure(self, job: Job, choice: _Choice, count: int, num_cached: int, now: float) -> None:
        metrics = self._metrics
        metrics.generated_tokens.inc(count)
        if not choice.seen:
            metrics.first_token.observe(now - job.arrived)
            if not choice.index % job.request.n:
                metrics.cached_tokens.inc(num_cached)
        elif count:
            metrics.between_tokens.observe((now - choice.seen) / count)
        choice.seen = now

    def _finish(self, key: tuple[int, int], finish: str) -> None:
        """Removes a finished choice, and with the last one its request."""
        self._metrics.choices.labels(finish).inc()
        del self._choices[key]
        job = self._jobs[key[0]]
        job.num_left -= 1
        with self._changed:
            self._num_unfinished -= 1
        if not job.num_left:
            for prompt_id in job.prompt_ids:
                del self._jobs[prompt_id]
            self._mean_seconds += 0.1 * (time.perf_counter() - job.arrived - self._mean_seconds)

    def _remove(self, job: Job) -> None:
        """Frees the queue entry or slots of a request whose client has left."""
        with self._changed:
            is_waiting = job in self._waiting
            if is_waiting:
                self._waiting.remove(job)
            if is_waiting or self._scoring.drop(job):
                self._num_unfinished -= job.num_choices
        rows = [row for row in job.rows if row in self._choices]
        if rows:
            self._engine.cancel(rows=rows)
        for row in rows:
            self._finish(row, CLIENT_GONE)

    def _load(self) -> None:
        with self._changed:
            loads, self._loads = self._loads, []
        futures = [future for future in loads if future.set_running_or_notify_cancel()]
        try:
            self._load_weights(*self._versions.load())
        except Exception as error:  # a failed load must not affect running requests
            self._metrics.loads.labels("failed").inc()
            for future in futures:
                # Without its frames, which may hold arrays of the failed load.
                future.set_exception(error.with_traceback(None))
            return
        self._metrics.loads.labels("loaded").inc()
        for future in futures:
            future.set_result(self.version)

    def _load_weights(self, weights: Any, version: int) -> None:
        try:
            self._engine.load(weights, version)
        except Exception:
            if self.version >= 0:  # the engine may have released the old weights
                self._engine.load(self._weights, self.version)
            raise
        self._weights, self.version = weights, version
        self._metrics.version.set(version)


def grammar_failure(request: ApiRequest, reason: str) -> ApiError:
    """Error 400 for a grammar that exceeds a limit with what was generated."""
    param = "tools" if request.rule is None else request.rule.param
    return ApiError(
        400,
        f"{param} has a grammar that exceeds a limit with the text that was generated: {reason}. "
        "Make it smaller, for example with fewer optional properties.",
        param,
        "grammar_limit",
    )


def closing_error() -> ApiError:
    """Error 503 for requests that arrive after the server was asked to end."""
    return ApiError(503, "the server is shutting down: use another one.", code="server_ending")
