"""Parts of a turn: equal however its text is divided, and complete."""

import random

import pytest

from jrl.tasks.answers.reasoning import PAIRS, REASONING, TurnReader, after_reasoning, opens_turn

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


def read(text, sizes=(1,), **options):
    """Reads a text in parts of these sizes: its reasoning, answer and held text."""
    reader, parts, begin = TurnReader(**options), [], 0
    while begin < len(text):
        size = sizes[begin % len(sizes)]
        parts += reader.add(text[begin : begin + size])
        begin += size
    parts += reader.finish()
    of_kind = {
        kind: "".join(part.text for part in parts if part.kind == kind)
        for kind in ("reasoning", "content")
    }
    return of_kind["reasoning"], of_kind["content"], reader.held


CASES = [
    # text, reasoning, content, held
    (f"{ANALYSIS}2+2 is 4.{NEXT}{FINAL}It is 4.<|return|>", "2+2 is 4.", "It is 4.", ""),
    (f"{FINAL}It is 4.", "", "It is 4.", ""),
    (f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>b{NEXT}{FINAL}c", "a\nb", "c", ""),
    (f"{ANALYSIS}unfini", "unfini", "", ""),
    ("<|channel|>anal", "", "", ""),
    ("a <|channel|> is a mark, and no more", "", "a <|channel|> is a mark, and no more", ""),
    (f"{ANALYSIS}a{NEXT}{CALL}", "a", "{}", ""),
    ("[THINK] a\nb [/THINK]\n\n 4 ", "a\nb", "4 ", ""),
    ("<think>a</think>b<think>\nc </think>d", "a\nc", "bd", ""),
    ("<think></think>\n\nHi", "", "Hi", ""),
    ("<think> [/THINK] is a mark </think>4", "[/THINK] is a mark", "4", ""),
    ("<THINK>a</Think>4", "a", "4", ""),
    ("Write `<think>` before it.", "", "Write `<think>` before it.", ""),
    ("Write `<think>", "", "Write `<think>", ""),
    ("`<think>4", "4", "`", ""),
    ("4 </think> 5", "", "4 </think> 5", ""),
    (" 1 < 2 <b>[x]</b>\n", "", " 1 < 2 <b>[x]</b>\n", ""),
    ("<think>a</thin", "a</thin", "", ""),
    ("a <thin", "", "a <thin", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "held"), CASES)
def test_turn_reader_tells_parts_apart(text, reasoning, content, held):
    for sizes in ((1,), (2,), (7, 1, 3), (1000,)):
        assert read(text, sizes) == (reasoning, content, held)


@pytest.mark.parametrize(
    ("text", "options", "reasoning", "content", "held"),
    [
        ("a\n</think>\n4", {"before": "<think>\n"}, "a", "4", ""),
        (f"{FINAL}4", {"before": "<|start|>assistant"}, "", "4", ""),
        ("It is 4.", {"before": "<|start|>assistant"}, "", "It is 4.", ""),
        (f"{ANALYSIS}a{NEXT}{CALL}", {"calls": ()}, "a", "", f"<|start|>assistant{CALL}"),
        ("Look:\n[f()]", {"calls": ("[",)}, "", "Look:", "[f()]"),
        ("Look:\n  [f()]", {"calls": ("[",)}, "", "Look:", "  [f()]"),
        ("a [list]\n", {"calls": ("[",)}, "", "a [list]\n", ""),
        ("a \n<call>{}<think>", {"calls": ("<call>",)}, "", "a", "<call>{}<think>"),
        ("<think><call></think>a", {"calls": ("<call>",)}, "<call>", "a", ""),
        ('{"a": "<think>"}', {"reasons": False}, "", '{"a": "<think>"}', ""),
    ],
)
def test_turn_reader_begins_as_the_prompt_ends_and_holds_calls(
    text, options, reasoning, content, held
):
    for sizes in ((1,), (2,), (7, 1, 3), (1000,)):
        assert read(text, sizes, **options) == (reasoning, content, held)


def test_turn_reader_reads_held_text_that_is_no_call():
    reader = TurnReader(calls=("<call>",))
    parts = reader.add("Use <call> and <think>b</think>c")
    assert reader.held == "<call> and <think>b</think>c"
    parts += reader.finish() + reader.release(reader.held)
    assert [part for part in parts if part.kind == "reasoning"] == [("reasoning", "b")]
    assert "".join(x.text for x in parts if x.kind == "content") == "Use <call> and c"


PIECES = (
    *PAIRS,
    *PAIRS.values(),
    *(ANALYSIS, FINAL, NEXT, "<|message|>", "<|channel|>", "<|return|>", CALL),
    *("a", "b c", "\n", " ", "`", "<", "[f()]", "\n[f()]", "<call>", "{", "<|", "1 < 2"),
)


@pytest.mark.parametrize("calls", [None, ("<call>",), ("[",)])
@pytest.mark.parametrize("seed", range(60))
def test_turn_reader_is_independent_of_the_division(seed, calls):
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=draw.randrange(1, 14)))
    before = draw.choice(["", "", "<think>\n", "<|start|>assistant"])
    whole = read(text, (10**6,), before=before, calls=calls)
    for _ in range(4):
        sizes = [draw.randrange(1, 9) for _ in range(5)]
        assert read(text, sizes, before=before, calls=calls) == whole, (text, before)


@pytest.mark.parametrize("seed", range(60))
def test_turn_reader_loses_no_text_beside_marks(seed):
    draw = random.Random(seed)
    opened, closed = draw.choice(list(PAIRS.items()))
    words = ("one", "two ", "\nthree", "<b>", "4 < 5 ", "`", "")
    texts = ["".join(draw.choices(words, k=3)) + "." for _ in range(5)]
    a, b, c, d, e = texts
    turn = f"{a}{opened}{b}{closed}{c}{opened}{d}{closed}{e}"
    reasoning, content, _ = read(turn, (draw.randrange(1, 9),))
    assert reasoning.split() == f"{b}\n{d}".split()
    assert content == a + c + e


@pytest.mark.parametrize("pair", REASONING)
def test_after_reasoning_is_the_answer_of_the_reader(pair):
    begin, end = pair
    harmony = begin.startswith("<|channel|>")
    head = "<|message|>" if harmony else ""
    for words in (("2", "18"), ("", " 18\n"), (r"\boxed{3}", "so 4"), ("`x`", "")):
        text = f"{begin}{head}{words[0]}{end}{words[1]}"
        assert after_reasoning(text) == words[1]
        assert read(text)[1] == (words[1].lstrip() if words[1].strip() else "")
        assert after_reasoning(text + begin) is None
        assert after_reasoning(f"a{end}{words[1]}") == words[1]


def test_a_call_of_harmony_is_no_answer():
    assert after_reasoning(CALL) is None
    assert after_reasoning(f"{ANALYSIS}a{NEXT}{CALL}") is None
    assert after_reasoning(f"{CALL}{NEXT}{FINAL}4") == "4"


def test_opens_turn_finds_open_mark_of_prompt():
    assert opens_turn("<|im_start|>assistant\n<think>\n") == "<think>\n"
    assert opens_turn("<|end|><|start|>assistant") == "<|start|>assistant"
    assert opens_turn("<|im_start|>assistant\n") == ""
