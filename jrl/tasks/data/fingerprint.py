"""Fingerprint of the records of a task: their number, and a hash of all that is read of them.

A checkpoint has the fingerprint of its run, as a resumed run continues in the middle of a pass over
the same records in the same order (`jrl.runs.provenance`).
"""

import hashlib
import json
from typing import Any

from jrl.tasks.data.prompt_list import PromptList
from jrl.tasks.data.records import to_json_value
from jrl.tasks.mixture import lists_of


def data_fingerprints(task: Any) -> dict[str, dict[str, Any]]:
    """Fingerprint of each list of prompts of a task, by its name; empty for a task that generates
    its prompts."""
    return {prompts.name: fingerprint(prompts) for prompts in lists_of(task)}


def fingerprint(prompts: PromptList) -> dict[str, Any]:
    """Kind and number of the records, and a hash of their contents in the order of the list, of
    those that are trained on and those that are held out."""
    digest = hashlib.blake2b(digest_size=16, person=b"jrl records")
    for side in prompts.sides:
        for example in side:
            content = prompts.content_of(example)
            text = json.dumps(content, default=_to_json, skipkeys=True)
            digest.update(hashlib.blake2b(text.encode(), digest_size=16).digest())
        digest.update(b"side")
    size = sum(map(len, prompts.sides))
    return {"kind": prompts.kind, "records": size, "hash": digest.hexdigest()}


def _to_json(value: Any) -> Any:
    """Converts a value of a record that JSON cannot hold, to one that is the same in each run."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    try:
        return to_json_value(value)
    except TypeError:
        return type(value).__name__
