"""Chat templates of the library: their texts, tool calls, loss masks and turn ends."""

import json
import re
from dataclasses import replace

import pytest
from tool_templates import VOCAB_SIZE, tool_tokenizer

from jrl.config.run import RunConfig
from jrl.tasks import Example
from jrl.tasks.data.chats import chat_of
from jrl.tasks.tools.tool import Tool
from jrl.text.chat import ChatTemplate
from jrl.text.conversation import answer_ids
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.loss_mask import ChatFormat, encode_chat
from jrl.text.prompt_format import NAMED_TEMPLATES, PromptFormat, prompt_format, with_template


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


TOOL = Tool.of(add)
CALLS = [
    {"id": f"call0000{n}", "type": "function", "function": {"name": "add", "arguments": arguments}}
    for n, arguments in enumerate(({"a": 1, "b": 2}, {"a": 3, "b": 4}))
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+2 and 3+4?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "add"},
    {"role": "tool", "content": "7", "tool_call_id": "call00001", "name": "add"},
    {"role": "assistant", "content": "3 and 7"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes"},
]
JSON = '{{"name": "add", "{}": {{"a": {}, "b": {}}}{}}}'
HERMES = "\n".join(
    f"<tool_call>\n{JSON.format('arguments', a, b, '')}\n</tool_call>" for a, b in ((1, 2), (3, 4))
)
LLAMA = "; ".join(JSON.format("parameters", a, b, "") for a, b in ((1, 2), (3, 4)))
MISTRAL = ", ".join(
    JSON.format("arguments", a, b, f', "id": "call0000{n}"')
    for n, (a, b) in enumerate(((1, 2), (3, 4)))
)
LEARNED = {
    "hermes": [f"{HERMES}<|im_end|>", "3 and 7<|im_end|>", "Yes<|im_end|>"],
    "llama3": [f"{LLAMA}<|eot_id|>", "3 and 7<|eot_id|>", "Yes<|eot_id|>"],
    "mistral": [f"[TOOL_CALLS] [{MISTRAL}]</s>", " 3 and 7</s>", " Yes</s>"],
}
ANSWERS = {
    "hermes": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n"
    "</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>ipython<|end_header_id|>\n\n3<|eot_id|>"
    "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": "3", "call_id": "call00000"}[/TOOL_RESULTS]'
    '[TOOL_RESULTS] {"content": "7", "call_id": "call00001"}[/TOOL_RESULTS]',
}
FORMATS = {"hermes": "hermes", "llama3": "llama", "mistral": "mistral"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tool_tokenizer(folder, None)
    return folder


@pytest.fixture(params=NAMED_TEMPLATES)
def named(request, tokenizer):
    """Name of a template, and a tokenizer with it."""
    path = tokenizer / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token": "</s>"}))
    run = RunConfig(chat_template=request.param)
    return request.param, with_template(run, checkpoint_tokenizer(tokenizer, VOCAB_SIZE))


def test_tables_have_every_template():
    assert set(NAMED_TEMPLATES) == set(LEARNED) == set(ANSWERS) == set(FORMATS)


def test_named_template_masks_turns_of_assistant_with_calls_and_ends(named):
    name, tokenizer = named
    template = ChatTemplate(tokenizer)
    record = {"messages": MESSAGES, "tools": [TOOL.schema]}
    encoded = encode_chat(ChatFormat(tokenizer, template), chat_of(record, "f:1"))
    decode = tokenizer.decode_special
    turns = [
        decode([token for token, _ in group])
        for group in _groups(encoded.ids.tolist(), encoded.loss_mask.tolist())
    ]
    assert turns == LEARNED[name]
    text = decode(encoded.ids.tolist())
    for shown in ("Be brief.", TOOL.schema["function"]["description"], "1+2 and 3+4?", "Sure?"):
        assert text.count(shown) == 1


def _groups(ids, mask):
    groups = [[]]
    for token, learned in zip(ids, mask, strict=True):
        if learned:
            groups[-1].append((token, learned))
        elif groups[-1]:
            groups.append([])
    return [group for group in groups if group]


def test_named_template_answers_calls_as_it_writes_them(named):
    name, tokenizer = named
    format = prompt_format(RunConfig(chat_template=name), tokenizer)
    assert isinstance(format, PromptFormat) and format.tool_format.name == FORMATS[name]
    tools = (json.dumps(TOOL.schema),)
    example = Example("1+2 and 3+4?", "3 and 7", tools=tools)
    format.check_tools(example)
    said = re.sub(r"(<\|im_end\|>|<\|eot_id\|>|</s>)$", "", LEARNED[name][0])
    replies = (("tool", "3"), ("tool", "7"))
    ids = answer_ids(format, example, (("assistant", said),), replies)
    assert tokenizer.decode_special(ids) == ANSWERS[name]


def test_named_template_needs_tokens_that_end_turns(tmp_path, tokenizer):
    made = checkpoint_tokenizer(tokenizer, VOCAB_SIZE)
    ends = {"<|im_end|>", "<|eot_id|>"}
    kept = {text: token for text, token in made.special_tokens.items() if text not in ends}
    assert len(kept) < len(made.special_tokens)
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        if token["content"] in ends:
            token["content"] = token["content"].replace("<|", "<|no_")
    content["model"]["vocab"] = {
        text.replace("<|", "<|no_") if text in ends else text: number
        for text, number in content["model"]["vocab"].items()
    }
    for path in tokenizer.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    other = checkpoint_tokenizer(tmp_path, VOCAB_SIZE)
    for name in ("hermes", "llama3"):
        with pytest.raises(ValueError, match=rf"chat_template='{name}' ends a turn.*hermes, llama"):
            with_template(RunConfig(chat_template=name), other)


def test_unknown_name_of_template_lists_names(tokenizer):
    made = checkpoint_tokenizer(tokenizer, VOCAB_SIZE)
    with pytest.raises(
        ValueError, match=r"'hermez' cannot be read .* or hermes or llama3 or mistr"
    ):
        with_template(RunConfig(chat_template="hermez"), made)


def test_mistral_rejects_system_and_tools_with_no_user_turn_first(tokenizer):
    run = RunConfig(chat_template="mistral")
    made = with_template(run, checkpoint_tokenizer(tokenizer, VOCAB_SIZE))
    record = {"messages": [MESSAGES[0], MESSAGES[-1]]}
    with pytest.raises(ValueError, match="a user turn comes first"):
        encode_chat(ChatFormat(made, ChatTemplate(made)), replace(chat_of(record, "f:1")))
