"""Tasks: sources of prompts, and verifiers and rewards that score completions."""

from jrl.tasks.load import load_task as load_task
from jrl.tasks.task import REASONS as REASONS
from jrl.tasks.task import Example as Example
from jrl.tasks.task import Task as Task
from jrl.tasks.task import Verdict as Verdict
