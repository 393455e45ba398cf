"""Compatibility checks between the parts of a run."""

from jrl.config.run import RunConfig
from jrl.recipes.base.batch import required
from jrl.recipes.base.recipe import Recipe, Windows
from jrl.rollout.decoding.disaggregated.expert_balancer import first_placement
from jrl.tasks import Task
from jrl.tasks.mixture import Mixture
from jrl.tasks.parts import has_environments
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer
from moe.config import ModelConfig
from moe.disaggregated.split import SplitMesh
from moe.disaggregated.weights import check_splits
from sharding.folding import FoldedMesh


def check_may_be_stale(recipe: Recipe, max_staleness: int) -> None:
    """Rejects recipes that cannot run asynchronously, as a step depends on the step before."""
    if isinstance(recipe.collection, Windows):
        raise ValueError(
            f"max_staleness={max_staleness}: {recipe.name} continues in each step the responses "
            "that the previous step left unfinished, and trains on them in between: leave out "
            "--max-staleness."
        )
    if recipe.temperature_rule is not None:
        raise ValueError(
            f"max_staleness={max_staleness}: in {recipe.name} the sampling temperature follows "
            "the entropies of the previous step: leave out --max-staleness, or choose another "
            "recipe."
        )


def check_may_converse(run: RunConfig, recipe: Recipe) -> None:
    """Rejects settings under which conversations continue in another step, as environments are not
    saved in checkpoints."""
    if isinstance(recipe.collection, Windows):
        raise ValueError(
            f"task={run.task} has conversations, which {recipe.name} would continue in another "
            "step, and their environments are not saved: choose another recipe."
        )
    if run.max_staleness:
        raise ValueError(
            f"max_staleness={run.max_staleness} saves rows in flight, and task={run.task} has "
            "environments, which are not saved: leave out --max-staleness."
        )


def check_tools(task: Task, format: PromptFormat) -> None:
    """Rejects tools that the prompt format does not show to the policy, or whose calls it cannot
    parse."""
    for source in task.sources if isinstance(task, Mixture) else (task,):
        if has_environments(source):
            format.check_tools(source.train(0))


def check_fits(
    tokenizer: Tokenizer,
    model: ModelConfig,
    run: RunConfig,
    recipe: Recipe,
    mesh: FoldedMesh,
    split: SplitMesh | None,
    response_length: int,
) -> None:
    """Checks that network and tokenizer have the same vocabulary, that the network supports the
    rollout split and packing, and that windows are shorter than responses."""
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model only "
            f"{model.vocab_size}: take the tokenizer of the checkpoint."
        )
    if tokenizer.vocab_size < model.vocab_size:
        raise ValueError(
            f"the model has {model.vocab_size} ids, which it may all sample, and the "
            f"tokenizer only {tokenizer.vocab_size}: take the tokenizer of the checkpoint, "
            "or its tokenizer.json, which may have fewer tokens."
        )
    if split is not None:
        check_splits(model, split, first_placement(model, split, run.rollout_expert_slots))
    if run.packing and mesh.layout.pp > 1:
        raise ValueError(
            f"packing=True is not supported with pp={mesh.layout.pp} of layout {run.layout!r}, "
            "which runs a fixed number of micro-batches: leave out --packing, or choose a layout "
            "without pp."
        )
    collection = recipe.collection
    if isinstance(collection, Windows) and required(collection.window) >= response_length:
        raise ValueError(
            f"window={collection.window} truncates no response of at most {response_length} "
            "tokens: choose a smaller --window, or a larger --response-length."
        )
