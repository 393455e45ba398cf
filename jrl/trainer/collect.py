"""A step's completions: sampled, verified and, where sampling is dynamic, filtered."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.losses import informative_groups
from jrl.processes.agreement import from_first, is_first, several, to_devices, to_host
from jrl.rollout.generate import Decoder, Rollout, generate
from jrl.tasks import REASONS, Example, Verdict
from jrl.text.prompts import conversation, decode_responses, encode_prompts
from jrl.trainer.setup import Setup
from moe.weights import Transformer


@dataclass(frozen=True)
class Completions:
    """Completions with their verdicts, on the host; rows of one group stand together.

    Attributes:
      rollout: arrays with a row per completion.
      groups: ``[batch]`` which completions share a prompt.
      examples: the prompt of each row.
      texts: the completion of each row.
      verdicts: of the task's verifier.
      lengths: ``[batch]`` sampled tokens of each completion, whether or not they count.
    """

    rollout: Rollout[np.ndarray]
    groups: np.ndarray
    examples: list[Example]
    texts: list[str]
    verdicts: list[Verdict]
    lengths: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        return np.array([verdict.score for verdict in self.verdicts], np.float32)

    def record(self, row: int) -> dict[str, str | float | int | bool]:
        """One completion as samples.jsonl holds it."""
        return {
            "prompt": self.examples[row].prompt,
            "answer": self.examples[row].answer,
            "completion": self.texts[row],
            "score": self.verdicts[row].score,
            "reason": self.verdicts[row].reason,
            "length": int(self.lengths[row]),
            "truncated": bool(self.rollout.truncated[row]),
        }

    def shown(self, number: int) -> list[int]:
        """Some rows to look at, in their order: two of a group as long as there are groups."""
        rows = np.arange(len(self.groups))
        begins = np.diff(self.groups, prepend=-1) != 0
        place = rows - np.maximum.accumulate(np.where(begins, rows, 0))
        return sorted(np.argsort(place // 2, kind="stable")[:number].tolist())

    def take(self, rows: np.ndarray) -> "Completions":
        """Some of the rows."""
        return Completions(
            rollout=jax.tree.map(lambda x: x[rows], self.rollout),
            groups=self.groups[rows],
            examples=[self.examples[row] for row in rows],
            texts=[self.texts[row] for row in rows],
            verdicts=[self.verdicts[row] for row in rows],
            lengths=self.lengths[rows],
        )


@dataclass
class Collected:
    """What one step sampled, and how that went.

    Attributes:
      kept: the completions to learn from.
      cursor: training prompts drawn so far, this step's included.
      metrics: of sampling and verification.
      seconds: spent in decoding and in verification.
    """

    kept: Completions
    cursor: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Unverified:
    """Sampled completions whose verdicts are being made, in the background.

    The time that decoding took is known; that of verification is what `verified` waits for.
    """

    def __init__(
        self,
        setup: Setup,
        decoder: Decoder,
        examples: Sequence[Example],
        rollout: Rollout[np.ndarray],
        seconds: dict[str, float],
    ):
        self._rollout, self._seconds, self._copies = rollout, seconds, decoder.copies
        self._texts = decode_responses(
            setup.tokenizer, rollout.tokens, rollout.mask, setup.prompt_length
        )
        self._examples = [example for example in examples for _ in range(decoder.copies)]
        # By the first process: an answer that timed out there did so for all.
        self._verdicts = (
            _in_background(setup.task.verify, self._examples, self._texts) if is_first() else None
        )

    def verified(self) -> Completions:
        """The completions with their verdicts; with several processes a collective."""
        begin = time.perf_counter()
        verdicts = _shared([] if self._verdicts is None else self._verdicts.result())
        waited = time.perf_counter() - begin
        self._seconds["timing_s/reward"] = self._seconds.get("timing_s/reward", 0.0) + waited
        rollout, number = self._rollout, len(self._texts) // self._copies
        return Completions(
            rollout=rollout,
            groups=np.repeat(np.arange(number, dtype=np.int32), self._copies),
            examples=self._examples,
            texts=self._texts,
            verdicts=verdicts,
            lengths=rollout.mask.sum(axis=1).astype(np.int32),
        )


def decode(
    setup: Setup,
    decoder: Decoder,
    weights: Transformer[Array],
    examples: Sequence[Example],
    key: Array,
    seconds: dict[str, float] | None = None,
) -> Unverified:
    """Samples `decoder.copies` completions of each prompt, and begins to have them verified: the
    next may be decoded meanwhile.

    Args:
      weights: the policy on the mesh of training.
      seconds: the time taken is added here, if given.
    """
    seconds = {} if seconds is None else seconds
    begin = time.perf_counter()
    tokens, valid = encode_prompts(setup.format, examples, setup.prompt_length)
    tokens, valid = to_devices((tokens, valid), setup.over_rollout_rows)
    policy = setup.rollout_policy.of(weights)
    rollout = to_host(generate(decoder, policy, tokens, valid, key))
    seconds["timing_s/gen"] = seconds.get("timing_s/gen", 0.0) + time.perf_counter() - begin
    return Unverified(setup, decoder, examples, rollout, seconds)


def described(setup: Setup, completions: Completions, row: int) -> dict[str, Any]:
    """One completion as samples.jsonl holds it; where a chat template made the prompt, with the
    whole conversation as the network read and wrote it."""
    record: dict[str, Any] = completions.record(row)
    if setup.format.template is not None:
        rollout = completions.rollout
        record["conversation"] = conversation(
            setup.tokenizer, rollout.tokens[row], rollout.valid[row]
        )
    return record


def sample(
    setup: Setup,
    decoder: Decoder,
    weights: Transformer[Array],
    examples: Sequence[Example],
    key: Array,
    seconds: dict[str, float] | None = None,
) -> Completions:
    """`decode`, and waits for the verdicts."""
    return decode(setup, decoder, weights, examples, key, seconds).verified()


def _shared(given: list[Verdict]) -> list[Verdict]:
    """The first process's verdicts, in all of them."""
    if not several():
        return given
    sent = from_first([[float(verdict.score), verdict.reason] for verdict in given])
    return [Verdict(score, reason) for score, reason in sent]


def _in_background(
    verify: Callable[[Sequence[Example], Sequence[str]], list[Verdict]],
    examples: Sequence[Example],
    texts: Sequence[str],
) -> "Future[list[Verdict]]":
    """`verify` in a thread that does not keep the process from ending."""
    future: Future[list[Verdict]] = Future()

    def run() -> None:
        try:
            future.set_result(verify(examples, texts))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jrl verification", daemon=True).start()
    return future


def collect(setup: Setup, weights: Transformer[Array], step: int, cursor: int) -> Collected:
    """Completions for one step.

    With dynamic sampling, groups whose scores are all equal teach nothing and are replaced by
    groups of further prompts, for at most `max_generation_rounds` rounds. What is still missing
    then is filled with uninformative groups whose tokens do not count, and the metrics say so.

    Args:
      weights: the policy.
      step: selects the randomness.
      cursor: training prompts drawn before.
    """
    recipe, seconds = setup.recipe, dict[str, float]()
    max_rounds = recipe.max_generation_rounds if recipe.dynamic_sampling else 1
    rounds: list[Completions] = []
    informative: list[np.ndarray] = []
    reasons = Counter[str]()
    for number in range(max_rounds):
        examples = [setup.task.train(cursor + i) for i in range(recipe.prompts)]
        cursor += recipe.prompts
        drawn = sample(
            setup,
            setup.training_decoder,
            weights,
            examples,
            setup.key("rollout", step, number),
            seconds,
        )
        reasons.update(verdict.reason for verdict in drawn.verdicts)
        rounds.append(drawn)
        scores, groups = jnp.asarray(drawn.scores), jnp.asarray(drawn.groups)
        informative.append(np.asarray(informative_groups(scores, groups)))
        if sum(rows.sum() for rows in informative) >= recipe.completions:
            break
    kept, num_informative = _fill(rounds, informative, recipe.completions, recipe.dynamic_sampling)
    metrics = {f"verifier/{reason}": float(reasons[reason]) for reason in REASONS}
    if recipe.dynamic_sampling:
        generated = len(rounds) * recipe.prompts
        found = sum(int(rows.sum()) for rows in informative) // recipe.group_size
        metrics |= {
            "train/num_gen_batches": float(len(rounds)),
            "dynamic_sampling/prompts_generated": float(generated),
            "dynamic_sampling/prompts_kept": num_informative / recipe.group_size,
            "dynamic_sampling/filtered": 1 - found / generated,
            "dynamic_sampling/gave_up": float(num_informative < recipe.completions),
        }
    return Collected(kept, cursor, metrics, seconds)


def _fill(
    rounds: list[Completions], informative: list[np.ndarray], size: int, filtered: bool
) -> tuple[Completions, int]:
    """The first `size` rows, informative ones first where they are `filtered`.

    Returns:
      The rows, and how many of them are informative. Tokens of the others do not count.
    """
    if not filtered:
        return rounds[0], int(informative[0].sum())
    everything = _concatenate(rounds)
    useful = np.concatenate(informative)
    # Stable, so groups stay together and come in the order they were drawn.
    order = np.argsort(~useful, kind="stable")[:size]
    kept = everything.take(order)
    counts = useful[order]
    counted = replace(kept.rollout, mask=kept.rollout.mask & counts[:, None])
    return replace(kept, rollout=counted), int(counts.sum())


def _concatenate(rounds: list[Completions]) -> Completions:
    """Several rounds as one, groups numbered through."""
    per_round = [int(r.groups[-1]) + 1 for r in rounds]
    offsets = np.cumsum([0, *per_round[:-1]]).astype(np.int32)
    return Completions(
        rollout=jax.tree.map(lambda *xs: np.concatenate(xs), *(r.rollout for r in rounds)),
        groups=np.concatenate([r.groups + o for r, o in zip(rounds, offsets, strict=True)]),
        examples=[example for r in rounds for example in r.examples],
        texts=[text for r in rounds for text in r.texts],
        verdicts=[verdict for r in rounds for verdict in r.verdicts],
        lengths=np.concatenate([r.lengths for r in rounds]),
    )
