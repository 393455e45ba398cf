"""Base class of tasks that score the prompts of another source."""

from jrl.tasks.task import Example, Prompts


class PromptSourceTask:
    """A task whose prompts are those of another task or of a list; it defines the scoring alone."""

    def __init__(self, prompts: Prompts):
        self._prompts = prompts
        self.sources: tuple[Prompts, ...] = (prompts,)
        """Sources of the prompts."""

    @property
    def name(self) -> str:
        return self._prompts.name

    @property
    def max_prompt_length(self) -> int:
        return self._prompts.max_prompt_length

    @property
    def max_response_length(self) -> int:
        return self._prompts.max_response_length

    @property
    def characters(self) -> str:
        return self._prompts.characters

    @property
    def heldout_size(self) -> int | None:
        return self._prompts.heldout_size

    def train(self, index: int) -> Example:
        """The index-th training example."""
        return self._prompts.train(index)

    def heldout(self, index: int) -> Example:
        """The index-th held-out example."""
        return self._prompts.heldout(index)
