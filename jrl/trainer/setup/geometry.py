"""How the rows and tokens of a run's batches lie on its devices, and whether they divide."""

from dataclasses import dataclass, replace

from jrl.recipes.base.hyperparameters import MICRO_BATCH, near_divisors
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.decoding.ranks import ranks
from jrl.rollout.scoring import PromptLayout
from moe.tokens.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh

MOST_SLOTS = 512
"""Rows that are decoded at a time where nobody chose their number, at most."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of batches, and the meshes that they are spread over.

    Attributes:
      recipe: rows: prompts, completions, mini-batches, micro-batches.
      prompt_length: tokens that prompts are padded to.
      response_length: limit of a completion in tokens, end-of-sequence included.
      mesh: of training.
      rollout_mesh: of sampling.
      layout, rollout_layout: what the two are called in a message.
      rollout_parts: equal parts of the rows that are decoded, on each device.
    """

    recipe: Recipe
    prompt_length: int
    response_length: int
    mesh: FoldedMesh
    rollout_mesh: FoldedMesh
    layout: str
    rollout_layout: str
    rollout_parts: int = 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a mini-batch on each device."""
        return self.recipe.mini_batch_size // self.recipe.micro_batch_size

    @property
    def bins(self) -> int:
        """Of a packed micro-batch on a device: as long as rows, and a quarter as many, so that the
        last micro-batch, which is seldom full, wastes little."""
        return max(self.recipe.micro_batch_size // self.mesh.size(self.mesh.dp) // 4, 1)

    @property
    def prompt_layout(self) -> PromptLayout:
        """Completions of a prompt share it in a forward pass if every device gets whole groups."""
        group, dp = self.recipe.group_size, self.mesh.size(self.mesh.dp)
        # A group that lay on two devices, or in two micro-batches, would have to run its prompt in
        # each.
        whole = self.recipe.micro_batch_size // dp % group == 0
        return PromptLayout(self.prompt_length, group if whole and self.recipe.whole_groups else 1)

    def overlapping(self, packing: bool | None) -> tuple[int, tuple[int, ...]]:
        """Parts of a micro-batch on a device that have nothing to do with each other: packed rows,
        or prompts with the responses that share them; and the tokens of each half of them, as
        `Execution.two_batch_overlap` cuts them, none of packed rows, which the devices of a
        sequence can always share."""
        if packing:
            return self.bins, ()
        rows = self.recipe.micro_batch_size // self.mesh.size(self.mesh.dp)
        group = self.prompt_layout.group_size
        number = rows // group

        def tokens(prompts: int) -> int:
            sections = (prompts, self.prompt_length), (prompts * group, self.response_length)
            return sum(map(self._tokens, sections))

        return number, (tokens(-(-number // 2)), tokens(number // 2))

    def slots(self, wanted: int | None) -> int:
        """Rows that are decoded at a time.

        Args:
          wanted: None takes those of a step, `MOST_SLOTS` at most.

        Raises:
          ValueError: for a number that does not divide over the devices.
        """
        # Rows must divide over the ranks that share them, and over the parts of each.
        number = ranks(self.rollout_mesh) * self.rollout_parts
        # Rounded up, so that a few slots may stay empty: the ranks must have equally many.
        if wanted is None:
            return -(-min(self.recipe.rows_decoded, MOST_SLOTS) // number) * number
        if wanted < 1 or wanted % number:
            over = "dp x tp" if self.rollout_parts == 1 else "dp x tp x micro-batches"
            raise ValueError(
                f"slots={wanted} does not divide over {over} = {number} of {self.rollout_layout}: "
                f"choose a multiple of {number}, or another --rollout-layout."
            )
        return wanted

    def supervised_rows(self, wanted: int) -> int:
        """Rows of a supervised batch: those `wanted`, and as many that do not count as it takes to
        divide over the devices."""
        dp, ranks = self.mesh.size(self.mesh.dp), self.mesh.size(self.mesh.sequence)
        lengths = self.prompt_length, self.response_length
        rows = -(-wanted // dp)
        # In tokens they do at the latest where the rows of a rank do.
        while any(self._tokens((rows, time)) % ranks for time in lengths):
            rows += 1
        return rows * dp

    def with_micro_batch(self) -> "Geometry":
        """With a micro-batch that divides over the devices, where the recipe leaves the choice and
        there is one."""
        if self.recipe.micro_batch is not None:
            return self
        for size in near_divisors(self.recipe.mini_batch_size, MICRO_BATCH):
            chosen = replace(self, recipe=replace(self.recipe, micro_batch=size))
            try:
                chosen.check()
            except ValueError:
                continue
            return chosen
        return self

    def check(self) -> None:
        """Batches must divide over the devices, and micro-batches with them, in rows and in tokens.

        Raises:
          ValueError: naming what does not.
        """
        recipe, dp = self.recipe, self.mesh.size(self.mesh.dp)
        name = "batch" if recipe.supervised else "mini_batch"
        sizes = {name: recipe.mini_batch_size, "micro_batch": recipe.micro_batch_size}
        for name, number in sizes.items():
            if number % dp:
                raise ValueError(
                    f"{name}={number} does not divide over dp={dp} of {self.layout}: choose a "
                    f"multiple of {dp}, or another --layout or --rollout-layout."
                )
        rows, group = recipe.micro_batch_size // dp, self.prompt_layout.group_size
        self._check_tokens("the prompts of a micro_batch", (rows // group, self.prompt_length))
        self._check_tokens("the responses of a micro_batch", (rows, self.response_length))

    def _check_tokens(self, name: str, section: tuple[int, int]) -> None:
        """A section of a stream, the rows on a data-parallel rank and their length, must be cut
        into equal parts. The padding that context parallelism adds counts."""
        number, ranks = self._tokens(section), self.mesh.size(self.mesh.sequence)
        if number % ranks:
            raise ValueError(
                f"{name} have {number} tokens per data-parallel rank, which do not divide over "
                f"cp x tp = {ranks}: choose prompts and micro_batch, or "
                f"prompt_length={self.prompt_length} and response_length="
                f"{self.response_length}, in multiples of {ranks}."
            )

    def _tokens(self, section: tuple[int, int]) -> int:
        """Of a section, with the padding of context parallelism."""
        return ZigzagLayout((section,), self.mesh.size(self.mesh.cp)).num_tokens
