"""The ids of what clients ask: texts that a template wrote, texts alone, conversations."""

import pytest
from chat_checkpoint import START, VOCAB_SIZE, chat_tokenizer, write_tokenizer
from chat_kinds import BEGIN, KINDS, write
from chat_records import RECORDS, TEMPLATE

from jrl.serving.api.fields import ApiError
from jrl.serving.api_request import parse_chat, parse_completion
from jrl.serving.policy import ApiModel
from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.prompt_format import PromptFormat

ASKED = {"role": "user", "content": "How many pens has she?"}


def ids_of(format, asked):
    served = ApiModel("m", format, 100, None, 0)
    (row,) = served.prompts(asked)
    return row.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["inst", "marked"])
def test_a_beginning_of_sequence_comes_once_however_it_is_asked_for(kind, template, tmp_path):
    tokenizer = checkpoint_tokenizer(write(tmp_path, kind, template), 600)
    begin = tokenizer.special_tokens[BEGIN]
    with_template = PromptFormat(tokenizer, ChatTemplate(tokenizer))
    alone = PromptFormat(tokenizer)
    chat = ids_of(with_template, parse_chat({"model": "m", "messages": [ASKED]}))
    written = with_template.template.render(Conversation.from_pairs([("user", ASKED["content"])]))
    if kind == "bytes":  # names no beginning
        assert begin not in chat
    else:
        assert written.startswith(BEGIN) and chat.count(begin) == 1
    # The same text as a prompt, to the server and in training with no template.
    for format in (with_template, alone):
        assert ids_of(format, parse_completion({"model": "m", "prompt": written})) == chat
    assert alone.encode(Example(written, "7")) == chat
    # A text that has none is begun where the checkpoint begins texts.
    plain = ids_of(alone, parse_completion({"model": "m", "prompt": ASKED["content"]}))
    assert plain == alone.encode(Example(ASKED["content"], "7"))
    assert plain[: len(tokenizer.prefix)] == tokenizer.prefix
    assert plain.count(begin) == len(tokenizer.prefix)


def test_a_conversation_is_asked_as_the_record_is_in_training(tmp_path):
    """With the arguments of its template."""
    record, prompt, _ = RECORDS["template arguments"]
    tokenizer = chat_tokenizer(tmp_path, chat_template=TEMPLATE)
    format = PromptFormat(tokenizer, ChatTemplate(tokenizer))
    for given, expected in ((record, prompt), ({}, prompt.removesuffix("<think></think>"))):
        body = {"model": "m", "messages": record["messages"]}
        kwargs = given.get("chat_template_kwargs")
        ids = ids_of(format, parse_chat({**body, "chat_template_kwargs": kwargs}))
        assert tokenizer.decode_special(ids) == expected
        assert expected.startswith(START)


def test_prompt_of_ids_refuses_an_id_that_no_token_has(tmp_path):
    path = write_tokenizer(tmp_path)
    tokens = checkpoint_tokenizer(path, VOCAB_SIZE).unused_ids
    padded = checkpoint_tokenizer(path, VOCAB_SIZE + 60)
    assert padded.unused_ids - tokens == {*range(VOCAB_SIZE, VOCAB_SIZE + 60)}
    for token in (VOCAB_SIZE, VOCAB_SIZE + 59, VOCAB_SIZE + 60):
        body = {"model": "m", "prompt": [0, token, 1]}
        with pytest.raises(ApiError, match=f"prompt has {token}, an id that no token"):
            ids_of(PromptFormat(padded), parse_completion(body))
