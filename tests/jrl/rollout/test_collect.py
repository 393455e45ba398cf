"""A step's completions: prompts in, text out, verdicts counted, groups filtered."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from chat_checkpoint import START, TURN, chat_tokenizer
from small_runs import (
    GROUP_SIZE,
    PROMPT_LENGTH,
    PROMPTS,
    RESPONSE_LENGTH,
    small_recipe,
    small_setup,
)

from jrl.recipes import RECIPES
from jrl.rollout.generate import Rollout
from jrl.tasks import REASONS, Example, Verdict
from jrl.text.chat import ChatTemplate
from jrl.text.prompt_format import PromptFormat
from jrl.text.prompts import UNREADABLE, encode_answers, encode_prompts, text_of
from jrl.trainer import collect as collecting
from jrl.trainer.collect import Completions, collect, described, sample
from jrl.trainer.state import initial_weights

TIME = PROMPT_LENGTH + RESPONSE_LENGTH


def test_prompts_are_padded_on_the_left():
    setup = small_setup()
    tokens, valid = encode_prompts(
        setup.format, [Example("2=", ""), Example("0120=", "")], setup.prompt_length
    )
    begin = [setup.tokenizer.bos_id]
    pad = setup.tokenizer.pad_id
    ids = setup.tokenizer.encode
    assert tokens.tolist() == [[pad] * 3 + begin + ids("2="), begin + ids("0120=")]
    assert valid.tolist() == [[False] * 3 + [True] * 3, [True] * 6]
    with pytest.raises(
        ValueError, match=r"'01201=' has 7 tokens .*prompt_length=6: raise --prompt"
    ):
        encode_prompts(setup.format, [Example("01201=", "")], setup.prompt_length)


def test_answers_end():
    setup = small_setup()
    tokens, mask = encode_answers(
        setup.tokenizer, [Example("", "2="), Example("", "0120")], setup.response_length
    )
    end = [setup.tokenizer.eos_id]
    pad = setup.tokenizer.pad_id
    ids = setup.tokenizer.encode
    assert tokens.tolist() == [ids("2=") + end + [pad] * 2, ids("0120") + end]
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    with pytest.raises(ValueError, match=r"'01201' has 6 tokens .*response_length=5: raise --resp"):
        encode_answers(setup.tokenizer, [Example("", "01201")], setup.response_length)


def test_special_tokens_inside_a_completion_show():
    tokenizer = small_setup().tokenizer
    one, two = tokenizer.encode("12")
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id]
    for token in special:
        assert text_of(tokenizer, np.array([one, token, two])) == f"1{UNREADABLE}2"
        assert text_of(tokenizer, np.array([one, two, token])) == f"12{UNREADABLE}"
    end = tokenizer.eos_id
    assert text_of(tokenizer, np.array([one, two, end])) == "12"
    assert text_of(tokenizer, np.array([one, end, end])) == f"1{UNREADABLE}"
    assert text_of(tokenizer, np.array([end])) == ""
    assert text_of(tokenizer, np.array([], int)) == ""


def test_samples_of_the_policy():
    """One real call: what the arrays, the texts and the verdicts say is one thing."""
    setup = small_setup()
    weights = fresh_weights(setup)
    collected = collect(setup, weights, step=3, cursor=8)
    kept = collected.kept
    assert collected.cursor == 8 + PROMPTS
    assert kept.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [setup.task.train(8 + i // GROUP_SIZE) for i in range(PROMPTS * GROUP_SIZE)]
    assert kept.examples == expected
    assert kept.rollout.tokens.shape == (8, TIME)
    assert kept.lengths.tolist() == kept.rollout.mask.sum(axis=1).tolist()
    for row, text in enumerate(kept.texts):
        ids = kept.rollout.tokens[row][kept.rollout.mask[row]]
        ended = ids[-1] == setup.tokenizer.eos_id
        assert ended != kept.rollout.truncated[row]
        assert len(text) == len(ids) - int(ended)
    assert kept.verdicts == setup.task.verify(kept.examples, kept.texts)
    assert sum(collected.metrics[f"verifier/{reason}"] for reason in REASONS) == 8
    assert collected.seconds.keys() == {"timing_s/gen", "timing_s/reward"}
    again = collect(setup, weights, step=3, cursor=8)
    assert again.kept.texts == kept.texts
    jax.tree.map(np.testing.assert_array_equal, again.kept.rollout, kept.rollout)
    assert collect(setup, weights, step=4, cursor=8).kept.texts != kept.texts


class Script:
    """Stands for `sample`: the n-th prompt drawn gets the n-th pair of scores."""

    def __init__(self, scores):
        self.scores = list(scores)
        self.examples: list[Example] = []
        self.keys: list[bytes] = []

    def __call__(self, setup, decoder, weights, examples, key, seconds):
        seconds["timing_s/gen"] = seconds.get("timing_s/gen", 0.0) + 1.0
        first = len(self.examples)
        self.examples += examples
        self.keys.append(np.asarray(jax.random.key_data(key)).tobytes())
        rows = len(examples) * decoder.copies
        mask = np.zeros((rows, TIME), bool)
        mask[:, PROMPT_LENGTH : PROMPT_LENGTH + 3] = True
        numbers = np.zeros((rows, TIME), np.float32)
        scores = [score for pair in self.scores[first : len(self.examples)] for score in pair]
        reasons = {1.0: "correct", 0.5: "partial", 0.0: "wrong"}
        return Completions(
            rollout=Rollout(
                tokens=np.zeros((rows, TIME), np.int32),
                valid=mask.copy(),
                mask=mask,
                logprobs=numbers,
                policy_logprobs=numbers,
                truncated=np.zeros(rows, bool),
            ),
            groups=np.repeat(np.arange(len(examples), dtype=np.int32), decoder.copies),
            examples=[example for example in examples for _ in range(decoder.copies)],
            texts=[f"{first + row // decoder.copies}" for row in range(rows)],
            verdicts=[Verdict(score, reasons[score]) for score in scores],
            lengths=mask.sum(axis=1).astype(np.int32),
        )


GOOD, PARTIAL, ALL, NONE = (1.0, 0.0), (0.0, 0.5), (1.0, 1.0), (0.0, 0.0)


@cache
def never_asked():
    """A policy whose completions are scripted."""
    setup = small_setup()
    return fresh_weights(setup)


def scripted(monkeypatch, scores, recipe):
    script = Script(scores)
    monkeypatch.setattr(collecting, "sample", script)
    setup = small_setup(recipe)
    return setup, script, collect(setup, never_asked(), 2, 100)


@pytest.mark.parametrize("name", RECIPES)
def test_dynamic_sampling_refills(monkeypatch, name):
    scores = [NONE, GOOD, ALL, PARTIAL, NONE, NONE, GOOD, ALL, GOOD, GOOD, GOOD, NONE]
    recipe = small_recipe(name, dynamic_sampling=True)
    setup, script, collected = scripted(monkeypatch, scores, recipe)
    # Three rounds of four prompts, of which the informative ones come first, in order.
    assert collected.cursor == 100 + 12
    assert script.examples == [setup.task.train(100 + i) for i in range(12)]
    assert len(set(script.keys)) == 3
    assert collected.kept.texts == [str(i) for i in (1, 1, 3, 3, 6, 6, 8, 8)]
    assert collected.kept.scores.tolist() == [1, 0, 0, 0.5, 1, 0, 1, 0]
    groups = collected.kept.groups.reshape(-1, 2)
    assert (groups[:, 0] == groups[:, 1]).all() and len(set(groups[:, 0])) == 4
    assert collected.kept.rollout.mask.sum() == 8 * 3
    expected = {
        "train/num_gen_batches": 3,
        "dynamic_sampling/prompts_generated": 12,
        "dynamic_sampling/prompts_kept": 4,
        "dynamic_sampling/filtered": 0.5,
        "dynamic_sampling/gave_up": 0,
        # Of everything that was generated, not of what was kept.
        "verifier/correct": 5 + 2 * 2,
        "verifier/partial": 1,
        "verifier/wrong": 14,
        "verifier/unparsable": 0,
        "verifier/timeout": 0,
        "verifier/error": 0,
    }
    assert collected.metrics == expected
    assert collected.seconds["timing_s/gen"] == 3.0


def test_dynamic_sampling_stops_when_it_has_enough(monkeypatch):
    _, _, collected = scripted(monkeypatch, [GOOD, GOOD, PARTIAL, GOOD], small_recipe("dapo"))
    assert collected.cursor == 104
    assert collected.metrics["train/num_gen_batches"] == 1
    assert collected.metrics["dynamic_sampling/filtered"] == 0


def test_dynamic_sampling_gives_up(monkeypatch):
    scores = [NONE, GOOD, ALL, NONE, NONE, NONE, ALL, PARTIAL]
    recipe = small_recipe("dapo", max_generation_rounds=2)
    _, _, collected = scripted(monkeypatch, scores, recipe)
    assert collected.cursor == 108
    assert collected.metrics["train/num_gen_batches"] == 2
    assert collected.metrics["dynamic_sampling/gave_up"] == 1
    assert collected.metrics["dynamic_sampling/prompts_kept"] == 2
    assert collected.metrics["dynamic_sampling/filtered"] == 0.75
    kept = collected.kept
    assert kept.texts == [str(i) for i in (1, 1, 7, 7, 0, 0, 2, 2)]
    # What fills up the batch does not count, though it has been written and scored.
    assert kept.rollout.mask.any(axis=1).tolist() == [True] * 4 + [False] * 4
    assert kept.lengths.tolist() == [3] * 8
    assert kept.record(7)["length"] == 3
    assert sum(collected.metrics[f"verifier/{reason}"] for reason in REASONS) == 16


def test_nothing_informative_at_all(monkeypatch):
    recipe = small_recipe("dapo", max_generation_rounds=1)
    _, _, collected = scripted(monkeypatch, [NONE, ALL, NONE, NONE], recipe)
    assert not collected.kept.rollout.mask.any()
    assert collected.metrics["dynamic_sampling/prompts_kept"] == 0
    assert collected.metrics["dynamic_sampling/gave_up"] == 1


@pytest.mark.parametrize("name", RECIPES)
def test_without_it_recipes_take_what_comes(monkeypatch, name):
    recipe = small_recipe(name, dynamic_sampling=False)
    _, _, collected = scripted(monkeypatch, [NONE, ALL, GOOD, NONE], recipe)
    assert collected.cursor == 104
    assert collected.kept.rollout.mask.all(axis=1).sum() == 0
    assert collected.kept.rollout.mask.any(axis=1).all()
    assert collected.metrics.keys() == {f"verifier/{reason}" for reason in REASONS}


def test_take_keeps_rows_whole(monkeypatch):
    _, _, collected = scripted(monkeypatch, [NONE, ALL, GOOD, NONE], small_recipe())
    rows = np.array([5, 2])
    taken = collected.kept.take(rows)
    assert taken.texts == ["2", "1"]
    assert taken.scores.tolist() == [0.0, 1.0]
    assert taken.groups.tolist() == [2, 1]
    assert taken.record(0)["prompt"] == collected.kept.record(5)["prompt"]


def test_rows_to_look_at_are_of_more_than_one_prompt(monkeypatch):
    _, _, collected = scripted(monkeypatch, [GOOD] * PROMPTS, small_recipe())
    kept = collected.kept
    wide = replace(kept, groups=np.array([5, 5, 5, 5, 2, 2, 2, 2]))  # as filled up they may fall
    assert kept.shown(4) == [0, 1, 2, 3]
    assert wide.shown(4) == [0, 1, 4, 5]
    assert wide.shown(6) == [0, 1, 2, 3, 4, 5]
    assert replace(kept, groups=np.zeros(8, np.int32)).shown(3) == [0, 1, 2]
    assert kept.shown(99) == list(range(8))


def test_a_sample_keeps_its_gold_answer(monkeypatch):
    setup, _, collected = scripted(monkeypatch, [GOOD] * PROMPTS, small_recipe())
    record = described(setup, collected.kept, 2)
    assert record == collected.kept.record(2)
    example = setup.task.train(101)
    assert (record["prompt"], record["answer"]) == (example.prompt, example.answer)


def test_a_sample_of_a_chat_checkpoint_reads_as_a_conversation(monkeypatch, tmp_path):
    _, _, collected = scripted(monkeypatch, [GOOD] * PROMPTS, small_recipe())
    tokenizer = chat_tokenizer(tmp_path)
    prompt = PromptFormat(tokenizer, ChatTemplate(tokenizer), "Add.").encode(Example("1+1?", "2"))
    written = [*tokenizer.encode("It is 2."), tokenizer.eos_id]
    pad = tokenizer.pad_id
    tokens = np.array([[pad, *prompt, *written, pad]] * 8, np.int32)
    valid = np.arange(tokens.shape[1]) % (tokens.shape[1] - 1) > 0
    rollout = replace(collected.kept.rollout, tokens=tokens, valid=np.tile(valid, (8, 1)))
    setup = small_setup(tokenizer=tokenizer)
    record = described(setup, replace(collected.kept, rollout=rollout), 3)
    assert record["conversation"] == (
        f"{START}system\nAdd.{TURN}\n{START}user\n1+1?{TURN}\n{START}assistant\nIt is 2.{TURN}"
    )


def test_sample_counts_its_time():
    setup = small_setup()
    weights = fresh_weights(setup)
    examples = [setup.task.train(i) for i in range(PROMPTS)]
    drawn = sample(setup, decoder_of(setup), weights, examples, setup.randomness.key("rollout", 0))
    assert len(drawn.texts) == PROMPTS * GROUP_SIZE
