"""Conversations become the tokens that `transformers` makes of them (`record_chats.py`), for chat
templates of many families and a tokenizer of each kind; and what is learned of them."""

import json
from pathlib import Path

import pytest
from chat_kinds import BEGIN, DAY, KINDS, SPECIAL, TEMPLATES, kinds_of, write
from tiers import full_but

from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.located import escape_text
from jrl.text.loss_mask import ChatFormat, encode_chat
from jrl.text.prompt_format import PromptFormat

RECORDED = json.loads(Path(__file__).with_name("chats.json").read_text(encoding="utf-8"))
TALKS, FOUND, SPELLED = (RECORDED[name] for name in ("talks", "found", "spelled"))
VOCAB_SIZE = 600
CASES = [(template, kind) for template in TEMPLATES for kind in kinds_of(template)]
# Each template with one kind of tokenizer, and one template with each kind.
QUICK = [(template, "bytes") for template in TEMPLATES] + [("chatml", kind) for kind in KINDS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The format with a template and a kind of tokenizer."""
    folder = tmp_path_factory.mktemp("kinds")

    def of(template, kind):
        place = write(folder / f"{template}-{kind}", kind, template)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jrl.text.json_tokenizer.today", lambda: DAY)
            tokenizer = checkpoint_tokenizer(place, VOCAB_SIZE)
        return ChatFormat(tokenizer, ChatTemplate(tokenizer), last=True)

    return of


def ids_of(text):
    return [int(number) for number in text.split()]


def talk(name):
    return [{"role": role, "content": content} for role, content in TALKS[name]]


@pytest.mark.parametrize(("template", "kind"), full_but(CASES, *QUICK))
def test_tokens_and_turns(made, template, kind):
    format = made(template, kind)
    tokenizer = format.tokenizer
    for name, recorded in FOUND[f"{template} {kind}"].items():
        messages = talk(name)
        if recorded is None:
            with pytest.raises(ValueError, match="the chat template rejects the messages"):
                encode_chat(format, chat_of({"messages": messages}, "f:1", last=True), last=True)
            continue
        before = [tokenizer.bos_id] if recorded["begun"] else []
        whole = [*before, *ids_of(recorded["whole"])]
        prompt = recorded["prompt"]
        prompt = (
            whole[: len(before) + prompt] if isinstance(prompt, int) else before + ids_of(prompt)
        )
        pairs = Conversation.from_pairs(TALKS[name][:-1])
        assert format.template.encode(pairs) == prompt, name
        if "turn" not in recorded:
            continue
        begin, end = (None if n is None else n + len(before) for n in recorded["turn"])
        found = encode_chat(format, chat_of({"messages": messages}, "f:1", last=True), last=True)
        if end is None:  # nothing ends a turn: the end of sequence does
            whole, end = [*whole, tokenizer.turn_end_id], len(whole) + 1
        assert found.ids.tolist() == whole[:end], name
        assert found.loss_mask.tolist() == [begin <= place < end for place in range(end)], name
        assert found.context == begin, name


@pytest.mark.parametrize(("template", "kind"), full_but(CASES, *QUICK))
def test_the_token_that_ends_a_turn(made, template, kind):
    tokenizer = made(template, kind).tokenizer
    end = FOUND[f"{template} {kind}"]["one"]["end"]
    assert tokenizer.usage.turn_end == end
    assert end is None or end in tokenizer.stop_ids
    assert tokenizer.turn_end_id == (tokenizer.eos_id if end is None else end)


@pytest.mark.parametrize(("template", "kind"), full_but(CASES, *QUICK))
def test_all_turns_end_and_the_last_is_as_alone(made, template, kind):
    """The first of two turns, if the template writes the first messages as in the whole."""
    format = made(template, kind)
    tokenizer, chat = format.tokenizer, chat_of({"messages": talk("two")}, "f:1")
    try:
        found = encode_chat(format, chat)
    except ValueError as error:
        assert "writes the first 2 messages differently" in str(error)
        assert template in ("deepseek_v3", "qwen3", "qwen3_next", "glm4_moe")
        return
    last = encode_chat(format, chat, last=True)
    assert found.ids.tolist() == last.ids.tolist()
    assert found.loss_mask[last.loss_mask].all() and found.loss_mask.sum() > last.loss_mask.sum()
    said = tokenizer.decode_special(found.ids[found.loss_mask & ~last.loss_mask].tolist())
    assert "many pens" in said and "How" not in said and "Be" not in said
    ended = set(found.ids[found.loss_mask & ~last.loss_mask].tolist()) & set(tokenizer.stop_ids)
    # Two templates end all turns but the last by another token, which no config.json names here.
    assert bool(ended) == (template not in ("gpt_oss", "olmo3", "glm4_moe"))


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_a_text_are_text(made, kind):
    """As in `transformers` with ``split_special_tokens``, for special tokens only."""
    tokenizer = made("chatml", kind).tokenizer
    for text, recorded in SPELLED[kind].items():
        mark = "\ue000"
        located = tokenizer.encode_special_spans(
            escape_text(text, tokenizer.special_tokens, mark), mark
        )
        if mark in escape_text(text, tokenizer.special_tokens, mark):
            assert located.ids == ids_of(recorded), text
        assert not set(located.ids) & {tokenizer.special_tokens[token] for token in SPECIAL}
        # Beside one that is meant: the same text, and the one token.
        both = tokenizer.encode_special_spans(
            "<|user|>" + escape_text(text, tokenizer.special_tokens, mark), mark
        )
        assert both.ids[0] == tokenizer.special_tokens["<|user|>"]
        assert not set(both.ids[1:]) & {tokenizer.special_tokens[token] for token in SPECIAL}


@pytest.mark.parametrize("kind", KINDS)
def test_places_cover_the_text(made, kind):
    """Spans of the tokens cover the text, in order."""
    tokenizer = made("chatml", kind).tokenizer
    text = "<|im_start|>user\n  How many é\t早 \U0001f58a pens?<|im_end|>\n"
    plain = tokenizer.encode_special_spans(text)
    assert plain.ids == tokenizer.encode(text)
    for located in (plain, tokenizer.encode_special_spans("\ue000" + text, "\ue000")):
        assert located.ids == plain.ids
        assert (located.begins[1:] >= located.begins[:-1]).all()
        assert located.begins[0] == 0 and located.ends[-1] == len(text)
        covered = {
            place
            for b, e in zip(located.begins, located.ends, strict=True)
            for place in range(b, e)
        }
        assert covered == set(range(len(text)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_beginning_of_sequence_comes_once(made, kind):
    """A beginning that the template wrote is not repeated, in prompts and in training."""
    tokenizer = made("inst", kind).tokenizer
    written = f"{BEGIN}[INST] How many? [/INST]"
    format = PromptFormat(tokenizer)
    for text in (written, "How many?"):
        ids = tokenizer.with_prefix(tokenizer.encode(text))
        begin = tokenizer.special_tokens[BEGIN]
        assert ids.count(begin) == int(bool(tokenizer.prefix) or text is written)
        chat = chat_of({"text": text}, "f:1")
        assert encode_chat(format, chat).ids.tolist() == [*ids, tokenizer.eos_id]


@pytest.mark.parametrize(("template", "kind"), full_but(CASES, *QUICK))
def test_answer_follows_end_of_turn(made, template, kind):
    """Prompt, sampled turn with its end, and answer concatenate to the whole."""
    format = made(template, kind)
    tokenizer, written = format.tokenizer, TALKS["two"]
    if tokenizer.usage.turn_end is None or template in ("olmo3", "gpt_oss"):
        return  # no token ends a turn, or the last by another than those before it
    try:
        after = format.template.answer(
            Conversation.from_pairs(written[:2]), Conversation.from_pairs(written[2:3]).turns
        )
    except ValueError:
        return
    whole = format.template.encode(Conversation.from_pairs(written[:3]))
    assert whole[len(whole) - len(after) :] == after
    assert whole[len(whole) - len(after) - 1] == tokenizer.turn_end_id
