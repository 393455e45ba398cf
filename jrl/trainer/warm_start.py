"""Warm start: a short supervised phase before reinforcement learning, in place of pretraining."""

from collections.abc import Callable, Mapping

from jaxtyping import Array

from jrl.config.run import RunConfig
from jrl.processes.agreement import is_multiprocess, to_devices
from jrl.recipes.base.batch import Batch, over_rows
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.sampler import Sampler, accuracy, numbered
from jrl.tasks import Example
from jrl.text.conversation import reference_rows
from jrl.trainer.evaluation.evaluate import pad_with_repeats
from jrl.trainer.setup.setup import Setup
from moe.weights import Transformer

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
