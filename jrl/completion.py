"""Shell completion of ``jrl``: a script with the commands, and the words in each one's ``--help``.

The commands have parsers of three kinds, and all of them print their flags at the start of a line.
"""

import re
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")
OPTION = re.compile(r"(?m)^[│ ]*(?:-\w(?: [A-Z]+)?, )?(--[a-z].*)$")
FLAG = re.compile(r"--[a-z][\w-]*")
CHOICES = re.compile(r"(?m)^[│ ]*\[?\{([a-z_,]+)\}")
SUBCOMMAND = re.compile(r"(?m)^  ([a-z]+) {2,}")

# bashcompinit gives zsh the functions of bash.
BASH = """\
_jrl() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
  COMPREPLY=( $(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}") )
}}
complete -o default -F _jrl jrl"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def words_of(help_text: str) -> list[str]:
    """Flags, choices of the first argument and subcommands in the text of ``--help``."""
    flags = ["--help"]
    for line in OPTION.findall(help_text):
        flags += FLAG.findall(re.split(r"\s{2,}", line)[0])  # a description may follow
    choices = [word for group in CHOICES.findall(help_text) for word in group.split(",")]
    return list(dict.fromkeys((*SUBCOMMAND.findall(help_text), *choices, *flags)))


def completion_script(shell: str, purposes: Mapping[str, str], helps: Mapping[str, str]) -> str:
    """Script that a shell evaluates; file names are completed beside the words of a command.

    Args:
      purposes, helps: a line about each command, and the text of its ``--help``.
    """
    words = {name: words_of(text) for name, text in helps.items()}
    words["completion"] = [*SHELLS]
    if shell == "fish":
        return "\n".join(_fish_lines(purposes, words))
    cases = "\n".join(f'    {name}) words="{" ".join(of)}" ;;' for name, of in words.items())
    script = BASH.format(cases=cases, commands=" ".join(words))
    return ZSH + script if shell == "zsh" else script


def _fish_lines(purposes: Mapping[str, str], words: Mapping[str, list[str]]) -> list[str]:
    line = "complete -c jrl -n"
    lines = []
    for name, of_command in words.items():
        purpose = purposes.get(name, "").replace("'", r"\'")
        lines.append(f"{line} __fish_use_subcommand -f -a {name} -d '{purpose}'")
        for word in of_command:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"{line} '__fish_seen_subcommand_from {name}' {option}")
    return lines
