"""Where prompts come from, and how a completion is scored."""

from jrl.tasks.load import load_task as load_task
from jrl.tasks.task import REASONS as REASONS
from jrl.tasks.task import Example as Example
from jrl.tasks.task import Task as Task
from jrl.tasks.task import Verdict as Verdict
