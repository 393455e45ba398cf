"""A short supervised phase: there are no pretrained weights on a laptop."""

from collections.abc import Callable, Mapping

from jaxtyping import Array

from jrl.config.run import RunConfig
from jrl.processes.agreement import is_multiprocess, to_devices
from jrl.recipes.base.batch import Batch
from jrl.rollout.batching import over_rows
from jrl.rollout.collection.collect import sampling_of
from jrl.rollout.sampler import Sampler, accuracy, numbered
from jrl.tasks import Example
from jrl.text.conversation import gold_rows
from jrl.trainer.evaluation.heldout import filled_up
from jrl.trainer.setup.setup import Setup
from moe.weights import Transformer

CHECK_EVERY = 10
"""Steps between measurements of the accuracy."""
NEAR = 0.75
"""Part of the target that is near to it: the accuracy of a batch is no more exact."""


class WarmStartFailed(RuntimeError):
    """Supervised learning stopped being finite."""


class WarmStartStopped(RuntimeError):
    """Supervised learning was told to stop."""


def warm_start(
    setup: Setup,
    sampler: Sampler,
    weights: Transformer[Array],
    report: Callable[[int, float, float | None], None],
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Transformer[Array], dict[str, float]]:
    """Learns gold completions until the policy's sampled accuracy reaches the target.

    Accuracy is measured on training prompts that were not learned from yet, so that held-out
    prompts have no say in when to stop.

    Args:
      sampler: of training prompts, to measure the accuracy.
      weights: to start from, float32.
      report: called with step, loss and, where it was measured, accuracy.
      stop: whether to end early; with several processes a collective, asked when the accuracy is
        due.

    Returns:
      The weights, float32, and the metrics of the phase.

    Raises:
      WarmStartFailed: when a loss or gradient was not finite.
      WarmStartStopped: when told to stop.
    """
    run, imitator, reached = setup.run, setup.imitator, 0.0
    rows = setup.geometry.supervised_rows(run.warm_start_batch)
    # In buffers of its own: updates give theirs away, and `weights` is the caller's.
    learner = imitator.init(weights)
    step = 0
    loss = float("nan")
    while step < run.warm_start_steps:
        examples = _training_examples(setup, step)
        learner, metrics = imitator.update(learner, supervised_batch(setup, examples, rows))
        step += 1
        # With several processes a collective: they ask only where they wait for each other anyway.
        if (step % CHECK_EVERY == 0 or not is_multiprocess()) and stop():
            raise WarmStartStopped(f"stopped after {step} supervised steps")
        if step % CHECK_EVERY and step < run.warm_start_steps:
            continue
        # The first number that is read since the last check: until here the host only dispatches.
        loss = float(metrics["loss"])
        if int(learner.skipped):
            raise WarmStartFailed(
                f"the warm start's loss or gradient was not finite in {int(learner.skipped)} of "
                f"{step} steps (loss {loss}, gradient norm {float(metrics['grad_norm'])} in the "
                "last): lower --warm-start-learning-rate "
                f"(now {run.warm_start_learning_rate})."
            )
        # Those of the next step: nothing was learned from them yet, and measuring uses up none.
        fresh = numbered(_training_examples(setup, step), prompts_imitated(setup.run, step))
        sampler.engine.load(learner.weights, 0)
        reached = accuracy(sampler.sample(fresh, sampling_of(setup.recipe), 1))
        report(step, loss, reached)
        if reached >= run.warm_start_accuracy:
            break
    # Training starts from what the optimizer stepped, not from what that was rounded to.
    return learner.float32_weights, {
        "warm_start/loss": loss,
        "warm_start/accuracy": reached,
        "warm_start/steps": float(step),
    }


def prompts_imitated(run: RunConfig, steps: int) -> int:
    """Training prompts that so many steps imitate the answers of; reinforcement goes on after them.

    It meets none of them again until the task runs out of others: a task that is a list of examples
    gives each once in a pass, and an endless one draws afresh. (Where few prompts can be drawn, as
    in a small space, an equal one may come up by chance.) The prompts whose completions were only
    sampled, to measure the accuracy in the last step, come first.
    """
    return steps * run.warm_start_batch


def shortfall(run: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """What to say of a warm start that ended far below its target; None where it did not."""
    accuracy, target = metrics["warm_start/accuracy"], run.warm_start_accuracy
    if accuracy >= NEAR * target:
        return None
    return (
        f"warning: the warm start reached an accuracy of {accuracy:.3f} in "
        f"{metrics['warm_start/steps']:.0f} steps, far below its target of {target:g}: a policy "
        "that is seldom right has little to learn from. Raise --warm-start-steps "
        f"(now {run.warm_start_steps}) or --warm-start-learning-rate (now "
        f"{run.warm_start_learning_rate:g}), or take a larger --model or an easier --task."
    )


def supervised_batch(setup: Setup, examples: list[Example], rows: int) -> Batch[Array]:
    """Prompts with their gold completions; what is learned is the completion and its end.

    Args:
      rows: of the batch, which divide over the devices; those that fill it up are repetitions of
        which nothing is learned.
    """
    count, examples = len(examples), filled_up(examples, rows)
    lengths = setup.prompt_length, setup.response_length
    tokens, valid, mask = gold_rows(setup.format, examples, *lengths)
    # What fills the batch up has no token: none is in the loss, and no router is balanced by it.
    mask[count:] = valid[count:] = False
    return to_devices(Batch(tokens=tokens, valid=valid, mask=mask), over_rows(setup.mesh))


def _training_examples(setup: Setup, step: int) -> list[Example]:
    """The prompts of a supervised step."""
    begin, end = prompts_imitated(setup.run, step), prompts_imitated(setup.run, step + 1)
    return [setup.task.train(index) for index in range(begin, end)]
