"""Times our estimators and losses beside rlax's and beside the plain sequential forms.

    pip install -e ".[rlax]"
    python benchmarks/objectives.py --rows 256 --time 4096

Every line compares values first and stops if they differ. Then all forms of one function are run
in turn, round after round, so that a busy moment of the machine meets all of them; the least time
of each is printed, and how many times as long the others take. Compilation is left out.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rlax

import jrl


@dataclass(frozen=True)
class Case:
    """One function in several forms, all from the same arguments to the same value."""

    name: str
    forms: dict[str, Callable[..., Any]]
    arguments: tuple[Any, ...]
    tolerance: float = 2e-4


def main() -> None:
    parser = argparse.ArgumentParser(description="Times estimators and losses against rlax's")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--time", type=int, default=4096)
    parser.add_argument(
        "--vocab", type=int, default=512, help="vocabulary size, for functions of logits"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    figures = []
    print(f"jax {jax.__version__}, rlax {rlax.__version__}, [{arguments.rows}, {arguments.time}]")
    print(f"{'function':34}{'form':22}{'ms':>9}{'x ours':>9}{'difference':>13}")
    for case in cases(arguments.rows, arguments.time, arguments.vocab):
        rows = measure(case, arguments.rounds)
        figures += rows
        for row in rows:
            print(
                f"{row['function']:34}{row['form']:22}{row['ms']:9.2f}"
                f"{row['ratio']:9.2f}{row['difference']:13.1e}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Compare the values of all forms, then time them in turn."""
    programs = {name: jax.jit(form) for name, form in case.forms.items()}
    values = {name: np.asarray(p(*case.arguments), float) for name, p in programs.items()}
    ours = next(iter(values))
    differences = {name: float(np.max(np.abs(v - values[ours]))) for name, v in values.items()}
    scale = max(1.0, float(np.max(np.abs(values[ours]))))
    for name, difference in differences.items():
        if not difference <= case.tolerance * scale:
            raise SystemExit(f"{case.name}: {name} differs from {ours} by {difference:.2g}")
    least = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*case.arguments))
            least[name] = min(least[name], time.perf_counter() - start)
    return [
        {
            "function": case.name,
            "form": name,
            "ms": least[name] * 1e3,
            "ratio": least[name] / least[ours],
            "difference": differences[name],
        }
        for name in programs
    ]


def cases(rows: int, time: int, vocab: int) -> list[Case]:
    """The table: advantages on long rows, losses on the same, functions of logits on fewer rows."""
    draw = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(draw.normal(0, scale, shape), jnp.float32)

    rewards, values = normal(rows, time), normal(rows, time)
    # rlax wants the value after the last token, too; 0 says that the response ended.
    and_after = jnp.pad(values, ((0, 0), (0, 1)))
    mask = jnp.ones((rows, time), bool)
    per_token = jnp.asarray(draw.uniform(0.9, 1, (rows, time)), jnp.float32)
    logprobs, advantages = -jnp.abs(normal(rows, time)), normal(rows, time)
    old = logprobs + normal(rows, time, scale=0.3)
    logits, other = normal(rows, 16, vocab), normal(rows, 16, vocab)
    tokens = jnp.asarray(draw.integers(0, vocab, (rows, 16)))

    def ours(implementation: str | None) -> Callable[..., jax.Array]:
        def advantages(rewards, values, and_after, mask, lam):
            return jrl.gae(rewards, values, mask, lam=lam, implementation=implementation)[0]

        return advantages

    def rlax_gae(rewards, values, and_after, mask, lam):
        discount = jnp.ones_like(rewards)
        one = rlax.truncated_generalized_advantage_estimation
        return jax.vmap(one, in_axes=(0, 0, None if jnp.ndim(lam) == 0 else 0, 0))(
            rewards, discount, lam, and_after
        )

    def associative(rewards, values, and_after, mask, lam):
        errors = rewards + and_after[:, 1:] - values
        decay = jnp.broadcast_to(lam, errors.shape)
        combine = lambda a, b: (a[0] * b[0], b[1] + b[0] * a[1])  # noqa: E731 - one formula
        return jax.lax.associative_scan(combine, (decay, errors), reverse=True, axis=1)[1]

    gae_forms = {
        "jrl": ours(None),
        "jrl, scan": ours("scan"),
        "rlax, vmap": rlax_gae,
        "associative scan": associative,
    }

    def clipped(logprobs, old, advantages, mask):
        one = lambda r, a: rlax.clipped_surrogate_pg_loss(r, a, 0.2)  # noqa: E731 - a partial
        return jnp.mean(jax.vmap(one)(jnp.exp(logprobs - old), advantages))

    def squares(values, returns, mask):
        return jnp.mean(rlax.l2_loss(values, returns))

    softmax = rlax.softmax()
    flat = (logits.reshape(-1, vocab), other.reshape(-1, vocab), tokens.reshape(-1))
    return [
        Case("gae, one lam", gae_forms, (rewards, values, and_after, mask, jnp.float32(0.95))),
        Case("gae, lam per token", gae_forms, (rewards, values, and_after, mask, per_token)),
        Case(
            "ppo_loss",
            {"jrl": lambda *a: jrl.ppo_loss(*a)[0], "rlax, vmap": clipped},
            (logprobs, old, advantages, mask),
        ),
        Case(
            "ppo_loss, gradient",
            {
                "jrl": jax.grad(lambda *a: jrl.ppo_loss(*a)[0]),
                "rlax, vmap": jax.grad(clipped),
            },
            (logprobs, old, advantages, mask),
        ),
        Case(
            "value_loss",
            {
                "jrl": lambda v, g, m: jrl.value_loss(v, v, g, m)[0],
                "rlax": squares,
            },
            (values, rewards, mask),
        ),
        Case(
            "entropy_from_logits",
            {
                "jrl": lambda x, _, __: jrl.entropy_from_logits(x),
                "rlax": lambda x, _, __: softmax.entropy(x),
            },
            flat,
        ),
        Case(
            "logprobs_from_logits",
            {
                "jrl": lambda x, _, a: jrl.logprobs_from_logits(x, a),
                "rlax": lambda x, _, a: softmax.logprob(a, x),
            },
            flat,
        ),
        Case(
            "kl_from_logits",
            {
                "jrl": lambda x, y, _: jrl.kl_from_logits(x, y),
                "jrl, chunk_size=128": lambda x, y, _: jrl.kl_from_logits(x, y, chunk_size=128),
                "rlax": lambda x, y, _: rlax.categorical_kl_divergence(x, y),
            },
            flat,
        ),
    ]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
