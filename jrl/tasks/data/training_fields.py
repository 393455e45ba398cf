"""Fields of records and messages that say what is trained on, in the formats of other libraries.

A message that is not trained on has ``TRAINED: False`` after `read_trained`, which removes the
fields of its format:

| field of a message | format | trained on if |
|---|---|---|
| weight | OpenAI, Mistral, Together, Fireworks, OpenChat | 1 |
| train, training | Axolotl | true |
| trainable | Tinker | true |
| loss, loss_scale | ms-swift, XTuner | true, 1 |
| loss_weight | LLaMA-Factory | 1 |
| loss_mask, step_loss_mask | slime | 1 |
| masked | torchtune | false |

Any other field about training is rejected by its name, and so are fields of a record that would
change what is trained on. Errors are raised as in `jrl.tasks.data.fields`.
"""

import re
from collections.abc import Mapping
from typing import Any

from jrl.tasks.data.fields import short

TRAINED = "trained"
"""Field of a message in a conversation, false if it is not trained on; absent otherwise."""
SAYS_TRAINED = {
    **dict.fromkeys(("weight", "train", "training", "trainable", "loss", "loss_scale"), True),
    **dict.fromkeys(("loss_weight", "loss_mask", "step_loss_mask"), True),
    "masked": False,
}
"""Fields that say whether a message is trained on, and their value if it is."""
OF_ASSISTANT = ("loss", "loss_scale")
"""Fields that have no effect on the messages of other roles, as ms-swift defines them."""
ABOUT_TRAINING = re.compile(
    r"(?:^|_)(?:weights?|train(?:ed|ing|able)?|learn|loss|mask(?:ed|s)?|supervised?|ignored?)(?:_|$)",
    re.IGNORECASE,
)
"""Names of fields of a message that are about training."""
UNENDED = {"eot": False, "prefix": True}
"""Fields that leave the turn of a message open (torchtune, Mistral), by the value that does."""
PREFERENCES = ("label", "kto_tag")
"""Fields of a record that are false for a completion that is not wanted (TRL, LLaMA-Factory)."""
TOKENS = ("input_ids", "completion_mask", "assistant_masks")
"""Fields of a record that was tokenized before."""


def read_trained(message: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The message without its fields about training, and with `TRAINED` if they say that it is not
    trained on."""
    remaining: dict[str, Any] = {}
    stated: dict[str, bool] = {}
    for name, value in message.items():
        if name in SAYS_TRAINED and value is not None:
            stated[name] = _says_trained(name, value, location)
        elif ABOUT_TRAINING.search(name) and value not in (None, [], {}, ""):
            raise ValueError(
                f'{location}: field "{name}" is {short(value)}, and is not read: write "train": '
                "true or false, for the message as a whole"
            )
        elif name in UNENDED and value is UNENDED[name]:
            raise ValueError(
                f'{location}: field "{name}" is {short(value)}, which leaves the turn open, and '
                "every turn ends: join it to the next message"
            )
        elif name not in SAYS_TRAINED:
            remaining[name] = value
    if len(set(stated.values())) > 1:
        values = " and ".join(f'"{name}" {short(message[name])}' for name in stated)
        raise ValueError(f"{location}: has {values}, which contradict each other: keep one of them")
    if remaining.get("role") != "assistant":
        for name in stated:
            if stated[name] and name not in OF_ASSISTANT:
                raise ValueError(
                    f'{location}: field "{name}" is {short(message[name])} for a message of role '
                    f"{short(remaining.get('role'))}, and only the assistant's turns are trained "
                    "on: leave it out"
                )
    elif False in stated.values():
        remaining[TRAINED] = False
    return remaining


def is_trained(message: Mapping[str, Any]) -> bool:
    """True unless the record says that the message is not trained on."""
    return message.get(TRAINED, True)


def check_record(record: Mapping[str, Any], location: str, read: tuple[str | None, ...]) -> None:
    """Rejects a record for supervised fine-tuning with a field that would change what is trained
    on; `read` names fields that have another meaning here."""
    fields = {name: value for name, value in record.items() if value is not None}
    for name in read:
        fields.pop(name or "", None)
    for name in SAYS_TRAINED:
        if name in fields and not _says_trained(name, fields[name], location):
            raise ValueError(
                f'{location}: field "{name}" is {short(fields[name])}, so that nothing of the '
                "record is trained on: leave the record out"
            )
    for name in PREFERENCES:
        if fields.get(name) is False:
            raise ValueError(
                f'{location}: field "{name}" is False, which marks a completion that is not '
                "wanted: leave the record out"
            )
    for name in TOKENS:
        if fields.get(name):
            raise ValueError(
                f'{location}: has "{name}" of another tokenizer, and the text is tokenized here: '
                "leave it out of the file"
            )
    masked = fields.get("mask")
    if masked is not None and str(masked).lower() not in ("user", "human"):
        raise ValueError(
            f'{location}: field "mask" is {short(masked)}, and all roles but the assistant are '
            "masked: leave it out"
        )


def _says_trained(name: str, value: Any, location: str) -> bool:
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError(
            f'{location}: field "{name}" is {short(value)}: write 0 or 1, as a message is either '
            "trained on or not"
        )
    return bool(value) is SAYS_TRAINED[name]
