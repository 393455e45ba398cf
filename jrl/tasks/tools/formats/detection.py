"""Supported tool-call formats, and detection of the format of a text or a chat template."""

from jrl.tasks.tools.calls import Call, ToolParameters
from jrl.tasks.tools.formats.format import ToolFormat
from jrl.tasks.tools.formats.gemma import FunctionGemma, Gemma4, ToolCode
from jrl.tasks.tools.formats.harmony import MESSAGE, Harmony
from jrl.tasks.tools.formats.llama import Llama
from jrl.tasks.tools.formats.mistral import Mistral, MistralNamed
from jrl.tasks.tools.formats.plain import Plain
from jrl.tasks.tools.formats.pythonic import Olmo, PythonList
from jrl.tasks.tools.formats.sections import DeepSeek, DeepSeekNamed, Kimi
from jrl.tasks.tools.formats.tagged import Glm, Hermes, QwenCoder

PLAIN, HARMONY, HERMES = Plain(), Harmony(), Hermes()
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    *(Kimi(), DeepSeekNamed(), DeepSeek(), Glm(), QwenCoder(), MistralNamed(), Mistral()),
    *(Olmo(), FunctionGemma(), Gemma4(), HERMES, Llama(), PythonList(), ToolCode()),
)
"""Of checkpoints; what is marked more narrowly comes first."""


def detect_formats(template: str) -> list[ToolFormat]:
    """The formats whose marks are in the source of a chat template, the likeliest first."""
    return [each for each in FORMATS if each.matches_template(template)]


def detect_calls(text: str, tools: ToolParameters) -> list[Call]:
    """The calls in a turn of which nothing says in what format they are: of a format that reads all
    that it finds, else of the one that reads most of it, Hermes' before others."""
    if MESSAGE in text:
        return HARMONY.calls(text, tools)
    formats = (HERMES, *(each for each in FORMATS if each is not HERMES), PLAIN)
    attempts = [calls for each in formats if (calls := each.calls(text, tools))]
    return max(attempts, key=_readability, default=[])


def _readability(calls: list[Call]) -> tuple[bool, int]:
    """True if all calls can be read, and the number of those that can."""
    num_readable = sum(not call.error for call in calls)
    return num_readable == len(calls), num_readable
