"""Tables of the pages that are made from the code. `python docs/tables.py` writes them.

A page has a pair of comments around a table, for example::

    <!-- table: algorithms -->
    <!-- end of table -->
"""

import ast
import inspect
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

if __name__ == "__main__":  # layouts of the refused settings need devices, before JAX starts
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
    os.environ["JAX_PLATFORMS"] = "cpu"

sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout, whatever is installed

import jrl.losses
from jrl.checks import flag
from jrl.config.flags import parse_arguments
from jrl.config.run import RECORDS
from jrl.recipes import RECIPES
from jrl.recipes.base.hyperparameters import Hyperparameters
from jrl.recipes.load import LIBRARY
from jrl.recipes.ppo import ActorCritic
from jrl.setting import property_of
from jrl.trainer.setup.setup import build_setup
from moe.huggingface.configuration import FAMILIES
from moe.huggingface.family import Family

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/recipes.md", "docs/checkpoints.md", "docs/unsupported.md")
TABLE = re.compile(r"(?s)(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)")

PUBLISHED = {
    "llama": "Llama 3",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "deepseek_v3": "DeepSeek-V3",
    "kimi_k2": "Kimi-K2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "Gemma 3 (text)",
    "qwen3_next": "Qwen3-Next",
}
"""Published models by the `model_type` of their config.json."""
PARTS = {
    "attention.down": "latent attention (MLA)",
    "delta.out": "Gated DeltaNet in three layers of four",
    "attention.sinks": "attention sinks",
    "attention.query_bias": "biases of queries, keys and values",
    "experts.down_bias": "biases of experts",
    "experts.bias": "selection bias",
    "shared_gate": "a gated shared expert",
}
"""Parts of a layer, by a weight that only they have."""
REFUSED = """
--layout tp4
--layout pp4
--layout "dp4 / ep3"
--layout dp2 --model tiny-dense --dispatch all_gather
--layout "dp2 / ep2" --model tiny-dense
--layout cp2 --context ring --attention plain
--layout cp3 --context ulysses
--layout "dp2 / ep2" --dispatch ragged
--layout "dp6 / ep6" --dispatch two_level --server-devices 4
--dispatch all_to_all --server-devices 4
--activation-wire float8_e4m3fn
--attention mosaic
--attention cudnn
--latent expanded
--layout dp2 --fsdp
--layout pp2 --overlap-grad-reduce
--layout pp2 --packing True
--two-batch-overlap --micro-batch 8
--two-batch-overlap --capacity-factor 1.25 --steps 0
--layout tp2 --two-batch-overlap --prompt-length 13 --response-length 11 --micro-batch 16
--capacity-factor 1.25
--drop-policy position
--router-replay R3 --model tiny-dense
--bias-update-rate 0.001
--mismatch truncated
--layout dp8 --micro-batch 4
--layout tp2 --prompt-length 13 --response-length 20 --micro-batch 1 --group-size 2
--layout dp2 --slots 5
--layout pp2 --rollout-layout pp2
--rollout-engine disaggregated
--rollout-split "tp1 dp1 / ep1"
--layout dp2 --rollout-engine disaggregated --rollout-split "dp1 / ep1" --rollout-layout tp2
--layout dp2 --rollout-engine disaggregated --rollout-split "dp1 / ep1" --model tiny-dense
--rollout-devices 2
--stale-cache --max-staleness 1
tppo --max-staleness 1
hapo --max-staleness 1
tppo --dynamic-sampling
ppo --dynamic-sampling
--momentum 0.9
--min-processes 1 --max-staleness 1 --rollout-devices 2
"""
"""Settings that `python -m jrl.train` refuses together on CPU devices, a command line each."""


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def algorithms() -> str:
    """Recipes with the functions of their equations and their papers."""
    called = {name: objectives(kind) for name, kind in RECIPES.items()}
    shared = set.intersection(*map(set, called.values()))
    places, rows = pages_of_functions(), []
    for name, kind in RECIPES.items():
        links = [f"[`{each}`]({places[each]})" for each in called[name] if each not in shared]
        critic = "yes" if kind.uses_critic else ""
        rows.append([f"`{name}`", summary(kind), ", ".join(links), critic, paper_link(kind)])
    return table(["algorithm", "method", "equations", "critic", "paper"], rows)


def pages_of_functions() -> dict[str, str]:
    """Address of each function of `jrl.losses` in the documentation, by its name."""
    places = {}
    for page in sorted((ROOT / "docs" / "objectives").glob("*.md")):
        for path in re.findall(r"(?m)^(?:#+ )?::: (jrl\.losses\.[\w.]+)$", page.read_text()):
            places[path.split(".")[-1]] = f"objectives/{page.name}#{path}"
    return places


def papers() -> str:
    """Algorithms with their papers, in two columns."""
    cells = [[f"`{name}`", paper_link(kind)] for name, kind in RECIPES.items()]
    half = -(-len(cells) // 2)
    right = [*cells[half:], ["", ""]][:half]  # of an odd number, the last row is half empty
    rows = [[*left, *right] for left, right in zip(cells[:half], right, strict=True)]
    return table(["algorithm", "paper"] * 2, rows)


def summary(kind: type) -> str:
    """Method of a recipe: the sentence of its module that begins with its name, the first line of a
    module of one recipe, or the first sentence of its own docstring."""
    module = inspect.getmodule(kind)
    texts = [text.split("\n\nReferences:")[0] for text in (module.__doc__, kind.__doc__)]
    sentences = [re.split(r"(?<!Dr)\.\s+", text.strip()) for text in texts]
    alone = sum(each.__module__ == kind.__module__ for each in RECIPES.values()) == 1
    label = title_of(kind)
    chosen = [each for each in sentences[0] if each.startswith(label)] if label else []
    text = chosen[0] if chosen else sentences[0 if alone else 1][0]
    text = " ".join(text.split()).removesuffix(".")
    return re.sub(r"^[^:;]{1,30}: |; and [^;]*$", "", text)


def objectives(kind: type) -> list[str]:
    """Functions of `jrl.losses` that the methods of a recipe call, in the order of the library."""
    called: set[str] = set()
    for name in dir(kind):
        for owner in kind.__mro__:
            if name in vars(owner):
                code = code_names(vars(owner)[name])
                called |= code
                if "super" not in code:
                    break
    return [name for name in jrl.__all__ if name in called and callable(getattr(jrl, name))]


def code_names(member: Any) -> set[str]:
    """Global names in the code of a method or property; the name of a function of `jrl.losses`."""
    function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    if str(getattr(function, "__module__", "")).startswith("jrl.losses"):
        return {function.__name__}
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(code.co_names)


def references(kind: type) -> list[tuple[str, str]]:
    """Papers of the module of a recipe: text before the address, and the arXiv number."""
    text = (inspect.getmodule(kind).__doc__ or "").split("References:\n")[1]
    return re.findall(r"(?s)\s*(.*?)https://arxiv.org/abs/(\S+)", text)


def title_of(kind: type) -> str | None:
    """Name of a recipe in the references of its module; None if no entry has one."""
    labels = [text.split(":")[0] for text, _ in references(kind) if ":" in text]
    return next((label for label in labels if (kind.__doc__ or "").startswith(label)), None)


def paper_link(kind: type) -> str:
    """Link to the paper of a recipe."""
    label, papers = title_of(kind), references(kind)
    chosen = [paper for text, paper in papers if label and text.startswith(f"{label}:")]
    paper = (chosen or [papers[0][1]])[0]
    return f"[{paper}](https://arxiv.org/abs/{paper})"


def models() -> str:
    """Architectures that are imported and exported."""
    rows = []
    for family in FAMILIES:
        types = (family.model_type, *family.also)
        names, weights = ", ".join(PUBLISHED[kind] for kind in types), set(family.names)
        features = [text for weight, text in PARTS.items() if weight in weights]
        if "attention.query_norm" in weights and "attention.down" not in weights:
            features.append("QK norm")
        if "attention.out_norm" in weights:
            features.append("norms before and after each part")
        if family.predicts_further:
            features.append("MTP layers are not loaded")
        kind = "MoE" if is_moe(family) else "dense"
        codes = ", ".join(f"`{kind}`" for kind in types)
        rows.append([names, codes, f"`{family.architecture}`", kind, "; ".join(features)])
    return table(["models", "`model_type`", "architecture", "", "layers"], rows)


def model_names() -> str:
    """Names of the published models, dense and MoE."""
    rows = []
    for kind, moe in (("Dense", False), ("MoE", True)):
        chosen = [family for family in FAMILIES if is_moe(family) == moe]
        types = [name for family in chosen for name in (family.model_type, *family.also)]
        rows.append([kind, ", ".join(PUBLISHED[name] for name in types)])
    return table(["", "models"], rows)


def is_moe(family: Family) -> bool:
    return "experts.router" in family.names


def unsupported() -> str:
    """Settings that are refused together, with the error."""
    rows = []
    for line in REFUSED.strip().splitlines():
        message = refusal(line)
        if message is None:
            raise ValueError(f"{line} is not refused.")
        rows.append([f"`{line}`", f"`{message.replace('|', chr(92) + '|')}`"])
    return table(["settings", "error"], rows)


def refusal(line: str) -> str | None:
    """Error of a command line before anything is compiled; None if there is none."""
    try:
        options = parse_arguments(shlex.split(line))
        build_setup(options.run, options.recipe).task.close()
    except ValueError as error:
        return str(error)
    return None


def settings() -> str:
    """All settings of a run and of each recipe."""
    sections = [section(record, record, declared(record)) for record in RECORDS]
    sections.append(
        section("Hyperparameters of all recipes", Hyperparameters, declared(Hyperparameters))
    )
    sections.append(section("Recipes with a critic", ActorCritic, declared(ActorCritic)))
    for name, kind in LIBRARY.items():
        base = ActorCritic if issubclass(kind, ActorCritic) else Hyperparameters
        sections.append(section(f"Recipe `{name}`", kind, changed(kind, base)))
    return "\n".join(sections)


def section(title: Any, kind: type, names: list[str]) -> str:
    """One table of settings with a heading; empty if there are none."""
    if not names:
        return ""
    if isinstance(title, type):
        title = (title.__doc__ or "").split("\n\n")[0].split(":")[0].split(";")[0].strip(" .\n")
        title = " ".join(title.split())
    rows = []
    for name in names:
        default = getattr(kind, name, None)
        value = "" if default is None else f"`{default}`"
        resumed = "yes" if property_of(kind, name, "changeable") else ""
        rows.append([f"`{flag(name)}`", value, values_of(kind, name), help_of(kind, name), resumed])
    return f"## {title}\n\n" + table(["flag", "default", "values", "meaning", "on resume"], rows)


def declared(kind: type) -> list[str]:
    """Fields that a record declares itself."""
    return [item.name for item in fields(kind) if item.name in inspect.get_annotations(kind)]


def changed(kind: type, base: type) -> list[str]:
    """Fields of a recipe that its base lacks or has with another default."""
    missing = object()
    return [
        item.name
        for item in fields(kind)
        if getattr(base, item.name, missing) != getattr(kind, item.name)
    ]


def values_of(kind: type, name: str) -> str:
    """Choices or range of a setting; None as a value is the empty default."""
    hint = get_type_hints(kind)[name]
    kinds = get_args(hint) if get_origin(hint) in (Union, type(int | None)) else (hint,)
    literals = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    if literals:
        return ", ".join(f"`{value}`" for value in literals)
    if bool in kinds:
        return "flag" if len(kinds) == 1 else "`True`, `False`"
    word = next((w for k, w in ((int, "integer"), (float, "number")) if k in kinds), "text")
    low, above, high = (property_of(kind, name, key) for key in ("minimum", "above", "maximum"))
    limits = [f"{low} or more"] if low is not None and high is None else []
    limits += [f"above {above}"] if above is not None else []
    limits += [f"{low} to {high}"] if low is not None and high is not None else []
    limits += [f"at most {high}"] if high is not None and low is None else []
    return ", ".join([word, *limits])


def help_of(kind: type, name: str) -> str:
    """Docstring of a field, of the class that declares it last."""
    for owner in kind.__mro__:
        if name in (texts := field_docstrings(owner)):
            return texts[name].replace("|", "\\|")
    return ""


@cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Docstrings of the fields of a class, by name."""
    if not kind.__module__.startswith(("jrl", "moe")):
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for item, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(following, ast.Expr):
            target, value = item.target, following.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                texts[target.id] = " ".join(str(value.value).split())
    return texts


TABLES: dict[str, Callable[[], str]] = {
    "algorithms": algorithms,
    "papers": papers,
    "models": models,
    "model_names": model_names,
    "unsupported": unsupported,
}


def updated(text: str) -> str:
    """A page with its tables as the code has them."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"written: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
