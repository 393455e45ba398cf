"""A service with an engine that says what it is told, and what stands before it."""

import asyncio
import time

import httpx
import numpy as np
from served import numbers

from jrl.rollout.decoding.engine import Engine
from jrl.rollout.decoding.packed_prompts import PromptScores
from jrl.rollout.decoding.requests import StreamChunk
from jrl.rollout.decoding.scheduling.scheduler import SlotScheduler
from jrl.rollout.decoding.slots import TopTokens
from jrl.serving.application import FrontEnd
from jrl.serving.metrics import Metrics
from jrl.serving.policy import ApiModel
from jrl.serving.service import Service
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train_characters("abcdefgh ")
SAYS = TOKENIZER.encode("bad cab ") * 20
LENGTH = 40


class Scripted(Engine):
    """An engine whose rows say the same letters, the first choice from the first of them on; rows
    stand still while it is `held`."""

    def __init__(self, slots, says=SAYS, stop_ids=()):
        self.says, self.stop_ids = says, stop_ids
        self.slots, self.ranks = slots, 1
        self.step_sizes, self.cache_sizes = [slots], [LENGTH // 2, LENGTH]
        self.waiting, self.sitting, self.loaded, self.held = [], {}, [], False
        self.error, self.asked, self.has_no_room = None, [], False
        self.scored, self.scheduler = [], SlotScheduler(slots, 1, LENGTH)

    records_choices = False
    scores_prompts, prefill_sizes = True, [(LENGTH // 2, 1), (LENGTH, 2)]
    num_idle = property(lambda self: max(0, self.slots - len(self.sitting) - len(self.waiting)))
    num_live = property(lambda self: len(self.sitting))
    busy = property(lambda self: bool(self.sitting or self.waiting))

    def load(self, weights, version):
        assert not self.busy, "a row would be written by two policies"
        if self.has_no_room:
            self.has_no_room, self.loaded = False, []
            raise RuntimeError("RESOURCE_EXHAUSTED: no room\nfor two policies")
        self.loaded.append(version)

    def submit(self, requests):
        self.waiting += requests
        self.asked += [(len(request.tokens), request.max_new_tokens) for request in requests]

    def cancel(self, prompts=(), rows=()):
        self.waiting = [
            r for r in self.waiting if (r.prompt, r.sample) not in rows and r.prompt not in prompts
        ]
        self.sitting = {
            key: row
            for key, row in self.sitting.items()
            if key not in set(rows) and key[0] not in prompts
        }

    def score(self, prompts, needs_top_tokens=False):
        """A token's log-probability is minus the sum of its id and the id before it, its rank
        is one more than its id, and the top tokens are the tokens in order."""
        assert not self.held
        self.scored.append([len(ids) for ids in prompts])
        scores = []
        for ids in prompts:
            top = None
            if needs_top_tokens:
                shape = len(ids) - 1, 3
                top = TopTokens(
                    np.broadcast_to(np.arange(4, 7), shape), np.broadcast_to([-1.0, -2, -3], shape)
                )
            logprobs = -(ids[1:] + ids[:-1] / 100).astype(np.float32)
            scores.append(PromptScores(logprobs, ids[1:] + 1, top))
        return scores

    def stream(self, window):
        if self.error is not None:
            raise self.error
        while self.waiting and len(self.sitting) < self.slots:
            request = self.waiting.pop(0)
            self.sitting[request.prompt, request.sample] = [request, 0]
        if self.held:
            time.sleep(0.001)
            return []
        written = []
        for key, row in list(self.sitting.items()):
            request, done = row
            count = min(window, request.max_new_tokens - done)
            ids = np.array(self.says[key[1] + done : key[1] + done + count], np.int32)
            row[1] += count
            finish = "length" if row[1] == request.max_new_tokens else None
            if ids[-1] in self.stop_ids:
                finish = "stop"
            written.append(
                StreamChunk(request, 0, ids, np.full(count, -0.5, np.float32), None, finish)
            )
            if finish:
                del self.sitting[key]
        return written


class Turns(Scripted):
    """An engine that says one text after another, from the first again after the last."""

    def __init__(self, tokenizer, texts):
        end = tokenizer.special_tokens["<|im_end|>"]
        self.texts = [[*tokenizer.encode_special(text), end] for text in texts]
        self.prompts = []
        super().__init__(1, self.texts[0], tokenizer.stop_ids)

    def submit(self, requests):
        self.says = self.texts[len(self.prompts) % len(self.texts)]
        self.prompts += [request.tokens.tolist() for request in requests]
        super().submit(requests)


class Newer:
    """A policy of which each version comes after the one before."""

    def __init__(self):
        self.version, self.error = 0, None

    def newest(self):
        return self.version

    def load(self):
        if self.error is not None:
            raise self.error
        return None, self.version


class House:
    """A service, its application, and a client of it."""

    def __init__(
        self,
        slots=2,
        queue=1,
        api_key=None,
        most_bytes=400,
        warm_up=False,
        served=None,
        engine=None,
        allowed_origins=(),
        allowed_hosts=(),
    ):
        self.engine, self.versions = engine or Scripted(slots), Newer()
        self.metrics = Metrics(slots)
        served = served or ApiModel("m", PromptFormat(TOKENIZER), LENGTH, 30, 0)
        self.service = Service(
            self.engine,
            served,
            self.versions,
            self.metrics,
            queue=queue,
            window=3,
        )
        self.front = FrontEnd(
            self.service,
            served,
            self.metrics,
            api_key=api_key,
            max_bytes=most_bytes,
            allowed_origins=allowed_origins,
            allowed_hosts=allowed_hosts,
        )
        self.application = self.front.application()
        self.service.start(warm_up)

    def run(self, scene, raises=True):
        """Plays a scene with a client, then ends the service; `raises` is whether an exception of
        the application reaches the client."""

        async def play():
            transport = httpx.ASGITransport(self.application, raise_app_exceptions=raises)
            url = "http://localhost"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                return await asyncio.wait_for(scene(client), 30)

        try:
            return asyncio.run(play())
        finally:
            self.engine.held = False
            self.service.close()
            self.service.join(5.0)
            assert self.service.ended

    def numbers(self):
        return numbers(self.metrics.text().decode())

    def number(self, name):
        return self.numbers()[name]


def asking(**more):
    return {"model": "m", "prompt": "ab", "max_tokens": 7, **more}


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what was waited for did not happen")
