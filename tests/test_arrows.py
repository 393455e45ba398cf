"""Import rules. Imports are read from the syntax tree, so none is missed or run."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"jrl", "moe", "sharding", "experiments", "tests", "notebooks", "benchmarks", "docs"}
ROOMS |= {"campaign", "deploy"}
PACKAGES = ("sharding", "moe", "jrl")
LOADERS = {"import_module", "__import__", "find_spec", "run_module", "run_path"}
"""Functions that import what a string names."""

# What each room may import beside the standard library and itself; the first prefix holds.
ALLOWED = {
    "sharding.folding.groups": {"sharding", "jax", "numpy", "jaxtyping", "matplotlib"},
    "moe.planner.report": {"sharding", "moe", "jax", "numpy", "jaxtyping", "matplotlib"},
    "sharding": {"jax", "numpy", "jaxtyping"},
    "moe": {"sharding", "jax", "numpy", "jaxtyping", "flax", "safetensors"},
    "jrl.losses": {"jax", "jaxtyping"},
}
COMPUTED = {
    Path("jrl/__main__.py"),
    Path("jrl/checks.py"),
    Path("jrl/published/location.py"),
    Path("jrl/tasks/data/files.py"),
    Path("jrl/tasks/references.py"),
    Path("jrl/tasks/workers/user_code.py"),
}
"""Files that may import what a variable names: the command, the extras and the code that a user
asked for."""
FORBIDDEN = {"campaign", "experiments", "benchmarks", "tests", "notebooks"}
"""What no room imports, unless it is the room."""

SHARED = ("__init__", "checks", "command_line", "completion", "program", "setting")
"""Files beside the rooms of jrl that lie below all of them."""
COMMANDS = (
    *sorted(f"jrl.{path.stem}" for path in (ROOT / "jrl").glob("*.py") if path.stem not in SHARED),
    *sorted(f"jrl.{path.parent.name}.__main__" for path in (ROOT / "jrl").glob("*/__main__.py")),
    "jrl.launch",  # all of it: it starts another command
)
"""What is run by `python -m`: the files beside the rooms of jrl, and rooms that are commands."""
LEARNS = ("jrl.trainer", "jrl.serving", "jrl.rollout")
# What lies above a room of jrl, and what it may therefore not import.
ABOVE = {
    "jrl.trainer": (*COMMANDS, "jrl.serving"),
    "jrl.serving": (*COMMANDS, "jrl.trainer"),
    "jrl.rollout": (*COMMANDS, "jrl.trainer", "jrl.serving"),
    # A run's settings are the records of its components.
    "jrl.config.run": (*COMMANDS, "jrl.trainer", "jrl.serving"),
    **dict.fromkeys(
        (
            *("jrl.recipes", "jrl.tasks", "jrl.text"),
            *(
                "jrl.runs",
                "jrl.report",
                "jrl.config",
                "jrl.processes",
                "jrl.faults",
                "jrl.published",
            ),
        ),
        (*COMMANDS, *LEARNS),
    ),
}

# Rooms of moe from below: one imports only rooms of the lines before its own.
MOE_ROOMS = (
    ("architecture", "execution", "remat"),
    ("config",),
    ("adapters", "ops"),
    ("kernels", "weights"),
    ("attention", "head", "placement"),
    ("huggingface", "implementations", "tokens"),
    ("cache", "router"),
    ("experts",),
    ("layers",),
    ("model",),
    ("decoding", "planner", "stages"),
    ("disaggregated",),
)
BELOW_KERNELS = {"kernels", "ops", "remat"}
"""All that kernels import of moe."""


def module_name(path: Path) -> tuple[str, bool]:
    """The dotted name of a file below the root, and whether it is a package."""
    parts = path.with_suffix("").parts
    return (".".join(parts[:-1]), True) if parts[-1] == "__init__" else (".".join(parts), False)


@cache
def imports(source: str, path: Path) -> frozenset[str]:
    """The absolute names of all that `source` imports, wherever in it and however written."""
    name, is_package = module_name(path)
    package = name if is_package else name.rpartition(".")[0]
    result = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, *([base] if base else [])])
            # `from jrl import trainer` may name a module as well as an attribute.
            result |= {f"{base}.{alias.name}" if base else alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            if called in LOADERS and node.args:
                named = node.args[0]
                value = named.value if isinstance(named, ast.Constant) else None
                result.add(value.lstrip(".") if isinstance(value, str) else "a computed name")
    return frozenset(result)


def inside(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def _above(name: str) -> tuple[str, ...]:
    return next((above for room, above in ABOVE.items() if inside(name, room)), ())


def violations(source: str, path: Path) -> list[str]:
    """The imports of a file that its room may not make."""
    name, _ = module_name(path)
    top = name.partition(".")[0]
    room = next((room for room in ALLOWED if inside(name, room)), None)
    wrong = []
    for imported in sorted(imports(source, path)):
        root = imported.partition(".")[0]
        if (root in FORBIDDEN and root != top) or any(
            inside(imported, above) for above in _above(name)
        ):
            wrong.append(imported)
        elif room is not None:
            allowed = root in ALLOWED[room] or root in sys.stdlib_module_names
            if not (allowed or inside(imported, room)):
                wrong.append(imported)
        elif imported == "a computed name" and path not in COMPUTED:
            wrong.append(imported)
    return wrong


def files(room: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", [*PACKAGES, "benchmarks", "experiments", "notebooks"])
def test_imports_follow_the_rules(room):
    if room in PACKAGES:
        assert files(room), f"{room} has no files: the test looks in the wrong place"
    wrong = {
        str(path): result
        for path in files(room)
        if (result := violations((ROOT / path).read_text(encoding="utf-8"), path))
    }
    assert not wrong


@pytest.mark.parametrize(
    ("path", "line", "imported"),
    [
        (
            "sharding/folding/mesh.py",
            "from moe.config import ModelConfig",
            "moe.config.ModelConfig",
        ),
        ("sharding/zero.py", "import flax", "flax"),
        ("moe/planner/cost.py", "import numpy, optax as o", "optax"),
        ("moe/model.py", "def f():\n    import jrl.losses as losses", "jrl.losses"),
        ("moe/model.py", "from .. import jrl", "jrl"),
        ("moe/kernels/dot.py", "from ...jrl.losses import gae", "jrl.losses.gae"),
        ("jrl/losses/value.py", "import numpy as np", "numpy"),
        ("jrl/losses/value.py", "from .. import trainer", "jrl.trainer"),
        ("jrl/losses/value.py", "from ..trainer import state", "jrl.trainer.state"),
        ("jrl/losses/__init__.py", "from ..tasks import load", "jrl.tasks.load"),
        ("jrl/losses/value.py", "from jrl import trainer", "jrl.trainer"),
        ("jrl/trainer/loop.py", "from experiments.sweep import run", "experiments.sweep.run"),
        ("jrl/trainer/loop.py", "if True:\n  try:\n    import tests\n  finally:\n    1", "tests"),
        (
            "jrl/train.py",
            "import importlib\nimportlib.import_module('benchmarks.x')",
            "benchmarks.x",
        ),
        ("jrl/train.py", "__import__('tests.oracles')", "tests.oracles"),
        ("jrl/train.py", "from importlib import import_module as i, util\nutil.find_spec(x)", None),
        ("benchmarks/step.py", "from tests import oracles", "tests.oracles"),
        (
            "jrl/runs/folder.py",
            "from jrl.trainer.setup.setup import Setup",
            "jrl.trainer.setup.setup.Setup",
        ),
        ("jrl/faults/watch.py", "from jrl.trainer import loop", "jrl.trainer.loop"),
        ("jrl/text/prompt_format.py", "from jrl import rollout", "jrl.rollout"),
        ("jrl/rollout/sampler.py", "from ..trainer import loop", "jrl.trainer.loop"),
        ("jrl/trainer/loop.py", "from jrl.train import main", "jrl.train.main"),
        ("jrl/trainer/loop.py", "from jrl import export", "jrl.export"),
        ("jrl/config/run.py", "import jrl.faults.__main__", "jrl.faults.__main__"),
        ("jrl/processes/coordinator.py", "import jrl.launch.program", "jrl.launch.program"),
        ("jrl/serving/service.py", "from jrl.trainer import loop", "jrl.trainer.loop"),
        ("jrl/trainer/loop.py", "import jrl.serving.server", "jrl.serving.server"),
        (
            "jrl/rollout/sampler.py",
            "from jrl.serving import api_request",
            "jrl.serving.api_request",
        ),
    ],
)
def test_forbidden_import_is_found(path, line, imported):
    assert violations(line, Path(path)) == [imported or "a computed name"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "sharding/folding.py",
            "import math, jax\nfrom jaxtyping import Array\nimport numpy as np",
        ),
        (
            "sharding/folding/mesh.py",
            "from .folding import FoldedMesh\nfrom sharding.folding import fold",
        ),
        (
            "moe/model.py",
            "from sharding.collectives import vary\nfrom . import routing\nimport flax",
        ),
        ("jrl/losses/value.py", "from .arrays import keep\nfrom jrl.losses import reduction"),
        (
            "jrl/trainer/loop.py",
            "import optax, rich\nfrom moe import model\nfrom ..losses import gae",
        ),
        ("benchmarks/step.py", "from benchmarks.peer import run\nimport torch"),
    ],
)
def test_allowed_import_passes(path, line):
    assert violations(line, Path(path)) == []


def test_pallas_is_imported_in_one_room():
    result = {
        path
        for path in files("moe") + files("jrl") + files("sharding")
        if any("pallas" in name for name in imports((ROOT / path).read_text("utf-8"), path))
    }
    assert result, "no file imports it: the test looks for the wrong name"
    # The room, and folders in it.
    assert {Path(*path.parts[:2]) for path in result} == {Path("moe/kernels")}


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Files that import each other, through others too: what each reaches that reaches it."""
    reach = {name: set(targets) for name, targets in arrows.items()}
    for through in arrows:
        for targets in reach.values():
            if through in targets:
                targets |= reach[through]
    rings = {frozenset(b for b in reach[a] if a in reach[b]) for a in reach if a in reach[a]}
    return [set(ring) for ring in rings]


@cache
def arrows_of_files() -> dict[Path, set[Path]]:
    """The files of the packages that each of them imports."""
    sources = {module_name(path)[0]: path for room in PACKAGES for path in files(room)}
    arrows = {}
    for name, path in sources.items():
        result = imports((ROOT / path).read_text(encoding="utf-8"), path)
        # A name that is no file is something in the file before its last dot.
        named = {i if i in sources else i.rpartition(".")[0] for i in result}
        arrows[path] = {sources[module] for module in (named & set(sources)) - {name}}
    return arrows


def merged_arrows(package: str, place: Callable[[Path], str]) -> dict[str, set[str]]:
    """The arrows between the places that the files of a package are in."""
    arrows: dict[str, set[str]] = {}
    for path, targets in arrows_of_files().items():
        if path.parts[0] == package:
            inner = {place(target) for target in targets if target.parts[0] == package}
            arrows.setdefault(place(path), set()).update(inner - {place(path)})
    return arrows


def room_of(path: Path) -> str:
    """The file or folder of a package that a file is, or is in."""
    return Path(path.parts[1]).stem


def folder_of(path: Path) -> str:
    """The folder of a file; a file beside the rooms is by itself."""
    return str(path if len(path.parts) == 2 else path.parent)


def test_no_two_files_import_each_other():
    arrows = {str(path): set(map(str, targets)) for path, targets in arrows_of_files().items()}
    assert len(arrows["jrl/trainer/loop.py"]) > 10, "the imports were not read"
    assert circles(arrows) == []


@pytest.mark.parametrize("package", ["moe", "sharding", "jrl"])
def test_no_two_rooms_import_each_other(package):
    arrows = merged_arrows(package, room_of)
    assert len(arrows) > 5, "the files were not read"
    assert circles(arrows) == []


def test_no_two_folders_of_moe_import_each_other():
    assert circles(merged_arrows("moe", folder_of)) == []


def test_rooms_of_moe_import_those_below():
    arrows = merged_arrows("moe", room_of)
    levels = {room: level for level, rooms in enumerate(MOE_ROOMS) for room in rooms}
    assert arrows.keys() == {*levels, "__init__"}
    upward = {
        (room, target)
        for room, targets in arrows.items()
        for target in targets
        if levels[target] >= levels[room]
    }
    assert upward == set()
    assert arrows["kernels"] < BELOW_KERNELS


CONFIGS, MESHES = ("ModelConfig",), ("FoldedMesh", "SplitMesh")


def split_models(source: str) -> list[str]:
    """Functions that take a network's configuration and a mesh as two parameters."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            kinds = {arg.arg: ast.unparse(arg.annotation) for arg in args if arg.annotation}
            named = {"config", "mesh"} <= {arg.arg for arg in args}
            typed = [
                any(kind.removesuffix(" | None") in group for kind in kinds.values())
                for group in (CONFIGS, MESHES)
            ]
            if named or all(typed):
                result.append(node.name)
    return result


def test_functions_take_a_model_instead_of_config_and_mesh():
    found = [
        f"{path}: {name}"
        for room in PACKAGES
        for path in files(room)
        for name in split_models((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert len(found) < 15, "\n".join(["pass a moe.config.Model to:", *found])


@pytest.mark.parametrize(
    ("parameters", "counts"),
    [
        ("weights, config, mesh", True),
        ("mesh: FoldedMesh, network: ModelConfig | None = None", True),
        ("config: ModelConfig, *, groups: SplitMesh", True),
        ("config: RunConfig, mesh: FoldedMesh", True),
        ("model: Model, rollout: FoldedMesh", False),
        ("network: ModelConfig, num_layers: int", False),
    ],
)
def test_split_models_finds_config_beside_mesh(parameters, counts):
    assert bool(split_models(f"class A:\n    def f({parameters}): ...")) == counts


def test_import_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(arrows) == [{"b", "c"}]


def test_importing_jrl_loads_nothing_heavier_than_jax():
    heavy = ("flax", "optax", "orbax", "matplotlib", "rich", "tyro", "moe", "sharding")
    command = f"import sys, jrl; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


INSTALLED = {"jax", "flax", "optax", "orbax", "jaxtyping", "sentencepiece", "tyro", "rich"}
INSTALLED |= {"matplotlib", "numpy", "yaml", "etils", *PACKAGES}
"""What `pip install -e .` brings if no extra is named."""


def imports_at_once(path: Path) -> frozenset[str]:
    """The names that importing a file imports: those outside functions."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    waiting, kept = [*tree.body], []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(node)
        elif not isinstance(node, functions):
            waiting += ast.iter_child_nodes(node)
    return imports(ast.unparse(ast.Module(kept, [])), path)


def test_commands_start_without_an_extra():
    """An extra is imported by the function that needs it, which says how to install it."""
    sources = {module_name(path)[0]: path for room in PACKAGES for path in files(room)}
    commands = [*COMMANDS, "moe.planner.__main__", "jrl.launch.__main__"]
    waiting, seen, needed = [name for name in commands if name in sources], set(), {}
    while waiting:
        name = waiting.pop()
        # A module's packages are imported before it.
        modules = {name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)}
        for module in modules - seen:
            seen.add(module)
            for imported in imports_at_once(sources[module]):
                if imported.partition(".")[0] in PACKAGES:
                    named = imported if imported in sources else imported.rpartition(".")[0]
                    waiting += [named] if named in sources else []
                elif imported.partition(".")[0] not in {*INSTALLED, *sys.stdlib_module_names}:
                    needed[module] = imported
    assert len(seen) > 200, "the imports were not followed"
    assert needed == {}


def test_top_level_folders_are_the_rooms():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folders = {line.split("/")[0] for line in listed if "/" in line and not line.startswith(".")}
    assert folders <= ROOMS
    assert {"jrl", "moe", "sharding", "tests", "benchmarks"} <= folders


def test_the_trainer_asks_for_hooks_and_knows_no_recipe():
    """Of the recipes it imports what all have, and of their classes `Sft` alone, by which a warm
    start trains."""
    recipes = {
        path: [
            name
            for name in imports((ROOT / path).read_text(encoding="utf-8"), path)
            if inside(name, "jrl.recipes")
        ]
        for path in files("jrl/trainer")
    }
    assert any(recipes.values()), "the imports were not read"
    wrong = {
        str(path): result
        for path, names in recipes.items()
        if (result := [name for name in names if not _is_of_all(name)])
    }
    assert not wrong


def _is_of_all(name):
    return name == "jrl.recipes.Sft" or inside(name, "jrl.recipes.base")


ASKS_THE_PLANNER = {
    Path(f"jrl/trainer/setup/{name}.py") for name in ("fit", "memory", "plan_inputs", "planner")
}
"""Files that describe a run to the planner, before it starts."""


def test_run_time_imports_no_planner():
    """Run time takes devices, links and volumes from `sharding.costs`."""
    importing = {
        path
        for room in PACKAGES
        for path in files(room)
        if not path.is_relative_to("moe/planner")
        and any(
            inside(name, "moe.planner")
            for name in imports((ROOT / path).read_text(encoding="utf-8"), path)
        )
    }
    assert importing == ASKS_THE_PLANNER


SIZES = {"lines": 600, "modules": 12}
"""What a reader holds in the head: lines of a file, modules of a folder beside `__init__` and the
`settings` that it reads."""


def test_no_file_and_no_folder_is_too_large():
    files = [path for room in PACKAGES for path in (ROOT / room).rglob("*.py")]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    folders = Counter(
        path.parent for path in files if path.name not in ("__init__.py", "settings.py")
    )
    assert [str(path) for path, number in lines.items() if number > SIZES["lines"]] == []
    assert [str(path) for path, number in folders.items() if number > SIZES["modules"]] == []
