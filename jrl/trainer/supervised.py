"""Supervised learning: the stage of a run that trains on conversations (SFT), its held-out loss,
and the warm start of reinforcement learning on reference completions, in place of pretraining."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Array

from jrl.config.run import RunConfig
from jrl.processes.agreement import is_multiprocess, to_devices, to_host
from jrl.processes.progress import heartbeat, phase
from jrl.recipes.base.batch import Batch, over_rows, replicated
from jrl.recipes.base.recipe import POLICY
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.sampler import Sampler, accuracy, numbered
from jrl.tasks import Example
from jrl.tasks.data.chats import Chat, Chats
from jrl.text.conversation import reference_rows
from jrl.trainer.evaluation.evaluate import heldout_examples, pad_with_repeats
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


CHECK_EVERY = 10
"""Steps between measurements of the accuracy."""
REACHED_FRACTION = 0.75
"""Fraction of the target that counts as reached: the accuracy of a batch is not more exact."""


class WarmStartFailed(RuntimeError):
    """Raised when a loss or gradient of supervised learning was not finite."""


class WarmStartStopped(RuntimeError):
    """Raised when supervised learning was requested to stop."""


def warm_start(
    setup: Setup,
    sampler: Sampler,
    weights: Transformer[Array],
    report: Callable[[int, float, float | None], None],
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Transformer[Array], dict[str, float]]:
    """Trains on reference completions until the policy's sampled accuracy reaches the target.

    Accuracy is measured on training prompts that were not trained on yet, so that held-out prompts
    do not affect when to stop.

    Args:
      sampler: of training prompts, to measure the accuracy.
      weights: to start from, float32.
      report: called with step, loss and, if it was measured, accuracy.
      stop: returns true to end early; a collective in a run of multiple processes, called when the
        accuracy is due.

    Returns:
      The weights, float32, and the metrics of the phase.

    Raises:
      WarmStartFailed: when a loss or gradient was not finite.
      WarmStartStopped: when `stop` returned true.
    """
    run, imitator, accuracy_now = setup.run, setup.imitator, 0.0
    rows = setup.geometry.supervised_rows(run.warm_start_batch)
    # A copy: updates donate their buffers, and `weights` is the caller's.
    learner = imitator.init(weights)
    step, loss = 0, float("nan")
    while step < run.warm_start_steps:
        examples = _training_examples(setup, step)
        learner, outcome = imitator.update(learner, supervised_batch(setup, examples, rows))
        step += 1
        # A collective in a run of multiple processes, called only when they wait anyway.
        if (step % CHECK_EVERY == 0 or not is_multiprocess()) and stop():
            raise WarmStartStopped(f"stopped after {step} supervised steps")
        if step % CHECK_EVERY and step < run.warm_start_steps:
            continue
        # The first value that is read since the last check: until here the host only dispatches.
        loss = float(outcome.loss)
        if int(learner.skipped):
            raise WarmStartFailed(
                f"the warm start's loss or gradient was not finite in {int(learner.skipped)} of "
                f"{step} steps (loss {loss}, gradient norm {float(outcome.grad_norm)} in the "
                "last): lower --warm-start-learning-rate "
                f"(now {run.warm_start_learning_rate})."
            )
        # Prompts of the next step: not trained on yet, and measuring does not use them up.
        unseen = unseen_prompts(setup, step)
        sampler.engine.load(learner.weights, 0)
        accuracy_now = accuracy(sampler.sample(unseen, sampling_of(setup.recipe), 1))
        sampler.engine.release()
        report(step, loss, accuracy_now)
        if accuracy_now >= run.warm_start_accuracy:
            break
    # Training starts from the float32 masters, not from the rounded weights.
    return learner.float32_weights, {
        "warm_start/loss": loss,
        "warm_start/accuracy": accuracy_now,
        "warm_start/steps": float(step),
    }


def prompts_imitated(run: RunConfig, steps: int) -> int:
    """Number of training prompts of `steps` warm-start steps; reinforcement learning starts after
    them.

    It sees none of them again until a pass is over: a task with a list of examples returns each
    once per pass, and an endless task generates new ones (in a small space an equal one may come up
    by chance). Its first prompts are those that were only sampled, to measure the accuracy after
    the last step.
    """
    return steps * run.warm_start_batch


def shortfall(run: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """Warning about a warm start that ended far below its target; None if it did not."""
    accuracy, target = metrics["warm_start/accuracy"], run.warm_start_accuracy
    if accuracy >= REACHED_FRACTION * target:
        return None
    return (
        f"warning: the warm start reached an accuracy of {accuracy:.3f} in "
        f"{metrics['warm_start/steps']:.0f} steps, far below its target of {target:g}: a policy "
        "that is rarely correct gets little learning signal. Raise --warm-start-steps (now "
        f"{run.warm_start_steps}) or --warm-start-learning-rate (now "
        f"{run.warm_start_learning_rate:g}), or take a larger --model or an easier --task."
    )


def supervised_batch(setup: Setup, examples: list[Example], rows: int) -> Batch[Array]:
    """Batch of prompts with their reference completions; the loss mask is the completion and its
    end.

    Args:
      rows: number of rows of the batch, which divide over the devices; padding rows are outside of
        the loss mask.
    """
    count, examples = len(examples), pad_with_repeats(examples, rows)
    tokens, valid, mask = reference_rows(
        setup.format, examples, setup.prompt_length, setup.response_length
    )
    # Padding rows have no valid token: they affect neither the loss nor the routers' balance.
    mask[count:] = valid[count:] = False
    return to_devices(Batch(tokens=tokens, valid=valid, mask=mask), over_rows(setup.mesh))


def unseen_prompts(setup: Setup, step: int) -> dict[int, Example]:
    """Training prompts by id that `step` supervised steps have not trained on yet."""
    return numbered(_training_examples(setup, step), prompts_imitated(setup.run, step))


def _training_examples(setup: Setup, step: int) -> list[Example]:
    """Prompts of a supervised step."""
    begin, end = prompts_imitated(setup.run, step), prompts_imitated(setup.run, step + 1)
    return [setup.task.train(index) for index in range(begin, end)]
