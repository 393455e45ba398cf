"""Page on tools: its examples, and its list of formats."""

import re

import pytest
from places import ROOT

from jrl.tasks.environments.definition import tools_of
from jrl.tasks.tools.detection import FORMATS

PAGE = (ROOT / "docs" / "conversations.md").read_text(encoding="utf-8")
TOOLS = PAGE[
    PAGE.index("\n## Tool calling\n") : PAGE.index("\n## Environments of other libraries\n")
]
BLOCKS = re.findall(r"(?ms)^```(\w+)\n(.*?)^```", TOOLS)
LISTED = re.split(r"\n(?=\S)", BLOCKS[-1][1].strip())


def test_tools_page_examples_print_as_shown(capsys):
    names = {}
    for (kind, code), (_, output) in zip(BLOCKS[0:4:2], BLOCKS[1:4:2], strict=True):
        assert kind == "python"
        exec(compile(code, "conversations.md", "exec"), names)
        assert capsys.readouterr().out == output
    (schema,) = tools_of(names["Distances"])
    assert schema.startswith('{"type": "function", "function": {"name": "convert"')
    assert names["Distances"]().environment(5).step({"content": "8.0 km"})[1] == 1.0


def test_tools_page_lists_every_format():
    assert {line.split()[0] for line in LISTED} == {format.name for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_calls_reads_calls_of_tools_page(format):
    (entry,) = [line for line in LISTED if line.split()[0] == format.name]
    known = {"f": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    shown = [re.split(r"\s{2,}", line)[-1] for line in entry.splitlines()]
    shown = [text.removesuffix(", the whole turn or its end") for text in shown]
    # Some are said in words.
    calls = [text for text in shown if not text.startswith(("a block", "its", "the"))]
    assert calls or format.name in ("deepseek", "deepseek-v3.1", "tool-code")
    for text in calls:
        found = format.calls(text, known)
        assert [(call.name, call.arguments) for call in found] == [("f", {"x": 1})], text
