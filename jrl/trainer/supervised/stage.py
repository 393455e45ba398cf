"""Supervised stage of a run (`jrl.trainer.stage`)."""

from jaxtyping import Array

from jrl.rollout.sampler import Sampler
from jrl.tasks.data.chats import Chat, Chats
from jrl.trainer.evaluation.heldout import heldout_examples
from jrl.trainer.outputs import Outputs, write_heldout_samples
from jrl.trainer.setup.setup import Setup
from jrl.trainer.state import TrainState
from jrl.trainer.step import StepResult
from jrl.trainer.supervised.heldout import heldout_loss
from jrl.trainer.supervised.rows import ChatRows
from jrl.trainer.supervised.step import supervised_step


class Supervised:
    """Supervised training stage on the conversations of a run.

    Args:
      setup: of a run whose recipe is supervised.
      sampler: for completions of held-out prompts, for display.
    """

    def __init__(self, setup: Setup, sampler: Sampler):
        recipe, chats, rows = setup.recipe, setup.task, setup.rows
        assert isinstance(chats, Chats) and rows is not None
        self._setup, self._sampler, self._networks = setup, sampler, setup.networks
        self._recipe = recipe
        self._chats: Chats = chats
        self._rows: ChatRows = rows
        examples = heldout_examples(chats, setup.run.eval_prompts)
        self._heldout = [chat for chat in examples if isinstance(chat, Chat)]

    def step(self, state: TrainState[Array]) -> tuple[TrainState[Array], StepResult]:
        state, metrics, skipped = supervised_step(
            self._networks,
            self._recipe,
            self._chats,
            self._rows,
            pad_id=self._setup.tokenizer.pad_id,
            state=state,
        )
        return state, StepResult(metrics, skipped)

    def evaluate(self, state: TrainState[Array]) -> dict[str, float]:
        return heldout_loss(
            self._networks.policy.objective,
            state.policy.weights,
            self._heldout,
            self._rows,
            self._recipe.micro_batch_size,
            self._setup.tokenizer.pad_id,
        )

    def data_metrics(self) -> dict[str, float]:
        counts = {"dropped": self._rows.dropped, "truncated": self._rows.truncated}
        return {f"data/chats_{name}": float(number) for name, number in counts.items() if number}

    def write_samples(self, outputs: Outputs, state: TrainState[Array], result: StepResult) -> None:
        if int(state.step) < self._setup.run.steps:  # after the last step every run shows them
            write_heldout_samples(self._setup, self._sampler, state, outputs.samples)
