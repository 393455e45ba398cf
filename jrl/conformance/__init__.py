"""Conformance suite of the losses of reinforcement learning: published cases and rules of arrays.

A case is a quantity of a paper with inputs and the right values and gradients in float64, read
from ``vectors``. A rule holds for any implementation: padding changes nothing, the micro-batches of
a batch sum to its gradient. `check` runs a function of NumPy, JAX or PyTorch on both. The package
needs NumPy alone.

Examples:
  >>> from jrl.conformance import check
  >>> def dr_grpo(rewards, groups):
  ...     return rewards - (rewards @ (groups[:, None] == groups)) / sum(groups[:, None] == groups)
  >>> check(dr_grpo, "dr_grpo_advantages").verdict
  'agrees'
"""

from .cases import Case, cases, quantities
from .check import Finding, Report, check
from .frameworks import NotExpressed
from .rules import RULES

__all__ = ["RULES", "Case", "Finding", "NotExpressed", "Report", "cases", "check", "quantities"]
