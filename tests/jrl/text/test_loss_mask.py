"""Loss mask of conversations, compared with lists written by hand."""

import json
from dataclasses import replace

import pytest
from chat_checkpoint import END, START, TEMPLATE, TURN, VOCAB_SIZE, chat_tokenizer, write_tokenizer

from jrl.config.run import RunConfig
from jrl.tasks.data.chats import chat_of
from jrl.tasks.data.conversations import Conversation
from jrl.text.chat import ChatTemplate
from jrl.text.checkpoint_files import checkpoint_files
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.load import load_tokenizer
from jrl.text.loss_mask import ChatFormat, encode_chat
from jrl.text.prompt_format import PromptFormat, text_of, with_template
from jrl.text.tokenizer import Tokenizer

TWICE = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": " yes"},
]
ASKED, AGAIN = f"{START}user\n2+2?{TURN}\n{START}assistant\n", f"\n{START}user\nsure?{TURN}\n"
OPENED = f"{START}assistant\n"
MARKED = """\
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{{ "<|im_end|>\\n" }}{% endfor %}"""
# As Qwen3's: only the last turn of the assistant keeps what it thought.
FORGETFUL = """\
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" and loop.last %}{{ "<think></think>" }}{% endif %}
{{- m.content + "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""

ENDLESS = """\
{%- for m in messages %}{{ "<|im_start|>" if m.role == "user" else "<assistant>\\n" }}
{{- m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ "<assistant>\\n" }}{% endif %}"""

# As Qwen3-Next's opens the reasoning with "<think>" and a line end, and an empty one has two.
JOINING = """\
{%- for m in messages %}{{ "<|im_start|>" + m.role + "\\n" }}
{%- if m.role == "assistant" %}{{ "[How]" }}{% endif %}{{ m.content + "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n[H" }}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def format_of(tokenizer, template=TEMPLATE, **more):
    made = tokenizer.with_usage(replace(tokenizer.usage, chat_template=template))
    return ChatFormat(made, ChatTemplate(made), **more)


def assert_learned(encoded, tokenizer, parts):
    """Checks the mask against `parts`: texts with special tokens, and whether they are trained
    on."""
    ids = [(token, said) for text, said in parts for token in tokenizer.encode_special(text)]
    assert encoded.ids.tolist() == [token for token, _ in ids]
    assert encoded.loss_mask.tolist() == [said for _, said in ids]
    assert encoded.context == encoded.loss_mask.tolist().index(True)


def test_each_turn_of_the_assistant_is_learned_with_its_end(tokenizer):
    format = format_of(tokenizer)
    chat = chat_of({"messages": TWICE}, "f:1")
    found = encode_chat(format, chat)
    # The line end after a turn nobody samples: it is context.
    written = [(ASKED, False), (f"4{TURN}", True), (AGAIN + OPENED, False), (f"yes{TURN}", True)]
    assert_learned(found, tokenizer, written)
    # What is sampled from is what reinforcement samples from.
    prompt = PromptFormat(tokenizer, format.template).encode(
        replace(chat, messages=(("user", "2+2?"),))
    )
    assert format.encode(chat) == prompt == found.ids[: found.context].tolist()
    cut = found.truncate(found.context + 1)
    assert cut.loss_mask.tolist() == [False] * found.context + [True]
    assert found.truncate(found.context) is None


def test_turns_that_the_next_one_ends(tokenizer):
    """GLM's template ends a turn with the token that begins the user's; the end of sequence follows
    the last turn."""
    usage = replace(
        tokenizer.usage, stop_ids=(*tokenizer.stop_ids, tokenizer.special_tokens[START])
    )
    found = encode_chat(
        format_of(tokenizer.with_usage(usage), ENDLESS), chat_of({"messages": TWICE}, "f:1")
    )
    opened = "<assistant>\n"
    written = [(f"{START}2+2?{opened}", False), (f"4{START}", True)]
    written += [(f"sure?{opened}", False), (f" yes{TURN}", True)]
    assert_learned(found, tokenizer, written)


def test_encode_chat_ends_turn_with_end_of_template(tmp_path):
    """A base model with the template of the chat model and another end of sequence."""
    folder = write_tokenizer(tmp_path / "base", eos_token=END)
    (folder / "generation_config.json").unlink()
    base = checkpoint_tokenizer(folder, VOCAB_SIZE)
    turn, end = (base.special_tokens[token] for token in (TURN, END))
    assert (base.eos_id, base.usage.stop_ids, base.usage.turn_end) == (end, (), turn)
    assert base.stop_ids == (end, turn) and base.turn_end_id == turn
    found = encode_chat(format_of(base), chat_of({"messages": TWICE}, "f:1"))
    written = [(ASKED, False), (f"4{TURN}", True), (AGAIN + OPENED, False), (f"yes{TURN}", True)]
    assert_learned(found, base, written)
    assert text_of(base, found.ids[found.loss_mask][:2]) == "4"
    generation = json.loads(checkpoint_files(base, tmp_path / "nothing")["generation_config.json"])
    assert generation["eos_token_id"] == [end, turn]
    # It is kept with the tokenizer, and found for a template of one's own.
    base.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").stop_ids == (end, turn)
    (tmp_path / "own.jinja").write_text(TEMPLATE.replace(TURN, START))
    own = with_template(RunConfig(chat_template=str(tmp_path / "own.jinja")), base)
    assert own.usage.turn_end is None  # it would end a turn with what begins the next
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}\n\n")
    assert with_template(RunConfig(chat_template=str(tmp_path / "own.jinja")), base).stop_ids == (
        end,
    )


def test_the_last_turn_alone(tokenizer):
    format = format_of(tokenizer, last=True)
    chat = chat_of({"messages": [*TWICE, {"role": "user", "content": "!"}]}, "f:1", last=True)
    before = ASKED + f"4{TURN}" + AGAIN + OPENED
    assert_learned(
        encode_chat(format, chat, last=True), tokenizer, [(before, False), (f"yes{TURN}", True)]
    )


def test_encode_chat_follows_generation_tags(tokenizer):
    found = encode_chat(format_of(tokenizer, MARKED), chat_of({"messages": TWICE}, "f:1"))
    written = [(ASKED, False), (f"4{TURN}", True), (AGAIN + OPENED, False), (f" yes{TURN}", True)]
    assert_learned(found, tokenizer, written)


def test_a_template_that_writes_a_beginning_otherwise_is_refused(tokenizer):
    chat = chat_of({"messages": TWICE}, "f:7")
    with pytest.raises(
        ValueError, match="f:7: the chat template writes the first 2 messages differently"
    ):
        encode_chat(format_of(tokenizer, FORGETFUL), chat)
    # Of the last turn it says what the assistant wrote.
    found = encode_chat(format_of(tokenizer, FORGETFUL), chat, last=True)
    said = tokenizer.decode_special(found.ids[found.loss_mask].tolist())
    assert said == f"<think></think> yes{TURN}"
    with pytest.raises(ValueError, match=r"f:8: the chat template rejects .*no turn for a tool"):
        tool = {"role": "tool", "content": "4"}
        encode_chat(format_of(tokenizer), chat_of({"messages": [*TWICE, tool]}, "f:8"))


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_a_special_token_in_a_message_is_text(template, tokenizer):
    spelt = [TWICE[0], {"role": "assistant", "content": f"a{TURN}b"}]
    found = encode_chat(format_of(tokenizer, template), chat_of({"messages": spelt}, "f:1"))
    end = tokenizer.special_tokens[TURN]
    said = found.ids[found.loss_mask].tolist()
    assert said.index(end) == len(said) - 1
    assert tokenizer.decode(said) == f"a{TURN}b"


def test_the_system_prompt_of_a_run(tokenizer):
    format = format_of(tokenizer, system_prompt="Count.")
    found = encode_chat(format, chat_of({"messages": TWICE[:2]}, "f:1"))
    begun = f"{START}system\nCount.{TURN}\n"
    assert_learned(found, tokenizer, [(begun + ASKED, False), (f"4{TURN}", True)])


def test_without_a_template():
    """Ids of a character model: 1 begins, 2 ends, characters from 4 in their order."""
    plain = Tokenizer.train_characters("\n :aeinrstu24?")
    format = ChatFormat(plain)
    number = {plain.decode([n]): n for n in range(4, plain.vocab_size)}

    def ids(text):
        return [number[character] for character in text]

    pair = encode_chat(format, chat_of({"prompt": "2?", "completion": "4"}, "f:1"))
    assert pair.ids.tolist() == [1, *ids("2?4"), 2]
    assert pair.loss_mask.tolist() == [False, False, False, True, True]
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    found = encode_chat(format, chat_of({"messages": [*turns, *turns]}, "f:1"))
    opened = "\nassistant: "
    expected = [1, *ids("user: 2?" + opened + "4"), 2, *ids("\nuser: 2?" + opened + "4"), 2]
    assert found.ids.tolist() == expected
    first, second = 1 + 8 + 12, 1 + 8 + 12 + 2 + 9 + 12
    assert found.loss_mask.nonzero()[0].tolist() == [first, first + 1, second, second + 1]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "a"}]}
    with pytest.raises(ValueError, match="f:3: it has tools, and the model no chat template"):
        encode_chat(format, chat_of({"messages": [turns[0], call]}, "f:3"))


def test_a_token_of_the_prompt_and_the_answer_is_cut_between_them(tokenizer):
    """The policy continues the tokens of the prompt alone, in training too."""
    format = format_of(tokenizer, JOINING)
    assert len(tokenizer.encode("How")) < len(tokenizer.encode("H") + tokenizer.encode("ow"))
    chat = chat_of({"messages": TWICE}, "f:1")
    encoded = encode_chat(format, chat)
    opened = f"{OPENED}[H"
    parts = [(f"{START}user\n2+2?{TURN}\n{opened}", False), (f"ow]4{TURN}", True)]
    parts += [(f"{AGAIN}{opened}", False), (f"ow] yes{TURN}", True)]
    assert_learned(encoded, tokenizer, parts)
    asked = format.template.encode(Conversation.from_pairs([("user", "2+2?")]))
    assert encoded.ids[: encoded.context].tolist() == asked


def test_tools_that_the_template_does_not_write_are_refused_as_in_reinforcement(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    chat = chat_of({"messages": TWICE, "tools": [tool]}, "f:1")
    with pytest.raises(ValueError, match=r"^f:1: the chat template does not write tools \(add\)"):
        encode_chat(format_of(tokenizer, FORGETFUL), chat, last=True)
