"""Recipes, one file per paper: its hyperparameter table as code, and its losses and advantages."""

from jrl.recipes.base.actor_critic import ActorCritic as ActorCritic
from jrl.recipes.base.batch import Batch as Batch
from jrl.recipes.base.batch import Targets as Targets
from jrl.recipes.base.batch import Totals as Totals
from jrl.recipes.base.group_relative import GroupRelative as GroupRelative
from jrl.recipes.base.recipe import Metrics as Metrics
from jrl.recipes.base.recipe import Recipe
from jrl.recipes.base.temperature import AdaptiveTemperature as AdaptiveTemperature
from jrl.recipes.cispo import Cispo
from jrl.recipes.dapo import Dapo
from jrl.recipes.dr_grpo import DrGrpo
from jrl.recipes.grpo import Grpo
from jrl.recipes.gspo import Gspo
from jrl.recipes.hapo import Hapo
from jrl.recipes.maxrl import Maxrl
from jrl.recipes.ppo import Ppo
from jrl.recipes.reinforce_plus_plus import ReinforcePlusPlus
from jrl.recipes.rloo import Rloo
from jrl.recipes.supervised.sft import Sft
from jrl.recipes.tppo import Tppo
from jrl.recipes.vapo import Vapo

RECIPES: dict[str, type[Recipe]] = {
    "ppo": Ppo,
    "grpo": Grpo,
    "dapo": Dapo,
    "vapo": Vapo,
    "hapo": Hapo,
    "tppo": Tppo,
    "dr_grpo": DrGrpo,
    "rloo": Rloo,
    "maxrl": Maxrl,
    "gspo": Gspo,
    "cispo": Cispo,
    "reinforce_plus_plus": ReinforcePlusPlus,
}
"""Recipes by the name they have on the command line."""

SUPERVISED: dict[str, type[Sft]] = {"sft": Sft}
"""Supervised fine-tuning, by its name on the command line, which takes the place of a recipe's."""
