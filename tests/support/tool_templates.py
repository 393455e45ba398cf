"""Chat templates that call tools, one for each format, with what makes the public ones difficult:
ids that must have nine letters, arguments that are put into a text, one call at a time, contents
that are left out beside calls, answers that name the call before them, ends that differ."""

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jrl.text.chat import with_turn_end
from jrl.text.json_tokenizer import checkpoint_tokenizer
from jrl.text.tokenizer import Tokenizer

BAR, GAP = "\uff5c", "\u2581"
EOS = f"<{BAR}end{GAP}of{GAP}sentence{BAR}>"
STOPS = (
    *("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|return|>", "<|call|>", "</s>", EOS),
    *("<|user|>", "<|observation|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
)
SPECIAL = (
    *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|channel|>", "<|constrain|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|assistant|>", "<|python_tag|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_of_turn>"),
)
VOCAB_SIZE = 320


@dataclass(frozen=True)
class Template:
    """A template of a format.

    Attributes:
      source: of it.
      answered: what it writes behind a turn that has called, for the answer "6".
      cut: what it writes behind a turn that was cut, for the user's "Go on."
    """

    source: str
    answered: str
    cut: str


def _chatml(calls: str, tool: str, tools: str = "{{ tools | tojson }}") -> str:
    return (
        "{% if tools %}{{ '<|im_start|>system\\n' }}" + tools + "{{ '<|im_end|>\\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}" + tool + "{% else %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}" + calls + "{% endfor %}{{ '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


_RESPONSE = (
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
)
_CHATML = (
    "\n<|im_start|>user\n<tool_response>\n6\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
_GO_ON = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def _mistral(call: str, joint: str) -> str:
    return (
        "{% for m in messages | rejectattr('role', 'equalto', 'tool') "
        "| selectattr('tool_calls', 'undefined') %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('conversation roles must alternate') }}{% endif %}{% endfor %}"
        "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}"
        "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
        "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}" + call + "{% endfor %}"
        "{{ " + joint + " }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        "{% else %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}"
        "{{ '[TOOL_RESULTS]' + m.tool_call_id + ' ' + m.content + '[/TOOL_RESULTS]' }}{% endif %}"
        "{% endfor %}"
    )


def _deepseek(call: str) -> str:
    begin, end = f"<{BAR}tool{GAP}calls{GAP}begin{BAR}>", f"<{BAR}tool{GAP}calls{GAP}end{BAR}>"
    return (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user' %}"
        f"{{{{ '<{BAR}User{BAR}>' + m.content + '<{BAR}Assistant{BAR}>' }}}}"
        "{% elif m.role == 'tool' %}{{ '<output>' + m.content + '</output>' }}"
        "{% elif m.tool_calls %}{{ m.content + '"
        + begin
        + "' }}{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}{{ '"
        + end
        + EOS
        + "' }}{% else %}{{ m.content + '"
        + EOS
        + "' }}{% endif %}"
        "{% endfor %}"
    )


_CALL, _SEP, _DONE = (
    f"<{BAR}tool{GAP}{words}{BAR}>" for words in (f"call{GAP}begin", "sep", f"call{GAP}end")
)
_GEMMA_VALUE = (
    "{% macro value(v) %}{% if v is string %}{{ q + v + q }}{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
)


def _gemma(turn: str, end: str, call: str, done: str, quote: str, tool: str) -> str:
    return (
        "{% set q = '" + quote + "' %}" + _GEMMA_VALUE + "{{ tools | tojson if tools else '' }}"
        "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'tool' %}"
        + tool
        + "{% elif m.tool_calls %}{{ '"
        + turn
        + "model\\n' }}{% for c in m.tool_calls %}"
        "{{ '" + call + "call:' + c.function.name + '{' }}"
        "{% for n, v in c.function.arguments.items() %}{{ n + ':' + value(v) }}"
        "{{ ',' if not loop.last }}{% endfor %}{{ '}" + done + "' }}{% endfor %}"
        "{% else %}{{ '" + turn + "' + m.role + '\\n' + m.content + '" + end + "\\n' }}{% endif %}"
        "{% set ns.last = m.role %}{% endfor %}"
        "{% if add_generation_prompt and ns.last != 'tool' %}{{ '"
        + turn
        + "model\\n' }}{% endif %}"
    )


TEMPLATES = {
    "hermes": Template(
        _chatml(
            "{{ '\\n<tool_call>\\n' + {'name': c.function.name, "
            "'arguments': c.function.arguments} | tojson + '\\n</tool_call>' }}",
            _RESPONSE,
        ),
        _CHATML,
        _GO_ON,
    ),
    "qwen-coder": Template(
        _chatml(
            "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
            "{% for n, v in c.function.arguments.items() %}{{ '<parameter=' + n + '>\\n' }}"
            "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
            "{{ '</function>\\n</tool_call>' }}",
            _RESPONSE,
        ),
        _CHATML,
        _GO_ON,
    ),
    "olmo": Template(
        _chatml(
            "{{ '<function_calls>\\n' + c.function.name + '(' }}"
            "{% for n, v in c.function.arguments.items() %}{{ n + '=' }}"
            '{% if v is string %}{{ "\'" + v + "\'" }}{% else %}{{ v | tojson }}{% endif %}'
            "{{ ', ' if not loop.last }}{% endfor %}{{ ')\\n</function_calls>' }}",
            "{{ '<|im_start|>tool\\nFunction ' + m.name + ' returned:\\n' + m.content "
            "+ '<|im_end|>\\n' }}",
        ),
        "\n<|im_start|>tool\nFunction calc returned:\n6<|im_end|>\n<|im_start|>assistant\n",
        _GO_ON,
    ),
    "kimi": Template(
        _chatml(
            "{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + c.id + "
            "'<|tool_call_argument_begin|>' + c.function.arguments | tojson + "
            "'<|tool_call_end|><|tool_calls_section_end|>' }}",
            "{{ '<|im_start|>' + m.name + '\\n## Return of ' + m.tool_call_id + '\\n' + m.content "
            "+ '<|im_end|>\\n' }}",
        ),
        "\n<|im_start|>calc\n## Return of functions.calc:0\n6<|im_end|>\n<|im_start|>assistant\n",
        _GO_ON,
    ),
    "llama": Template(
        '{{ \'Respond in the format {"name": function name, "parameters": dictionary}\' + '
        "tools | tojson if tools else '' }}{% for m in messages %}"
        "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}"
        "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set c = m.tool_calls[0].function %}"
        "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + c.arguments | tojson + '}' }}"
        "{% elif m.role == 'tool' %}{{ {'output': m.content} | tojson }}"
        "{% else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "6"}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGo on.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": Template(
        _mistral(
            "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}{{ (c.function | tojson)[:-1] + "
            "', \"id\": \"' + c.id + '\"}' }}",
            "']</s>'",
        ),
        "[TOOL_RESULTS]call00000 6[/TOOL_RESULTS]",
        "</s>TOOLS[INST] Go on.[/INST]",
    ),
    "mistral-v11": Template(
        _mistral(
            "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}",
            "'</s>'",
        ),
        "[TOOL_RESULTS]call00000 6[/TOOL_RESULTS]",
        "</s>TOOLS[INST] Go on.[/INST]",
    ),
    "glm": Template(
        "{{ tools | tojson + '<tool_call>{name}<arg_key>{key}</arg_key>' if tools else '' }}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
        "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% else %}"
        "{{ '<|' + m.role + '|>' }}{{ '\\n<think></think>' if m.role == 'assistant' else '' }}"
        "{{ '\\n' + m.content if m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '\\n<tool_call>' + c.function.name + '\\n' }}"
        "{% for n, v in c.function.arguments.items() %}"
        "{{ '<arg_key>' + n + '</arg_key>\\n<arg_value>' }}"
        "{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}"
        "{{ '</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        "\n<tool_response>\n6\n</tool_response><|assistant|>",
        "<|user|>\nGo on.<|assistant|>",
    ),
    "deepseek": Template(
        _deepseek(
            f"{{{{ '{_CALL}' + c.type + '{_SEP}' + c.function.name + '\\n```json\\n' + "
            f"c.function.arguments + '\\n```{_DONE}' }}}}"
        ),
        "<output>6</output>",
        f"{EOS}<{BAR}User{BAR}>Go on.<{BAR}Assistant{BAR}>",
    ),
    "deepseek-v3.1": Template(
        _deepseek(
            f"{{{{ '{_CALL}' + c.function.name + '{_SEP}' + c.function.arguments + '{_DONE}' }}}}"
        ),
        "<output>6</output>",
        f"{EOS}<{BAR}User{BAR}>Go on.<{BAR}Assistant{BAR}>",
    ),
    "harmony": Template(
        "{{ 'namespace functions ' + tools | tojson if tools else '' }}"
        "{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if ns.name is none %}{{ raise_exception('no previous tool call') }}{% endif %}"
        "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + "
        "m.content | tojson + '<|end|>' }}{% elif m.role == 'user' %}"
        "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% elif '<|channel|>' in m.content %}{{ raise_exception('channel tags in a content') }}"
        "{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
        "{% if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + "
        "'<|end|>' }}{% endif %}{{ '<|start|>assistant to=functions.' + c.name + "
        "'<|channel|>commentary json<|message|>' + c.arguments | tojson + '<|call|>' }}"
        "{% elif loop.last and not add_generation_prompt %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
        "{% set ns.name = none %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        '<|start|>functions.calc to=assistant<|channel|>commentary<|message|>"6"<|end|>'
        "<|start|>assistant",
        "<|end|><|start|>user<|message|>Go on.<|end|><|start|>assistant",
    ),
    "python-list": Template(
        "{% if tools %}{{ 'Example: [func_name1(a=1)]' + tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<start_of_turn>' + m.role + '\\n' }}{% if m.tool_calls %}"
        "{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}"
        "{% for n, v in c.function.arguments.items() %}{{ n + '=' + v | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}{{ ')' }}{{ ', ' if not loop.last }}{% endfor %}"
        "{{ ']' }}{% endif %}{{ m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}",
        "\n<start_of_turn>tool\n6<end_of_turn>\n<start_of_turn>assistant\n",
        "<end_of_turn>\n<start_of_turn>user\nGo on.<end_of_turn>\n<start_of_turn>assistant\n",
    ),
    # It writes no calls, and shows how they are written.
    "tool-code": Template(
        "{% if tools %}{{ 'Call in ```tool_code blocks: ' + tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<start_of_turn>' + ('user' if m.role == 'tool' else m.role) }}"
        "{{ '\\n' + ('```tool_output\\n' + m.content + '\\n```' if m.role == 'tool' else "
        "m.content) + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        "\n<start_of_turn>user\n```tool_output\n6\n```<end_of_turn>\n<start_of_turn>model\n",
        "<end_of_turn>\n<start_of_turn>user\nGo on.<end_of_turn>\n<start_of_turn>model\n",
    ),
    "function-gemma": Template(
        _gemma(
            *("<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>"),
            "<escape>",
            "{{ '<end_of_turn>\\n<start_of_turn>developer\\nresponse:' + m.name + '{value:' + "
            "value(m.content) + '}<end_of_turn>\\n<start_of_turn>model\\n' }}",
        ),
        "\n<start_of_turn>developer\nresponse:calc{value:<escape>6<escape>}<end_of_turn>\n"
        "<start_of_turn>model\n",
        "<end_of_turn>\n<start_of_turn>user\nGo on.<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma-4": Template(
        _gemma(
            *("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
            '<|"|>',
            "{{ '<|tool_response>response:' + m.name + '{value:' + value(m.content) + "
            "'}<tool_response|>' }}",
        ),
        'response:calc{value:<|"|>6<|"|>}<tool_response|>',
        "<turn|>\n<|turn>user\nGo on.<turn|>\n<|turn>model\n",
    ),
}


def tool_tokenizer(folder: Path, source: str | None) -> Tokenizer:
    """A tokenizer of bytes with the special tokens of all of them, and this template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*STOPS, *SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    stated = {"bos_token": None, "eos_token": STOPS[0], "pad_token": STOPS[0]}
    if source is not None:
        stated["chat_template"] = source
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    ends = {"eos_token_id": [made.token_to_id(stop) for stop in STOPS]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return with_turn_end(checkpoint_tokenizer(folder, VOCAB_SIZE))
