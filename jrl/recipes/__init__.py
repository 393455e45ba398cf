"""Recipes, one class per paper: its hyperparameter table as code, its losses and advantages."""

from jrl.recipes.base.batch import Batch as Batch
from jrl.recipes.base.batch import Targets as Targets
from jrl.recipes.base.batch import Totals as Totals
from jrl.recipes.base.recipe import Metrics as Metrics
from jrl.recipes.base.recipe import NetworkSpec as NetworkSpec
from jrl.recipes.base.recipe import Recipe
from jrl.recipes.base.temperature import AdaptiveTemperature as AdaptiveTemperature
from jrl.recipes.dapo import Dapo
from jrl.recipes.grpo import Cispo, DrGrpo, Grpo, Gspo, Maxrl, Rloo
from jrl.recipes.grpo import GroupRelative as GroupRelative
from jrl.recipes.hapo import Hapo
from jrl.recipes.opd import Opd
from jrl.recipes.ppo import ActorCritic as ActorCritic
from jrl.recipes.ppo import Ppo
from jrl.recipes.reinforce_plus_plus import ReinforcePlusPlus
from jrl.recipes.sft import Sft as Sft
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
    "opd": Opd,
}
"""Recipes by the name they have on the command line."""
