"""Display of the network's input: the first conversation of a run, and the tokens that end a
turn."""

from collections.abc import Iterable
from typing import SupportsInt

from rich.console import Console
from rich.text import Text

from jrl.tasks.data.chats import Chats
from jrl.tasks.mixture import has_environments
from jrl.text.prompt_format import example_tools, text_of_row
from jrl.trainer.setup.setup import Setup
from jrl.trainer.supervised.step import training_chats


def print_first_input(setup: Setup, console: Console) -> None:
    """Prints the first training conversation with special tokens, and its tokens in the loss mask;
    or the first prompt, if a chat template formats it."""
    if setup.rows is not None:
        assert isinstance(setup.task, Chats)
        chat = setup.rows.encoded[training_chats(setup.task, 0, 1)[0].index]
        _print(setup, console, "The first conversation as the network reads it", chat.ids)
        _print(setup, console, "Its tokens in the loss", chat.ids[chat.loss_mask])
    elif setup.format.template is not None:
        ids = setup.format.encode(setup.task.train(0))
        _print(setup, console, "The first prompt as the network reads it", ids)
    for line in (turn_ends(setup), tools_called(setup)):
        if line is not None:
            console.print(Text(line), highlight=False, soft_wrap=True)


def turn_ends(setup: Setup) -> str | None:
    """Description of the tokens that end a turn of the assistant, and of the chat template's own
    one; None without a template."""
    template, tokenizer = setup.format.template, setup.tokenizer
    if template is None:
        return None
    token_texts = {token: text for text, token in tokenizer.special_tokens.items()}
    names = [token_texts.get(token, str(token)) for token in tokenizer.stop_ids]
    template_turn_end = tokenizer.usage.turn_end
    if template_turn_end is not None:
        template_end = token_texts[template_turn_end]
        other_ends = [name for name in names if name != template_end]
        also = f"; {' and '.join(other_ends)} end them too" if other_ends else ""
        return f"turns end with {template_end}, as the chat template writes them{also}"
    closing = template.turn_suffix
    ending = f"{closing!r}, which is not a token," if closing else "no end-of-turn token"
    return f"the chat template writes {ending} behind a turn: turns end with {' or '.join(names)}"


def tools_called(setup: Setup) -> str | None:
    """Description of the tool-call format of the first prompt; None without tools or a template,
    and where no environment answers a call."""
    format = setup.format.tool_format
    if setup.rows is not None or format is None or not has_environments(setup.task):
        return None
    tool_names = example_tools(setup.task.train(0))
    return (
        f"tools ({', '.join(tool_names)}) are called in the format {format.name}"
        if tool_names
        else None
    )


def _print(setup: Setup, console: Console, title: str, ids: Iterable[SupportsInt]) -> None:
    console.print(title, style="bold")
    text = text_of_row(setup.tokenizer, [int(token) for token in ids])
    console.print(Text(text), highlight=False, soft_wrap=True)
