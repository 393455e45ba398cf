"""What `transformers` makes of conversations, for each chat template and kind of tokenizer.

    python tests/jrl/text/record_chats.py           records it, in chats.json beside
    python tests/jrl/text/record_chats.py --check   compares it with the file

Environment: ``pip install transformers==5.23.0 tokenizers jinja2``. It needs nothing of this
repository but `tests/support/chat_kinds.py`.
"""

import json
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import transformers
from transformers.utils import chat_template_utils

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from chat_kinds import DAY, TEMPLATES, kinds_of, write

RECORD = Path(__file__).with_name("chats.json")
ASKED, SAID = "How many pens has she?", "The answer is 7."
TALKS = {
    "one": [("user", ASKED), ("assistant", SAID)],
    "two": [
        *(("user", "How many?"), ("assistant", "many pens")),
        *(("user", "Be brief."), ("assistant", "Count 18!")),
    ],
    "system": [("system", "Count."), ("user", ASKED), ("assistant", SAID)],
    "odd": [("user", "  é\n\nCount  "), ("assistant", "a\t早 pens: \U0001f58a")],
    "thought": [("user", ASKED), ("assistant", "<think>\nmany\n</think>\n\nThe answer")],
}
SPELLED = ("How <|im_end|> many", "</s>The<s>", "<|im_start|>user\n", "a<|end|>  b", "<think>7")
"""Texts that spell special tokens and mean none."""


class Clock(datetime):
    """Stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(DAY)


def talk(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def joined(ids):
    return " ".join(map(str, ids))


def of_talk(tokenizer, messages):
    """Tokens of the whole and of the prompt (their number if the whole begins with them); whether
    the tokenizer adds a beginning; first token of the last turn, the token behind its end, and its
    end. None if the template rejects the conversation."""

    def text(messages, **more):
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)

    try:
        prompt, whole = text(messages[:-1], add_generation_prompt=True), text(messages)
        of_prompt, of_whole = (
            tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True),
            tokenizer.apply_chat_template(messages),
        )
    except Exception:  # a template is a program
        return None
    ids, before = of_whole["input_ids"], of_prompt["input_ids"]
    found = {"whole": joined(ids), "prompt": len(before)}
    if ids[: len(before)] != before:
        found["prompt"] = joined(before)
    begun = tokenizer(whole)["input_ids"]
    assert begun[-len(ids) :] == ids
    found["begun"] = ids[:1] != [tokenizer.bos_token_id] and begun != ids
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    assert encoded["input_ids"] == ids
    if whole.startswith(prompt):
        # Whole characters behind the prompt's end; one that begins before it has a part of both.
        ends = [end for _, end in encoded["offset_mapping"]]
        first = next(n for n, end in enumerate(ends) if end > len(prompt))
        # Some templates write what was thought otherwise.
        content = messages[-1]["content"].strip().split("\n")[-1]
        end = whole.index(content, len(prompt)) + len(content)
        added = set(tokenizer.added_tokens_decoder)
        ends = [n for n in range(encoded.char_to_token(end - 1) + 1, len(ids)) if ids[n] in added]
        found["turn"] = [first, ends[0] + 1 if ends else None]
        found["end"] = ids[ends[0]] if ends else None
    return found


def everything():
    record = {"version": transformers.__version__, "talks": TALKS, "found": {}, "spelled": {}}
    with tempfile.TemporaryDirectory() as folder:
        for template in TEMPLATES:
            for kind in kinds_of(template):
                path = write(Path(folder) / template / kind, kind, template)
                tokenizer = transformers.AutoTokenizer.from_pretrained(path)
                record["found"][f"{template} {kind}"] = {
                    name: of_talk(tokenizer, talk(pairs)) for name, pairs in TALKS.items()
                }
                given = {"add_special_tokens": False, "split_special_tokens": True}
                record["spelled"][kind] = {
                    text: joined(tokenizer(text, **given)["input_ids"]) for text in SPELLED
                }
    return record


def main():
    with patch.object(chat_template_utils, "datetime", Clock):
        record = everything()
    if "--check" in sys.argv:
        before = json.loads(RECORD.read_text(encoding="utf-8"))
        same = before == json.loads(json.dumps(record))
        print("the same" if same else f"differs from what {before['version']} gave")
        return 0 if same else 1
    lines = {name: json.dumps(each, ensure_ascii=False) for name, each in record["found"].items()}
    found = ",\n".join(f"{json.dumps(name)}: {line}" for name, line in lines.items())
    rest = {name: each for name, each in record.items() if name != "found"}
    whole = json.dumps(rest, ensure_ascii=False)[:-1]
    RECORD.write_text(f'{whole},\n"found": {{\n{found}\n}}}}\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
