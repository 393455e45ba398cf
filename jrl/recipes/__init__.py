"""One file per paper: its hyperparameter table as code, and what it does to a batch."""

from jrl.recipes.actor_critic import ActorCritic
from jrl.recipes.batch import Batch, Experience, Totals
from jrl.recipes.dapo import Dapo
from jrl.recipes.grpo import Grpo
from jrl.recipes.ppo import Ppo
from jrl.recipes.recipe import Recipe
from jrl.recipes.vapo import Vapo

RECIPES: dict[str, type[Recipe]] = {"ppo": Ppo, "grpo": Grpo, "dapo": Dapo, "vapo": Vapo}
"""Recipes by the name they have on the command line."""

__all__ = [
    "RECIPES",
    "ActorCritic",
    "Batch",
    "Dapo",
    "Experience",
    "Grpo",
    "Ppo",
    "Recipe",
    "Totals",
    "Vapo",
]
