"""The limit of one turn: it is cut there, its environment is told, and the conversation goes on."""

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import small_run, small_setup
from talks import RESPONSE, Echo, Echoing, LateHost, echo, talked, talking_setup, turns_of
from three_updates import random_weights

from jrl.processes.agreement import to_host
from jrl.trainer.scoring import logprobs_of
from jrl.trainer.summary import conversation_metrics

TURN = 3


class Hearing(Echo):
    """Keeps what its environments are told."""

    def __init__(self):
        self.heard = []

    def environment(self, most):
        return Ear(most, self.heard)


class Ear(Echoing):
    def __init__(self, most, heard):
        super().__init__(most)
        self._heard = heard

    def step(self, message):
        self._heard.append(dict(message))
        return super().step(message)


def own_turns(completion):
    """The tokens of each turn of the policy."""
    turns, response = turns_of(completion), completion.trajectory.response
    begins = [0, *(end for _, end in turns.answers)]
    ends = [*(begin for begin, _ in turns.answers), len(response)]
    return [response[begin:end] for begin, end in zip(begins, ends, strict=True)]


@pytest.fixture(scope="module")
def definition():
    return Hearing()


@pytest.fixture(scope="module")
def setup(definition):
    return talking_setup(echo(kind=lambda: definition), turn_length=TURN)


@pytest.fixture(scope="module")
def weights(setup):
    return random_weights(setup, setup.model)


@pytest.fixture(scope="module")
def collected(setup, weights):
    return talked(setup, weights)


@pytest.mark.slow
def test_no_turn_is_longer_and_the_conversation_goes_on(setup, collected):
    eos, encode = setup.tokenizer.eos_id, setup.tokenizer.encode
    cut = gone_on = 0
    for completion in collected.completions:
        turns, response = turns_of(completion), completion.trajectory.response
        assert completion.length <= RESPONSE and turns.limit == RESPONSE
        assert completion.trajectory.request.max_new_tokens == RESPONSE
        for number, (own, text) in enumerate(
            zip(own_turns(completion), turns.policy_messages, strict=True)
        ):
            assert len(own) <= TURN
            whole = own[-1] == eos
            last = number == len(turns.policy_messages) - 1
            # Only the end of the whole response cuts a turn that is not the limit's.
            assert (number in turns.truncated_turns) == (not whole and len(own) == TURN) or last
            cut += number in turns.truncated_turns
            if number < len(turns.answers):
                begin, end = turns.answers[number]
                answer = encode("h" * (1 + len(text) % 3) + ">")
                # The end that the policy did not write comes with the answer.
                assert response[begin:end].tolist() == ([] if whole else [eos]) + answer
                gone_on += not whole
    assert cut > 5 and gone_on > 5


@pytest.mark.slow
def test_the_environment_is_told_which_turn_was_cut(definition, collected):
    talks = [turns_of(completion) for completion in collected.completions]
    told = [message for message in definition.heard if message.get("truncated")]
    assert len(told) == sum(len(turns.truncated_turns) for turns in talks) > 0
    assert all(message["truncated"] is True for message in told)
    for turns in talks:
        flags = [
            message.get("truncated", False)
            for message in turns.records
            if message["role"] == "assistant"
        ]
        assert [number for number, flag in enumerate(flags) if flag] == list(turns.truncated_turns)


@pytest.mark.slow
def test_what_is_drawn_is_what_is_drawn_without_a_limit_up_to_the_cut(weights, collected):
    whole = talked(talking_setup(), weights)
    for one, other in zip(collected.completions, whole.completions, strict=True):
        first = own_turns(one)[0]
        assert first.tolist() == own_turns(other)[0][:TURN].tolist()


@pytest.mark.slow
def test_the_trainer_gives_the_sampled_tokens_the_same_probabilities(setup, weights, collected):
    batch = collected.batch
    found = logprobs_of(setup.networks.policy.objective, weights, batch.tokens, batch.valid)[0]
    # Float32 over rows of thirty tokens, prefilled again at each turn.
    difference = jnp.where(batch.mask, found - batch.old_logprobs, 0.0)
    assert float(jnp.abs(difference).max()) < 2e-5
    host = to_host(batch)
    for row, completion in enumerate(collected.completions):
        own = np.concatenate(own_turns(completion))
        assert host.tokens[row][host.mask[row]].tolist() == own.tolist()


@pytest.mark.slow
def test_rewards_of_turns_that_were_cut_lie_on_their_last_token(collected):
    for completion in collected.completions:
        turns = turns_of(completion)
        for (place, _), (begin, _) in zip(turns.rewards, turns.answers, strict=False):
            assert place == begin - 1


@pytest.mark.slow
def test_they_are_counted(collected):
    found = conversation_metrics(collected.completions)
    cut = [len(turns_of(completion).truncated_turns) for completion in collected.completions]
    assert found["conversation/cut_turns"] == np.mean(cut) > 0


@pytest.mark.slow
def test_what_is_drawn_depends_neither_on_slots_nor_on_when_answers_come(weights, collected):
    late = talking_setup(echo(host=LateHost), slots=3, turn_length=TURN)
    again = talked(late, weights)
    for one, other in zip(collected.completions, again.completions, strict=True):
        assert one.trajectory.response.tolist() == other.trajectory.response.tolist()
        assert (
            turns_of(one).truncated_turns == turns_of(other).truncated_turns
            and one.verdict == other.verdict
        )


def test_tasks_of_one_turn_have_no_such_limit():
    with pytest.raises(ValueError, match="turn_length=3 bounds the turns of conversations, and"):
        small_setup(run=small_run(turn_length=3))
    with pytest.raises(ValueError, match="turn_length=0 must be at least 1"):
        small_run(turn_length=0)
