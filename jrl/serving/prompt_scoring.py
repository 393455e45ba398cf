"""Queue of prompts whose log-probabilities are requested: a pass over a few of them at each
scheduler step, so that choices in flight wait for one pass at most."""

from collections import deque
from collections.abc import Callable, Sequence

from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.packed_prompts import PromptScores
from jrl.serving.api_request import ApiRequest
from jrl.serving.responses import Job, PromptDelta
from jrl.serving.transcript import Decode, Detokenizer, TokenLogprobs

MAX_TOKENS_PER_PASS = 1024
"""Maximum prompt tokens of one pass, unless a single prompt is longer."""


class PromptScoring:
    """Scores the prompts of requests, first come first served, and sends the results.

    Only the scheduler thread calls this.

    Args:
      decode: the decoder of a request's tokens.
    """

    def __init__(self, engine: Engine, decode: Callable[[ApiRequest], Decode]):
        self._engine, self._decode = engine, decode
        self._prompts: deque[tuple[Job, int]] = deque()

    @property
    def busy(self) -> bool:
        """True if prompts are left to score."""
        return bool(self._prompts)

    def add(self, job: Job) -> None:
        """Queues the prompts of a request."""
        self._prompts += [(job, index) for index in range(len(job.prompts))]

    def drop(self, job: Job) -> bool:
        """Drops the prompts of a request whose client has left; true if there were any."""
        left = [prompt for prompt in self._prompts if prompt[0] is not job]
        was_queued = len(left) < len(self._prompts)
        self._prompts = deque(left)
        return was_queued

    def jobs(self) -> list[Job]:
        """Requests with prompts left to score."""
        return list({id(job): job for job, _ in self._prompts}.values())

    def step(self, version: int) -> list[Job]:
        """Runs one pass of a policy's version, sends its results, and returns the requests that are
        complete."""
        batch, num_tokens = list[tuple[Job, int]](), 0
        needs_top_tokens = self._prompts[0][0].request.num_prompt_top > 0
        while self._prompts:
            job, index = self._prompts[0]
            num_tokens += len(job.prompts[index])
            differs = (job.request.num_prompt_top > 0) != needs_top_tokens
            if batch and (differs or num_tokens > MAX_TOKENS_PER_PASS):
                break
            batch.append(self._prompts.popleft())
        prompts = [job.prompts[index] for job, index in batch]
        left = {id(job) for job, _ in self._prompts}
        done: dict[int, Job] = {}
        scored = self._engine.score(prompts, needs_top_tokens)
        for (job, index), scores in zip(batch, scored, strict=True):
            ids, num_top = job.prompts[index].tolist(), job.request.num_prompt_top
            logprobs = prompt_logprobs(self._decode(job.request), ids, scores, num_top)
            job.on_event(PromptDelta(index, logprobs, version))
            if id(job) not in left:
                done[id(job)] = job
        return list(done.values())


def prompt_logprobs(
    decode: Decode, ids: Sequence[int], scores: PromptScores, num_top: int
) -> list[TokenLogprobs]:
    """Tokens of a prompt with their log-probabilities and the `num_top` top tokens of each
    position; the first token has neither."""
    detokenizer, offset, entries = Detokenizer(decode), 0, list[TokenLogprobs]()
    for index, token in enumerate(ids):
        logprob, rank, top = None, None, ()
        if index:
            logprob, rank = float(scores.logprobs[index - 1]), int(scores.ranks[index - 1])
            if scores.top_tokens is not None:
                position = scores.top_tokens
                pairs = zip(position.tokens[index - 1], position.logprobs[index - 1], strict=True)
                top = tuple((int(each), float(value)) for each, value in pairs)[:num_top]
        entries.append(TokenLogprobs(token, logprob, top, offset, rank))
        offset += len(detokenizer.add([token]))
    return entries
