"""Supervised fine-tuning (SFT): the stage of a run that trains on conversations, and its held-out
loss."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.processes.progress import heartbeat, phase
from jrl.recipes.base.batch import replicated
from jrl.recipes.base.recipe import POLICY
from jrl.rollout.sampler import Sampler
from jrl.tasks.data.chats import Chat, Chats
from jrl.trainer.evaluation.evaluate import heldout_examples
from jrl.trainer.learner.update import PolicyObjective
from jrl.trainer.outputs import Outputs, write_heldout_samples
from jrl.trainer.scoring import logprobs_and_argmax_of
from jrl.trainer.setup.chat_rows import ChatRows, training_chats
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import TrainState
from jrl.trainer.step import NonFinite, StepResult, update_rows
from jrl.trainer.summary import count_updates, summarise
from moe.weights import Transformer

MAX_ROWS_PER_BIN = 16
"""Maximum conversations of a bin: many are far shorter than the longest."""


class Supervised:
    """Supervised training stage on the conversations of a run.

    Args:
      setup: of a run whose recipe is supervised.
      sampler: for completions of held-out prompts, for display.

    Attributes:
      evaluated: records of completions in the last evaluation, which samples none.
    """

    evaluated: Sequence[dict[str, Any]] = ()

    def __init__(self, setup: Setup, sampler: Sampler):
        chats, rows = setup.task, setup.rows
        assert isinstance(chats, Chats) and rows is not None
        self._setup, self._sampler, self._networks = setup, sampler, setup.networks
        self._chats, self._rows = chats, rows
        examples = heldout_examples(chats, setup.run.eval_prompts)
        self._heldout = [chat for chat in examples if isinstance(chat, Chat)]

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], StepResult]:
        """Trains on the next conversations, which depend on the state and the dataset only."""
        networks, completions = self._networks, self._setup.recipe.completions
        # The position in the stream of conversations is the only data state of a checkpoint.
        seen = int(state.prompts_seen)
        chats = training_chats(self._chats, seen, completions)
        tokens, loss_tokens = self._rows.counts(chats)
        begin = time.perf_counter()
        pad_id = self._setup.tokenizer.pad_id
        batch = self._rows.batch(chats, completions, pad_id, networks.mesh)
        row_counts = (tokens, loss_tokens) if networks.packs else None
        with phase("update"):
            learner, outcome = update_rows(
                networks.policy, state.policy, batch, row_counts, max_rows_per_bin=MAX_ROWS_PER_BIN
            )
            # Reading them blocks until the update has finished, for the timing.
            history = [{"actor": to_host(outcome)}]
        seconds = time.perf_counter() - begin
        seen += completions
        state = replace(
            state.with_network(POLICY, learner),
            step=state.step + 1,
            prompts_seen=to_devices(np.asarray(seen, np.int32), replicated(networks.mesh)),
        )
        metrics = {
            **summarise(history),
            **count_updates(history),
            "actor/lr": float(networks.policy.optimizer.rate_at(int(learner.updates) - 1)),
            "training/tokens": float(tokens.sum()),
            "training/learned_tokens": float(loss_tokens.sum()),
            "training/epoch": seen / self._chats.num_train,
            "timing_s/update_actor": seconds,
        }
        skipped = []
        if not (last := history[0]["actor"]).finite:
            skipped = [NonFinite("actor", batch, float(last.loss), float(last.grad_norm))]
        return state, StepResult(metrics, skipped)

    def evaluate(self, state: TrainState[Array]) -> dict[str, float]:
        """Held-out metrics of the policy."""
        return heldout_loss(
            self._networks.policy.objective,
            state.policy.weights,
            self._heldout,
            self._rows,
            self._setup.recipe.micro_batch_size,
            self._setup.tokenizer.pad_id,
        )

    def data_metrics(self) -> dict[str, float]:
        """Metrics of the data, once in a run."""
        counts = {"dropped": self._rows.dropped, "truncated": self._rows.truncated}
        return {f"data/chats_{name}": float(count) for name, count in counts.items() if count}

    def write_samples(self, outputs: Outputs, state: TrainState[Array], result: StepResult) -> None:
        """Writes samples of a step to samples.jsonl."""
        if int(state.step) < self._setup.run.steps:  # after the last step every run shows them
            write_heldout_samples(self._setup, self._sampler, state, outputs.samples)


def heldout_loss(
    objective: PolicyObjective,
    policy: Transformer[Array],
    chats: Sequence[Chat],
    rows: ChatRows,
    num_rows: int,
    pad_id: int,
) -> dict[str, float]:
    """Means over all tokens in the loss mask, by forward passes alone.

    ``val/nll`` is the negative log-likelihood in nats, ``val/perplexity`` its exponential,
    ``val/token_accuracy`` the fraction of tokens that are the argmax of the policy.

    Args:
      num_rows: rows of a pass, which divide over the devices.
    """
    begin = time.perf_counter()
    nll, num_correct, tokens = 0.0, 0.0, 0
    for first in range(0, len(chats), num_rows):
        batch = rows.batch(chats[first : first + num_rows], num_rows, pad_id, objective.mesh)
        scores = logprobs_and_argmax_of(objective, policy, batch.tokens, batch.valid)
        logprobs, is_argmax, mask = to_host((*scores, batch.mask))
        # In float64: a float32 sum over all held-out tokens would lose precision.
        nll -= float(np.sum(logprobs, dtype=np.float64, where=mask))
        num_correct += float(np.sum(is_argmax, dtype=np.float64, where=mask))
        tokens += int(mask.sum())
        heartbeat()
    return {
        "val/nll": nll / tokens,
        "val/perplexity": math.exp(min(nll / tokens, 700.0)),
        "val/token_accuracy": num_correct / tokens,
        "val/tokens": float(tokens),
        "timing_s/testing": time.perf_counter() - begin,
    }
