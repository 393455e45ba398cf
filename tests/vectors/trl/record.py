"""Record what TRL's own losses of distillation compute: python tests/vectors/trl/record.py

It needs TRL and PyTorch, for example `pip install trl torch==2.13.0`, and nothing of this library.
"""

import json
from pathlib import Path

import numpy as np
import torch
import trl
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss
from trl.experimental.server_distillation.server_distillation_trainer import (
    _add_tail_bucket,
    _jsd_divergence,
)
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

FILE = Path(__file__).with_name("distillation.json")
BETAS = (0.0, 0.1, 0.5, 1.0)
TOKENS, VOCAB, WIDTH, TEACHER_WIDTH, K = 4, 7, 3, 5, 3


def drawn() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    arrays = {
        "x": draw.normal(size=(TOKENS, WIDTH)),
        "head": draw.normal(size=(WIDTH, VOCAB)),
        "teacher_x": draw.normal(size=(TOKENS, TEACHER_WIDTH)),
        "teacher_head": draw.normal(size=(TEACHER_WIDTH, VOCAB)),
    }
    arrays = {name: array.astype(np.float32).astype(float) for name, array in arrays.items()}
    arrays["logits"] = arrays["x"] @ arrays["head"]
    arrays["teacher_logits"] = arrays["teacher_x"] @ arrays["teacher_head"]
    arrays["tokens"] = draw.integers(0, VOCAB, TOKENS)
    arrays["weights"] = draw.normal(size=TOKENS)  # of the tokens in the loss of the gradients
    return arrays


def with_gradients(values, leaves: dict[str, torch.Tensor], weights) -> dict:
    grads = torch.autograd.grad((values * torch.tensor(weights)).sum(), [*leaves.values()])
    gradients = dict(zip(leaves, grads, strict=True))
    return {
        "values": values.tolist(),
        "gradients": {name: gradient.tolist() for name, gradient in gradients.items()},
    }


def leaf(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, requires_grad=True)


def jsd(arrays, beta: float) -> dict:
    logits = leaf(arrays["logits"])
    values = GKDTrainer.generalized_jsd_loss(
        logits, torch.tensor(arrays["teacher_logits"]), beta=beta, reduction="none"
    ).sum(-1)
    return with_gradients(values, {"logits": logits}, arrays["weights"])


def top_k(arrays, beta: float) -> dict:
    logits = leaf(arrays["logits"])
    teacher, places = torch.tensor(arrays["teacher_logits"]).log_softmax(-1).topk(K)
    valid = torch.ones_like(teacher, dtype=torch.bool)
    policy, mask = _add_tail_bucket(logits.log_softmax(-1).gather(-1, places), valid)
    values = _jsd_divergence(policy, _add_tail_bucket(teacher, valid)[0], beta, mask).sum(-1)
    return with_gradients(values, {"logits": logits}, arrays["weights"])


def sampled(arrays) -> dict:
    """The gradient of the policy loss with the advantage of the sampled token."""
    logits = leaf(arrays["logits"])
    values = compute_sampled_token_self_distillation_loss(
        logits,
        torch.tensor(arrays["teacher_logits"]),
        torch.tensor(arrays["tokens"]),
        distillation_alpha=1.0,
    )
    return with_gradients(values, {"logits": logits}, arrays["weights"])


def heads(arrays, beta: float, temperature: float) -> dict:
    x, head = leaf(arrays["x"]), leaf(arrays["head"].T)
    teacher = torch.tensor(arrays["teacher_x"]), torch.tensor(arrays["teacher_head"].T)
    values, _ = ChunkedDivergenceFunction.apply(x, head, None, *teacher, None, beta, temperature)
    return with_gradients(values, {"x": x, "head": head}, arrays["weights"])


def main() -> None:
    arrays = drawn()
    document = {
        "trl": trl.__version__,
        "arrays": {name: array.tolist() for name, array in arrays.items()},
        "k": K,
        "temperature": 0.7,
        "sampled": sampled(arrays),
        **{
            name: {str(beta): record(beta) for beta in BETAS}
            for name, record in (
                ("jsd", lambda beta: jsd(arrays, beta)),
                ("top_k", lambda beta: top_k(arrays, beta)),
                ("heads", lambda beta: heads(arrays, beta, 0.7)),
            )
        },
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
