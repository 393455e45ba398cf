"""Batch geometry of a run: the sharding of rows and tokens over devices, and its divisibility."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jrl.recipes.base.hyperparameters import MICRO_BATCH, near_divisors
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.slots import ranks
from jrl.trainer.scoring import PromptLayout
from moe.ops.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh

MAX_SLOTS = 512
"""Maximum number of slots by default."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of batches, and the meshes that they are sharded over.

    Attributes:
      recipe: determines prompts, completions, mini-batches and micro-batches.
      prompt_length: tokens that prompts are padded to.
      response_length: limit of a completion in tokens, end-of-sequence included.
      mesh: mesh of training.
      rollout_mesh: of sampling.
      layout, rollout_layout: names of the two in messages.
      rollout_micro_batches: micro-batches of the decoded rows, on each device.
    """

    recipe: Recipe
    prompt_length: int
    response_length: int
    mesh: FoldedMesh
    rollout_mesh: FoldedMesh
    layout: str
    rollout_layout: str
    rollout_micro_batches: int = 1

    @property
    def row_length(self) -> int:
        """Tokens of a row: prompt and response."""
        return self.prompt_length + self.response_length

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a mini-batch on each device."""
        return self.recipe.mini_batch_size // self.recipe.micro_batch_size

    @property
    def bins(self) -> int:
        """Number of bins of a packed micro-batch on a device: a quarter of its rows, so that the
        last micro-batch, which is seldom full, wastes little."""
        return max(self.rows // 4, 1)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on a device."""
        return self.recipe.micro_batch_size // self.mesh.size(self.mesh.dp)

    @property
    def prompt_layout(self) -> PromptLayout:
        """Layout of prompts and completions; completions share their prompt in a forward pass if
        every device gets whole groups."""
        group = self.recipe.group_size
        # A group that is split over two devices or micro-batches would run its prompt in each.
        shares = self.recipe.has_complete_groups and self.rows % group == 0
        return PromptLayout(self.prompt_length, group if shares else 1)

    def overlap_units(self, packing: bool | None) -> tuple[int, tuple[int, ...]]:
        """Number of independent parts of a micro-batch on a device: packed rows, or prompts with
        their responses; and the tokens of each half of them, as `Execution.two_batch_overlap`
        splits them. No tokens for packed rows, which always divide over the devices of a sequence.
        """
        if packing:
            return self.bins, ()
        layout, group = self.prompt_layout, self.prompt_layout.group_size
        num_units = self.rows // group
        prompts = -(-num_units // 2), num_units // 2
        sections = (layout.sections(count * group, self.response_length) for count in prompts)
        return num_units, tuple(self.num_tokens(*each) for each in sections)

    @property
    def slots_unit(self) -> int:
        """Number that divides all numbers of slots: ranks, and micro-batches of each."""
        return ranks(self.rollout_mesh) * self.rollout_micro_batches

    def slots(self, requested: int | None) -> int:
        """Number of decoding slots.

        Args:
          requested: the requested number; None takes the rows of a step, at most `MAX_SLOTS`.

        Raises:
          ValueError: for a number that does not divide over the devices.
        """
        unit = self.slots_unit
        # Rounded up, so that a few slots may stay empty: ranks must have equally many.
        if requested is None:
            return -(-min(self.recipe.rows_decoded, MAX_SLOTS) // unit) * unit
        if requested < 1 or requested % unit:
            over = "dp x tp" if self.rollout_micro_batches == 1 else "dp x tp x micro-batches"
            raise ValueError(
                f"slots={requested} does not divide over {over} = {unit} of {self.rollout_layout}: "
                f"choose a multiple of {unit}, or another --rollout-layout."
            )
        return requested

    def supervised_rows(self, requested: int) -> int:
        """Number of rows of a supervised batch: `requested`, padded to divide over the devices."""
        dp, ranks = self.mesh.size(self.mesh.dp), self.mesh.size(self.mesh.sequence)
        lengths = self.prompt_length, self.response_length
        rows = -(-requested // dp)
        # Tokens divide at the latest when the rows of a rank do.
        while any(self.num_tokens((rows, time)) % ranks for time in lengths):
            rows += 1
        return rows * dp

    def with_micro_batch(self) -> "Geometry":
        """Copy with a micro-batch that divides over the devices, unless the recipe sets one or none
        divides."""
        if self.recipe.micro_batch is not None:
            return self
        return self.with_first_valid(near_divisors(self.recipe.mini_batch_size, MICRO_BATCH))

    def with_first_valid(self, micro_batches: Iterable[int]) -> "Geometry":
        """Copy with the first of the micro-batches that divides over the devices, if any does."""
        for size in micro_batches:
            candidate = replace(self, recipe=replace(self.recipe, micro_batch=size))
            try:
                candidate.check()
            except ValueError:
                continue
            return candidate
        return self

    def check(self) -> None:
        """Checks that mini-batches and micro-batches divide over the devices, in rows and tokens;
        raises ValueError, naming the size that does not."""
        recipe, dp = self.recipe, self.mesh.size(self.mesh.dp)
        mini_batch = "batch" if recipe.supervised else "mini_batch"
        sizes = {mini_batch: recipe.mini_batch_size, "micro_batch": recipe.micro_batch_size}
        for name, size in sizes.items():
            if size % dp:
                raise ValueError(
                    f"{name}={size} does not divide over dp={dp} of {self.layout}: choose a "
                    f"multiple of {dp}, or another --layout or --rollout-layout."
                )
        ranks = self.mesh.size(self.mesh.sequence)
        sections = self.prompt_layout.sections(self.rows, self.response_length)
        for name, section in zip(("prompts", "responses"), sections, strict=True):
            if (num_tokens := self.num_tokens(section)) % ranks:
                raise ValueError(
                    f"the {name} of a micro_batch have {num_tokens} tokens per data-parallel rank, "
                    f"which do not divide over cp x tp = {ranks}: choose prompts and micro_batch, "
                    f"or prompt_length={self.prompt_length} and response_length="
                    f"{self.response_length}, in multiples of {ranks}."
                )

    def num_tokens(self, *sections: tuple[int, int]) -> int:
        """Number of tokens of sections ``(rows, length)``, with the padding of context
        parallelism."""
        return ZigzagLayout(sections, self.mesh.size(self.mesh.cp)).num_tokens
