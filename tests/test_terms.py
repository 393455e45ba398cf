"""Terms: private words only get fewer, and pages have the terms that people search for.

`tests/terms.json` has how often each private word occurs in the names and in the prose of the
library and on its pages, and how many docstrings open with a question word. A count may only fall:

    python -m tests.test_terms

writes down what is there now, if nothing has risen. `tests/constructions.json` has how often each
construction that makes a sentence hard to read occurs per 10,000 words of docstrings and comments
of the library, of the pages, and of docstrings and comments of the tests: upper bounds.
"""

import ast
import io
import json
import math
import re
import sys
import tokenize
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_name("terms.json")
BOUNDS = Path(__file__).with_name("constructions.json")
PACKAGES = ("jrl", "moe", "sharding")
DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMMENT = re.compile(r"(?m)(?:^|\s)# .*$")
QUESTIONS = ("What", "Whether", "How", "Which", "Where", "Who", "Whose", "When", "Why")

PROSE = {
    "seat (slot)": r"\bseat(s|ed|ing)?\b",
    "shelf (output buffer)": r"\bshel(f|ves|ved?)\b",
    "gone on with (continued)": r"\b(gone|go|goes|going) on with\b",
    "luck (RNG key)": r"\bluck\b",
    "twin (reference implementation)": r"\btwins?\b",
    "pulls at (output gradient)": r"\bpulls? at\b",
    "nothing orders (independent)": r"\bnothing orders\b",
    "lies, stands (is)": r"\b(lies|stands|lie)\b",
    "anew (again)": r"\banew\b",
    "made again (recomputed)": r"\b(made|computed|run) again\b",
    "under way (in flight)": r"\bunder way\b",
    "undecided (entropy)": r"\bundecided\b",
    "likeliest (argmax)": r"\blikeliest\b",
    "wire (communication dtype)": r"\bwires?\b",
    "room (capacity)": r"\broom\b",
    "gold (reference answer)": r"\bgold\b",
    "can be had (is available)": r"\b(can|cannot|is|are|be) had\b",
    "asked for (requested)": r"\basked for\b",
    "knows (supports)": r"\bknows?\b",
    "nobody (no one)": r"\bnobody\b",
    "some other's (another's)": r"\bothers'",
    "rewards to come (returns)": r"\brewards to come\b",
    "filled up (padded)": r"\bfilled up\b",
    "given up (donated)": r"\bg(ive|iven|ives) up\b",
    "to the bit (bitwise)": r"\bto the bit\b",
    "what holds (invariants)": r"\bwhat holds\b",
    "belongings (metadata)": r"\bbelongings?\b",
    "turned by (rotated)": r"\bturned by\b",
}
CONSTRUCTIONS = {
    "that of, those of (the noun)": r"\b(that|those) of\b",
    "where it, where there is, ... (if)": (
        r"\bwhere (it|there|they|this|that|these|no|none|nothing|not|one|an?|all|both|each|any)\b"
    ),
    "without one, without any, without a": r"\bwithout (one|any|an?)\b",
    ", which is, which are, which has": r", which (is|are|has|have|it)\b",
}
"""Constructions of hard sentences, with what stands in their place in a plain one."""
STEP = 0.5
"""A bound is the rate, rounded up to a multiple of this, so that a paragraph may come or go."""
NAMES = {
    *("given", "found", "known", "own", "whole", "parts", "told", "met", "taken", "made", "kept"),
    *("place", "places", "turns", "halves", "sides", "marks", "drawn", "apart", "together"),
    *("alone", "several", "alike", "copies", "said", "pull", "inward", "seating", "seat"),
    *("arrivals", "shelf", "luck", "likeliest", "undecided", "belongings", "carried", "wire"),
    *("wires", "room", "twin", "gold", "nobody", "standing"),
}
"""Words that say nothing of what a name holds, or say it in a word of our own."""
KEPT_NAMES = {
    "the field's own word": {
        *("max_turns", "truncated_turns", "turns", "per_turn_rewards"),  # of a dialogue
        *("num_turns", "trained_turns"),
        *("cache_copies", "plan_cache_copies", "rank_copies", "max_copies"),  # of memory
        *("start_copies", "wait_for_copies", "in_place"),
        *("connection_made", "pull"),  # asyncio's, JAX's
    },
    "a flag": {"activation_wire", "gradient_wire", "value_clip_sides"},
    "a field of checkpoints or of public classes": {"parts", "inward", "full_marks", "sides"},
}
"""Names that have such a word and stay, by the reason."""

REQUIRED = {
    "training.md": (
        "asynchronous rollouts",
        "continuous batching",
        "dynamic sampling",
        "gradient accumulation",
        "gradient clipping",
        "importance sampling",
        "kv cache",
        "master weights",
        "mixed precision",
        "off-policy",
        "partial rollouts",
        "prefix sharing",
        "reference model",
        "router replay",
        "sampling temperature",
        "weight decay",
    ),
    "layouts.md": (
        "context (sequence) parallel",
        "data parallel",
        "expert parallel",
        "moe parallel folding",
        "pipeline parallel",
        "tensor parallel",
    ),
    "dispatch.md": ("all-to-all", "token dispatch"),
    "pipeline.md": ("ring attention",),
    "remat.md": ("gradient checkpointing",),
    "checkpoints.md": (
        "auxiliary loss",
        "chat template",
        "hugging face",
        "load balancing",
        "lora",
        "rope",
        "sliding window",
    ),
    "conversations.md": ("environment", "multi-turn", "tool call", "tool calling"),
    "rewards.md": ("custom reward", "dataset", "reward model"),
    "several_machines.md": ("multi-host", "multi-node"),
    "serving.md": ("continuous batching", "openai"),
    "sft.md": ("loss mask", "packing", "supervised fine-tuning"),
    "faults.md": ("fault detection", "minder"),
    "evaluation.md": ("evaluation", "pass@k"),
    "glossary.md": ("replay buffer", "rotary position embedding", "importance sampling"),
}
"""Terms that people search for, by the page that treats them, in lower case."""


@cache
def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(node: ast.AST) -> str | None:
    """The name that a node gives to a function, class, argument or variable."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        name = node.name
    elif isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    else:
        return None
    return name.strip("_").lower()


@cache
def counts() -> dict[str, int]:
    """How often each of what is counted occurs now."""
    found = dict.fromkeys([f"prose: {word}" for word in PROSE], 0)
    found |= {"question openings": 0}
    prose = [path.read_text() for path in pages()]
    for path in sources():
        text = path.read_text()
        tree = ast.parse(text)
        prose += COMMENT.findall(text)
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                docstring = ast.get_docstring(node, clean=False)
                if docstring:
                    prose.append(docstring)
                    found["question openings"] += docstring.split()[0].strip(",.:") in QUESTIONS
    everything = "\n".join(prose).lower()
    for word, pattern in PROSE.items():
        found[f"prose: {word}"] = len(re.findall(pattern, everything))
    return found


@pytest.mark.slow
def test_private_words_and_question_openings_only_get_fewer():
    recorded = json.loads(RECORD.read_text())
    assert counts().keys() == recorded.keys(), "write it down: python -m tests.test_terms"
    assert not risen(recorded, counts()), "docs/glossary.md has the field's words"


def sentences(path: Path) -> str:
    """The prose of a file, in one line: a page without code, or docstrings and comments."""
    text = path.read_text()
    if path.suffix == ".md":
        return " ".join(re.sub(r"(?ms)^ *```.*?^ *```", "", text).split())
    prose = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            prose.append(token.string.lstrip("#"))
    return " ".join(" ".join(prose).split())


def rates(paths: Iterable[Path]) -> tuple[dict[str, float], list[str]]:
    """Each construction per 10,000 words, and the ten files with most of them."""
    prose = {path.relative_to(ROOT): sentences(path) for path in paths}
    words = sum(len(text.split()) for text in prose.values())
    occurrences = {
        path: {name: len(re.findall(c, text, re.I)) for name, c in CONSTRUCTIONS.items()}
        for path, text in prose.items()
    }
    worst = sorted(occurrences, key=lambda path: -sum(occurrences[path].values()))[:10]
    return (
        {name: 1e4 * sum(n[name] for n in occurrences.values()) / words for name in CONSTRUCTIONS},
        [f"{path}: {list(occurrences[path].values())}" for path in worst],
    )


def groups() -> dict[str, list[Path]]:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    return {"library": sources(), "pages": pages(), "tests": tests}


@pytest.mark.slow
@pytest.mark.parametrize("group", groups())
def test_constructions_per_10000_words_stay_within_bounds(group):
    bounds = json.loads(BOUNDS.read_text())[group]
    here, worst = rates(groups()[group])
    assert not risen(bounds, here), "\n".join(["most of " + str(list(CONSTRUCTIONS)), *worst])


@pytest.mark.parametrize(
    ("sentence", "construction"),
    [
        ("The mean, not that of\n    the batch.", 0),
        ("Zero where there is no mask.", 1),
        ("A prompt Without any answer.", 2),
        ("The key, which is (batch, length).", 3),
    ],
)
def test_rates_counts_a_construction_in_docstring_and_comment(
    tmp_path, monkeypatch, sentence, construction
):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "module.py"
    comment = " ".join(sentence.split())
    path.write_text(f'x = 1\n"""{sentence}"""\ny = "that of"  # {comment}\n')
    counted, worst = rates([path])
    words = len(sentences(path).split())
    assert [round(rate * words / 1e4) for rate in counted.values()] == [
        2 * (i == construction) for i in range(len(CONSTRUCTIONS))
    ]
    assert worst[0].startswith("module.py: ")


@pytest.mark.slow
def test_names_are_in_the_words_of_the_field():
    stays = set().union(*KEPT_NAMES.values())
    private = [
        f"{path.relative_to(ROOT)}:{node.lineno} {name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := name_of(node)) and NAMES & set(name.split("_")) and name not in stays
    ]
    assert not private, "docs/glossary.md has the field's words"


@pytest.mark.parametrize(("page", "terms"), REQUIRED.items())
def test_pages_have_the_terms_that_people_search_for(page, terms):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / page).read_text().lower())
    assert [term for term in terms if term not in text] == []


def rounded_up(rate: float) -> float:
    return math.ceil(rate / STEP) * STEP


def risen(recorded: dict[str, float], here: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {k: (recorded[k], n) for k, n in here.items() if n > recorded.get(k, n)}


def write(path: Path, recorded: dict, here: dict, above: dict) -> None:
    """Writes the counts to a file, if none has risen."""
    if above:
        print(f"these have risen, and are not written down: {above}", file=sys.stderr)
    elif here != recorded:
        path.write_text(json.dumps(here, indent=1) + "\n")


def main() -> None:
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    write(RECORD, recorded, counts(), words := risen(recorded, counts()))
    bounds = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    here = {
        group: {name: rounded_up(rate) for name, rate in rates(paths)[0].items()}
        for group, paths in groups().items()
    }
    above = {group: r for group, n in here.items() if (r := risen(bounds.get(group, {}), n))}
    write(BOUNDS, bounds, here, above)
    sys.exit(bool(words or above))


if __name__ == "__main__":
    main()
