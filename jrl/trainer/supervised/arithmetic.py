"""Arithmetic of a supervised run for a dry run: conversations, tokens, steps, micro-batches."""

from jrl.tasks.data.chats import Chats
from jrl.trainer.setup.setup import Setup
from sharding.schedule import Schedule


def chat_arithmetic(setup: Setup) -> dict[str, str]:
    """Lines of the arithmetic from conversations to optimizer steps."""
    chats, rows, recipe, run = setup.task, setup.rows, setup.recipe, setup.run
    assert isinstance(chats, Chats) and rows is not None
    encoded_chats = list(rows.encoded.values())
    tokens = sum(len(chat.ids) for chat in encoded_chats)
    loss_tokens = sum(chat.loss_mask.sum() for chat in encoded_chats)
    num_micro_batches, layout = setup.geometry.num_micro_batches, setup.mesh.layout
    micro = recipe.micro_batch_size
    epochs = run.steps * recipe.completions / chats.num_train
    lines = {
        "conversations": f"{chats.num_train:,} to train on, {chats.heldout_size:,} held out",
        "dropped, truncated": f"{rows.dropped:,}, {rows.truncated:,}",
        "tokens": (
            f"{tokens:,}, of which {loss_tokens:,} are in the loss ({loss_tokens / tokens:.1%})"
        ),
        "tokens of the longest": f"{max(len(chat.ids) for chat in encoded_chats):,}",
        "steps": f"{run.steps:,} x {recipe.completions:,} conversations = {epochs:.3g} epochs",
        "micro-batches per step": f"{recipe.completions:,} / {micro:,} = {num_micro_batches:,}",
        "packed": "yes" if setup.networks.packs else "no",
        "learning rate": f"{recipe.learning_rate:g}, {recipe.optimizer.schedule}",
    }
    if layout.pp > 1:
        bubble = Schedule(layout.pp, num_micro_batches, layout.vpp).bubble
        lines["pipeline bubble / busy time"] = f"{bubble:.1%}"
    return lines
