"""Evaluation of a policy on held-out conversations: loss, perplexity and token accuracy."""

import math
import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Array

from jrl.processes.agreement import to_host
from jrl.tasks.data.chats import Chat
from jrl.trainer.learner.objectives import PolicyObjective
from jrl.trainer.scoring import logprobs_and_argmax_of
from jrl.trainer.supervised.rows import ChatRows
from moe.weights import Transformer


def heldout_loss(
    objective: PolicyObjective,
    policy: Transformer[Array],
    chats: Sequence[Chat],
    rows: ChatRows,
    num_rows: int,
    pad_id: int,
) -> dict[str, float]:
    """Means over all tokens in the loss mask, by passes without a gradient.

    ``val/nll`` is the negative log-likelihood in nats, ``val/perplexity`` its exponential,
    ``val/token_accuracy`` the fraction of tokens that are the argmax of the policy.

    Args:
      num_rows: rows of a pass, which divide over the devices.
    """
    begin = time.perf_counter()
    nll, num_correct, tokens = 0.0, 0.0, 0
    for first in range(0, len(chats), num_rows):
        batch = rows.batch(chats[first : first + num_rows], num_rows, pad_id, objective.mesh)
        scores = logprobs_and_argmax_of(objective, policy, batch.tokens, batch.valid)
        logprobs, is_argmax, mask = to_host((*scores, batch.mask))
        # In float64: a float32 sum over all held-out tokens would lose precision.
        nll -= float(np.sum(logprobs, dtype=np.float64, where=mask))
        num_correct += float(np.sum(is_argmax, dtype=np.float64, where=mask))
        tokens += int(mask.sum())
    return {
        "val/nll": nll / tokens,
        "val/perplexity": math.exp(min(nll / tokens, 700.0)),
        "val/token_accuracy": num_correct / tokens,
        "val/tokens": float(tokens),
        "timing_s/testing": time.perf_counter() - begin,
    }
