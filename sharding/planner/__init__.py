"""Planner: the best parallel layout of a model on a cluster, by arithmetic of memory and time.

Nothing here runs on a device. Its command is
``python -m sharding.planner MODEL --hardware h100x64``.
"""

from sharding.costs import hardware
from sharding.former_names import former_modules
from sharding.planner import models

former_modules(
    {
        "sharding.planner.hardware": hardware,
        "sharding.planner.models.presets": models,
        "sharding.planner.models.sizes": models,
    }
)
