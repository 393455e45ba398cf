"""Token rows of conversations: selection by length, the shape of rows, and batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch, over_rows
from jrl.recipes.base.recipe import Supervision
from jrl.tasks import Task
from jrl.tasks.data.chats import Chat, Chats
from jrl.text.loss_mask import ChatFormat, Encoded, encode_chat
from jrl.text.prompt_format import opened_reasoning, special_text_of
from moe.config import ModelConfig
from moe.ops.zigzag import ZigzagLayout
from sharding.folding import FoldedMesh


@dataclass(frozen=True)
class ChatRows:
    """Encoded conversations of a run, and the shape of their rows.

    A row has its first token in the last of the positions `before`, so that all others, which may
    be in the loss mask, are in those `after`: predicted tokens then divide over ``cp x tp``
    devices.

    Attributes:
      encoded: by the id of the conversation.
      before: positions up to the first token of a row.
      after: positions of all other tokens.
      dropped: conversations left out for their length.
      truncated: conversations of `encoded` that were truncated.
    """

    encoded: Mapping[int, Encoded]
    before: int
    after: int
    dropped: int
    truncated: int

    def counts(self, chats: Sequence[Chat] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Number of tokens of each conversation, or of each of the run, and of those in the loss
        mask, ``[chats]``."""
        ids = self.encoded if chats is None else [chat.index for chat in chats]
        encoded_chats = [self.encoded[chat_id] for chat_id in ids]
        sizes = [(len(chat.ids), int(chat.loss_mask.sum())) for chat in encoded_chats]
        tokens, loss_tokens = np.array(sizes, np.int64).reshape(-1, 2).T
        return tokens, loss_tokens

    def describe(self, task: Task) -> list[str]:
        """Summary lines of the training data, and of conversations left out or truncated."""
        tokens, loss_tokens = self.counts()
        num_heldout = task.heldout_size or 0
        too_long = {"dropped": self.dropped, "truncated": self.truncated}
        return [
            f"{len(self.encoded) - num_heldout:,} conversations to train on and {num_heldout:,} "
            f"held out, {tokens.sum():,} tokens, of which {loss_tokens.sum():,} are the "
            f"assistant's and {tokens.max():,} in one",
            *(
                f"{action} {count:,} conversations that are too long (--max-length)"
                for action, count in too_long.items()
                if count
            ),
        ]

    def batch(
        self, chats: Sequence[Chat], rows: int, pad_id: int, mesh: FoldedMesh
    ) -> Batch[Array]:
        """Batch with a row for each conversation, padded with empty rows to `rows`."""
        shape = rows, self.before + self.after
        tokens = np.full(shape, pad_id, np.int32)
        valid, mask = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, chat in enumerate(chats):
            encoded_chat = self.encoded[chat.index]
            # One token is before the predicted positions: each prediction needs a state before it.
            span = slice(self.before - 1, self.before - 1 + len(encoded_chat.ids))
            tokens[row, span] = encoded_chat.ids
            mask[row, span] = encoded_chat.loss_mask
            valid[row, span] = True
        return to_devices(Batch(tokens=tokens, valid=valid, mask=mask), over_rows(mesh))


def chat_rows(
    chats: Chats, format: ChatFormat, supervision: Supervision, model: ModelConfig, mesh: FoldedMesh
) -> ChatRows:
    """Encodes all conversations; those that are too long are truncated or left out.

    Changes `chats`: conversations left out are removed, and the answer of each other becomes the
    text of its first turn in the loss mask.

    Raises:
      ValueError: for a conversation that cannot be encoded, a length above the checkpoint's maximum
        positions, and where too few conversations are left.
    """
    limits = [n for n in (supervision.max_length, model.max_positions) if n is not None]
    if len(limits) == 2 and limits[0] > limits[1]:
        raise ValueError(
            f"max_length={limits[0]} is more than the {limits[1]} positions that the network "
            f"supports: give --max-length {limits[1]} or less."
        )
    # All before the first step: the longest row is a static shape of every compiled function.
    encoded: dict[int, Encoded] = {}
    truncated = 0
    for chat in chats.chats:
        encoded_chat: Encoded | None = encode_chat(format, chat, last=format.last)
        if limits and len(encoded_chat.ids) > limits[0]:
            encoded_chat = encoded_chat.truncate(limits[0]) if supervision.truncates else None
            truncated += encoded_chat is not None
        if encoded_chat is not None:
            encoded[chat.index] = encoded_chat
    dropped = chats.leave_out(lambda chat: chat.index in encoded)
    chats.answer_with({chat_id: _turn_text(format, chat) for chat_id, chat in encoded.items()})
    longest = max(len(chat.ids) for chat in encoded.values())
    before, after = _round_up_positions(1, mesh), _round_up_positions(longest - 1, mesh)
    return ChatRows(encoded, before, after, dropped, truncated)


def training_chats(chats: Chats, first: int, count: int) -> list[Chat]:
    """Training conversations `first` to `first + count`; each epoch has another order."""
    return [chats.train(index) for index in range(first, first + count)]


def _turn_text(format: ChatFormat, encoded_chat: Encoded) -> str:
    """First turn under the loss mask, as the text of a completion with special tokens."""
    before, turn = np.split(
        encoded_chat.ids[: encoded_chat.context + encoded_chat.turn_length], [encoded_chat.context]
    )
    opened = "" if format.template is None else opened_reasoning(format.tokenizer, before.tolist())
    return opened + special_text_of(format.tokenizer, turn)


EXTRA_TOKENS = 16
"""Minimum number of tokens that a sampled completion may have beyond the longest answer, so that
text after an answer shows."""


def sampled_lengths(
    chats: Chats, rows: ChatRows, model: ModelConfig, requested: int | None
) -> tuple[int, int]:
    """Maximum tokens of the prompts and of the completions that are sampled for display.

    Args:
      requested: tokens of a completion; None is a quarter more than the longest held-out turn
        (reasoning, calls and end included), and `EXTRA_TOKENS` more at least, within the network's
        positions but never less than that turn.

    Raises:
      ValueError: for a request of less than one token.
    """
    heldout = [chats.heldout(index) for index in range(chats.heldout_size or 0)]
    encoded_chats = [rows.encoded[chat.index] for chat in heldout]
    prompt_length = max(chat.context for chat in encoded_chats)
    if requested is None:
        longest = max(chat.turn_length for chat in encoded_chats)
        requested = longest + max(-(-longest // 4), EXTRA_TOKENS)
        if model.max_positions is not None:
            # The longest turn fits behind its own prompt, which is mostly not the longest one.
            requested = max(min(requested, model.max_positions - prompt_length), longest)
    if requested < 1:
        raise ValueError(f"response_length={requested} must be at least 1.")
    return prompt_length, requested


def _round_up_positions(num_positions: int, mesh: FoldedMesh) -> int:
    """Rounds up a number of positions so that the positions of any number of rows divide over
    ``cp x tp``."""
    cp, ranks = mesh.size(mesh.cp), mesh.size(mesh.sequence)
    num_positions = max(num_positions, 1)
    while ZigzagLayout(((1, num_positions),), cp).num_tokens % ranks:
        num_positions += 1
    return num_positions
