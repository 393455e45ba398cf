"""Supervised training step: one optimizer step on a batch of conversations."""

import time
from dataclasses import replace

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_devices, to_host
from jrl.recipes.base.recipe import Recipe
from jrl.rollout.batching import replicated
from jrl.tasks.data.chats import Chat, Chats
from jrl.trainer.learner.networks import Networks
from jrl.trainer.state import TrainState
from jrl.trainer.step import NonFinite, update_rows
from jrl.trainer.summary import count_updates, summarise
from jrl.trainer.supervised.rows import ChatRows

MAX_ROWS_PER_BIN = 16
"""Maximum conversations of a bin: many are far shorter than the longest."""


def supervised_step(
    networks: Networks,
    recipe: Recipe,
    chats: Chats,
    rows: ChatRows,
    pad_id: int,
    state: TrainState[Array],
) -> tuple[TrainState[Array], dict[str, float], list[NonFinite]]:
    """Trains on the next conversations, which depend on the state and the dataset only.

    Returns:
      The state, the metrics, and the update if it was skipped because it was not finite.
    """
    # The position in the stream of conversations is the only data state of a checkpoint.
    seen = int(state.prompts_seen)
    batch_chats = training_chats(chats, seen, recipe.completions)
    tokens, loss_tokens = rows.counts(batch_chats)
    begin = time.perf_counter()
    batch = rows.batch(batch_chats, recipe.completions, pad_id, networks.mesh)
    row_counts = (tokens, loss_tokens) if networks.packs else None
    learner, update_metrics = update_rows(
        networks.policy, state.policy, batch, row_counts, max_rows_per_bin=MAX_ROWS_PER_BIN
    )
    # Reading them blocks until the update has finished, for the timing.
    history = [{"actor": to_host(update_metrics)}]
    seconds = time.perf_counter() - begin
    seen += recipe.completions
    state = replace(
        state,
        policy=learner,
        step=state.step + 1,
        prompts_seen=to_devices(np.asarray(seen, np.int32), replicated(networks.mesh)),
    )
    metrics = {
        **summarise(history),
        **count_updates(history),
        "actor/lr": float(networks.policy.optimizer.rate_at(int(learner.updates) - 1)),
        "training/tokens": float(tokens.sum()),
        "training/learned_tokens": float(loss_tokens.sum()),
        "training/epoch": seen / chats.num_train,
        "timing_s/update_actor": seconds,
    }
    skipped = []
    if not (last := history[0]["actor"])["finite"]:
        skipped = [NonFinite("actor", batch, float(last["loss"]), float(last["grad_norm"]))]
    return state, metrics, skipped


def training_chats(chats: Chats, first: int, number: int) -> list[Chat]:
    """Training conversations `first` to `first + number`; each epoch has another order."""
    examples = [chats.train(index) for index in range(first, first + number)]
    return [chat for chat in examples if isinstance(chat, Chat)]
