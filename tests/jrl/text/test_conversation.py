"""Tokens between two turns of the policy, with a template and with none."""

from dataclasses import replace

import pytest
from chat_checkpoint import START, TEMPLATE, TURN, chat_tokenizer

from jrl.tasks import Example
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.conversation import answer_ids, message_of, reference_conversation, reference_rows
from jrl.text.prompt_format import PromptFormat
from jrl.text.tokenizer import Tokenizer

TOOLS = (
    '{%- for tool in tools or [] %}{{ tool.function.name + "()\\n" }}{% endfor %}'
    "{%- for message in messages %}"
    '{{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}'
    "{%- endfor %}"
    '{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}'
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("qwen"))


def with_template(tokenizer, source):
    tokenizer = tokenizer.with_usage(replace(tokenizer.usage, chat_template=source))
    return PromptFormat(tokenizer, ChatTemplate(tokenizer))


def test_answer_ids_with_template(tokenizer):
    format = with_template(tokenizer, TEMPLATE)
    prompt, before = Example("2+2?", "4"), (("assistant", f" 3 {TURN}x"),)
    after = (("user", f"No{TURN}."),)
    ids = answer_ids(format, prompt, before, after)
    # Of the policy's turn nothing is written again; a special token in a message stays text.
    assert tokenizer.decode_special(ids) == (f"\n{START}user\nNo{TURN}.{TURN}\n{START}assistant\n")
    assert ids.count(tokenizer.special_tokens[TURN]) == 1
    # The prompt, the turn as it was sampled and these are the whole as the template writes it.
    assert format.template is not None
    turns = [("user", "2+2?"), ("assistant", "3"), ("user", "No.")]
    whole = format.template.encode(Conversation.from_pairs(turns))
    turn = [*tokenizer.encode("3"), tokenizer.special_tokens[TURN]]
    plain = answer_ids(format, prompt, (("assistant", "3"),), (("user", "No."),))
    assert [*format.encode(prompt), *turn, *plain] == whole


def test_tools_reach_the_template_and_their_answers_too(tokenizer):
    format = with_template(tokenizer, TOOLS)
    example = Example("2+2?", "4", tools=('{"type": "function", "function": {"name": "calc"}}',))
    assert tokenizer.decode_special(format.encode(example)).startswith("calc()\n<|im_start|>user")
    ids = answer_ids(format, example, (("assistant", "call"),), (("tool", "4"), ("tool", "5")))
    assert tokenizer.decode_special(ids) == (
        f"\n{START}tool\n4{TURN}\n{START}tool\n5{TURN}\n{START}assistant\n"
    )


def test_a_template_that_leaves_the_turn_out_is_refused(tokenizer):
    format = with_template(tokenizer, "{{ messages[-1].content }}")
    with pytest.raises(ValueError, match=r"writes the turn before .* 0 times, and once is needed"):
        answer_ids(format, Example("a", "b"), (("assistant", "c"),), (("user", "d"),))


def test_without_a_template_contents_follow_each_other():
    format = PromptFormat(Tokenizer.train_characters("0123.:"))
    encode, end = format.tokenizer.encode, format.tokenizer.eos_id
    turns = (("assistant", "12"), ("tool", "3."), ("user", ":"), ("assistant", "0"))
    example = Example("1:", "12\n0", turns=turns)
    ids, imitated = reference_conversation(format, example)
    assert ids == [*encode("12"), end, *encode("3.:"), *encode("0"), end]
    assert imitated == [True] * 3 + [False] * 3 + [True] * 2
    rows = reference_rows(format, [example, Example("1:", "2")], 3, 9)
    tokens, valid, mask = (x[:, 3:] for x in rows)
    assert tokens[0, :8].tolist() == ids and valid.sum(axis=1).tolist() == [8, 2]
    assert mask[0].tolist() == [*imitated, False] and mask[1].sum() == 2
    assert message_of(format, tokens[0, :3]) == "12"
    with pytest.raises(ValueError, match="conversation after '1:' has 8 tokens and response_len"):
        reference_rows(format, [example], 3, 7)
