"""What a supervised update learns: by a plain oracle, packed or not, on one device or several."""

import json
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_runs import MICRO
from jax.sharding import PartitionSpec as P
from programs import on_mesh
from three_updates import gradient_of, random_weights

from jrl.config.run import RunConfig
from jrl.processes.agreement import to_host
from jrl.recipes import Sft
from jrl.trainer.learner.update import count, policy_loss
from jrl.trainer.setup.chat_rows import training_chats
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.step import update_rows
from jrl.trainer.supervised import MAX_ROWS_PER_BIN, heldout_loss
from moe import model
from moe.config import Model
from moe.placement import specs

BATCH = 8


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Eleven conversations, of one turn or two, from 4 tokens to 37."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = [
        {"prompt": "ab"[: 1 + n % 2] * n + "?", "answer": "c" * (1 + n % 3)} for n in range(1, 9)
    ]
    said = {"role": "assistant", "content": "cab"}
    for n in range(3):
        asked = [{"role": "user", "content": "?" * (1 + n)}, said]
        lines.append({"messages": [*asked, {"role": "user", "content": "b"}, said]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{path}"


def setup_of(task, layout="dp1", **run):
    recipe = Sft(batch=BATCH, micro_batch=4, learning_rate=1e-2, max_grad_norm=1e9)
    config = replace(MICRO, vocab_size=25, load_balance_coef=0.0, router_z_coef=0.0, num_layers=2)
    run = {"model": "micro", "steps": 3, "warm_start_steps": 0, "layout": layout, **run}
    return build_setup(RunConfig(task=task, **run), recipe, model=config)


def updated(setup):
    """The first gradient and the metrics of an update on the first conversations."""
    chats = training_chats(setup.task, 0, BATCH)
    batch = setup.rows.batch(chats, BATCH, setup.tokenizer.pad_id, setup.mesh)
    of_rows = setup.rows.counts(chats) if setup.networks.packs else None
    network = setup.networks.policy
    learner = network.init(random_weights(setup, setup.model))
    learner, metrics = update_rows(
        network, learner, batch, of_rows, max_rows_per_bin=MAX_ROWS_PER_BIN
    )
    return gradient_of(learner, setup.mesh, setup.model.num_layers), to_host(metrics)


@pytest.fixture(scope="module")
def packed(task):
    return updated(setup_of(task))


@pytest.mark.slow
def test_the_loss_is_that_of_a_plain_oracle(task, packed):
    """Each conversation alone, its softmax in float64, the mean over all learned tokens."""
    setup = setup_of(task)
    weights, mesh, config = random_weights(setup, setup.model), setup.mesh, setup.model
    run = on_mesh(
        lambda w, t: model.next_token_logits(w, t, t >= 0, Model(config, mesh))[0][None],
        mesh,
        (specs(Model(config, mesh)), P(mesh.dp)),
        P(tuple(axis for axis in mesh.axes if axis not in mesh.dp), mesh.dp),
    )
    losses, likeliest = [], []
    longest = max(len(own.ids) for own in setup.rows.encoded.values())
    for chat in training_chats(setup.task, 0, BATCH):
        own = setup.rows.encoded[chat.index]
        # What follows changes nothing before it.
        ids = np.pad(own.ids, (0, longest - len(own.ids)))
        logits = np.asarray(run(weights, jnp.asarray(ids[None])), np.float64).reshape(longest, -1)
        for at in np.flatnonzero(own.loss_mask):
            before = logits[at - 1] - logits[at - 1].max()
            losses.append(np.log(np.exp(before).sum()) - before[ids[at]])
            likeliest.append(before.argmax() == ids[at])
    # Logits are float32.
    np.testing.assert_allclose(packed[1].loss, np.mean(losses), rtol=1e-6)
    found = heldout_loss(
        setup.networks.policy.objective,
        weights,
        training_chats(setup.task, 0, BATCH),
        setup.rows,
        4,
        setup.tokenizer.pad_id,
    )
    np.testing.assert_allclose(found["val/nll"], np.mean(losses), rtol=1e-6)
    assert found["val/perplexity"] == np.exp(found["val/nll"])
    assert found["val/token_accuracy"] == np.mean(likeliest)
    assert found["val/tokens"] == len(losses)


def test_prompts_have_no_gradient(task):
    setup = setup_of(task)
    chats = training_chats(setup.task, 0, BATCH)
    batch = setup.rows.batch(chats, BATCH, setup.tokenizer.pad_id, setup.mesh)

    def loss(logprobs):
        nothing = jnp.zeros(logprobs.shape)
        length = setup.response_length
        return policy_loss(setup.recipe, logprobs, nothing, batch, count(batch), length)[0]

    gradient = jax.grad(loss)(jnp.full(batch.tokens.shape, -2.0))
    learned = np.asarray(batch.mask)
    assert learned.any() and not learned[:, : setup.rows.before].any()
    expected = np.where(learned, np.float32(-1) / np.float32(learned.sum()), np.float32(0))
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "packing"),
    [
        ("dp1", False),
        ("cp2 tp2 / ep2", None),
        ("pp2", None),
    ],
)
def test_neither_packing_nor_devices_change_it(layout, packing, task, packed):
    setup = setup_of(task, layout, packing=packing)
    assert setup.networks.packs == (packing is None and "pp" not in layout)
    found = updated(setup)
    np.testing.assert_allclose(found[1].loss, packed[1].loss, rtol=1e-6)
    # float32 sums of a few hundred terms in another order: some units in the sixth digit of the
    # largest entries.
    largest = max(np.abs(x).max() for x in jax.tree.leaves(packed[0]))
    chex.assert_trees_all_close(found[0], packed[0], rtol=2e-4, atol=1e-5 * largest)
    chats = training_chats(setup.task, 0, BATCH)
    given = setup.rows, 4, setup.tokenizer.pad_id
    measured = heldout_loss(
        setup.networks.policy.objective, random_weights(setup, setup.model), chats, *given
    )
    np.testing.assert_allclose(measured["val/nll"], packed[1].loss, rtol=1e-6)
