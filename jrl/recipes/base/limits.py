"""Where the numbers of a recipe may lie."""

from typing import Any

from jrl.config.numbers import check_least, check_range


def check_limits(recipe: Any) -> None:
    """Refuses numbers of a recipe that no update can use.

    Raises:
      ValueError: naming the first of them.
    """
    counts = "prompts", "group_size", "mini_batch", "micro_batch", "epochs", "max_generation_rounds"
    check_least(recipe, counts)
    check_range(recipe, ("learning_rate", "learning_rate_warmup", "weight_decay"), 0)
    check_range(recipe, ("clip_low", "clip_high", "temperature"), 0)
    check_range(recipe, ("max_grad_norm",), 0, above=True)
    check_range(recipe, ("clip_dual",), 1, above=True)
    if recipe.uses_critic:
        check_range(recipe, ("critic_learning_rate", "value_clip", "pretrain_critic"), 0)
        # Not every recipe has each of these lambdas.
        check_range(recipe, ("gamma", "lam", "lam_critic", "lam_floor"), 0, 1)
