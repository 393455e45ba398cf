"""Steps that learn from conversations, with what else a run may have."""

import numpy as np
import pytest
from small_runs import fresh_state, one_step, small_recipe, small_run, small_setup
from talks import talking_setup
from three_updates import random_weights

from jrl.processes.agreement import to_host
from jrl.rollout.sampling import Sampling
from jrl.trainer.supervised import supervised_batch


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        ("tppo", {}, "tppo would continue in another step, and their environments are not saved"),
        ("grpo", {"max_staleness": 1}, "max_staleness=1 saves rows in flight, and task="),
    ],
)
def test_what_would_carry_conversations_over_is_refused(name, run, message):
    with pytest.raises(ValueError, match=message):
        talking_setup(recipe=small_recipe(name), **run)


def test_turns_are_bounded_where_there_are_some():
    with pytest.raises(ValueError, match="max_turns=3 bounds the turns of conversations, and"):
        small_setup(run=small_run(max_turns=3))
    with pytest.raises(ValueError, match="max_turns=0 must be at least 1"):
        small_run(max_turns=0)


def test_the_warm_start_imitates_the_policys_turns_alone():
    setup = talking_setup()
    example = setup.task.train(0)
    batch = to_host(supervised_batch(setup, [example], 1))
    encode, end = setup.tokenizer.encode, setup.tokenizer.eos_id
    first, last = example.turns[0][1], example.turns[-1][1]
    imitated = [*encode(first), end, *encode(last), end]
    assert batch.tokens[batch.mask].tolist() == imitated
    assert batch.valid[0, setup.prompt_length :].sum() == len(imitated) + len(encode("h>"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "run"),
    [
        ("dapo", {"router_replay": "R3"}, {}),
        ("ppo", {"group_size": 2, "whiten_advantages": False}, {"packing": True}),
    ],
)
def test_a_step_learns(name, changes, run):
    setup = talking_setup(recipe=small_recipe(name, **changes), **run)
    weights = random_weights(setup, setup.model)
    _, step = one_step(setup, fresh_state(setup, weights))
    metrics = step.metrics
    assert metrics["training/optimizer_steps"] >= 1 and not step.nonfinite
    assert 1 < metrics["conversation/turns"] < 6 and metrics["conversation/answer_tokens"] > 2
    # The trainer gives what was sampled the probability that the sampler did: float32, whichever
    # way the rows were run.
    assert metrics["sampling/k3_kl"] < 1e-7
    record = step.collected.completions[0].record(setup.format)
    assert record["messages"][0]["role"] == "assistant"
    assert len(record["turn_rewards"]) <= sum(m["role"] == "assistant" for m in record["messages"])
    assert np.isfinite(metrics["critic/advantages/max"])


@pytest.mark.slow
def test_attention_and_experts_apart_say_the_same():
    split = {"rollout_engine": "disaggregated", "rollout_split": "tp1 dp1 / ep1"}
    said = []
    for setup in (talking_setup(), talking_setup(layout="dp2", **split)):
        sampler = setup.sampler()
        sampler.engine.load(random_weights(setup, setup.model), 0)
        examples = {number: setup.task.train(number) for number in range(4)}
        said.append([each.text for each in sampler.sample(examples, Sampling(), 2)])
    assert said[0] == said[1]
