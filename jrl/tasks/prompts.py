"""What every task has of the prompts that it judges, where they are those of another."""

from jrl.tasks.task import Example, Prompts


class OfPrompts:
    """A task whose prompts are those of another, or of a list: it says alone what completions are
    worth."""

    def __init__(self, prompts: Prompts):
        self._prompts = prompts
        self.sources: tuple[Prompts, ...] = (prompts,)
        """Where the prompts come from."""

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
