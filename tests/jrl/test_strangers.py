"""A run folder made by a stranger: nothing in it runs in whoever serves, exports, evaluates,
reports or verifies it. Each part has a marker, a file that appears if the part runs."""

import base64
import json
import pickle
import py_compile
import shutil
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from command_runs import FLAGS, one_line

from jrl import evaluate, export, train
from jrl.config.files import Sampled, configuration_of, recipe_to_sample, run_of
from jrl.recipes import RECIPES, Sft
from jrl.recipes.load import load_recipe
from jrl.report import page as page_writer
from jrl.report.__main__ import main as report
from jrl.runs import manifest, trust
from jrl.runs.__main__ import main as runs
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.tasks import load_task
from jrl.tasks.references import copy_name
from jrl.trainer.evaluation.served_model import open_served_model

RECIPE = """
from dataclasses import dataclass
from jrl.recipes import Grpo

open({marker!r}, "w").close()

@dataclass(frozen=True)
class Evil(Grpo):
    knob: float = 0.5
"""
TASK = """
open({marker!r}, "w").close()

class make:
    prompts = [{{"prompt": f"{{n:02d}}", "answer": f"{{n:02d}}"}} for n in range(40)]

    def reward(self, prompt, completion, *, answer):
        return float(completion == answer)
"""
ESCAPES = [
    "{{ cycler.__init__.__globals__.os.system(COMMAND) }}",
    "{{ (cycler|attr('__init__')|attr('__globals__')).os.system(COMMAND) }}",
    "{{ lipsum.__globals__['os'].system(COMMAND) }}",
    "{{ raise_exception.__globals__['__builtins__'].eval(COMMAND) }}",
    "{% for kind in ''.__class__.__mro__[1].__subclasses__() %}{{ kind(COMMAND) }}{% endfor %}",
    "{{ namespace.__init__.__globals__.sys.modules.os.system(COMMAND) }}",
]
"""Templates that run a command outside of Jinja's sandbox."""
HTML = "</script><script>marker()</script><img src=x onerror=marker()>"
QUICK = ["--k=1", "--prompts=2", "--show=0"]


class Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


class Stranger:
    """A run folder, and the folder of the markers of its parts."""

    def __init__(self, path: Path, markers: Path):
        self.path, self._markers = path, markers
        markers.mkdir()

    def marker(self, part: str) -> str:
        return str(self._markers / part)

    @property
    def ran(self) -> set[str]:
        return {path.name for path in self._markers.iterdir()}

    def change_config(self, **changes):
        config = json.loads((self.path / "config.json").read_text())
        config["recipe"] = changes.pop("recipe", config["recipe"])
        config["hyperparameters"] |= changes.pop("hyperparameters", {})
        config["run"] |= changes
        (self.path / "config.json").write_text(json.dumps(config))

    def write_code(self, name: str, source: str):
        (self.path / "code").mkdir(exist_ok=True)
        content = source.format(marker=self.marker(name))
        (self.path / "code" / copy_name(name)).write_text(content)

    def seal(self):
        """Makes the checkpoints agree with the files, as a stranger would."""
        folder = RunFolder(self.path)
        for step in Checkpoints(folder.checkpoints_path).steps():
            checkpoint = self.path / "checkpoints" / str(step)
            meta = json.loads((checkpoint / "meta" / "metadata").read_text())
            meta["files"] = folder.file_hashes()
            meta.pop("data", None)  # the records of the task that it names now
            (checkpoint / "meta" / "metadata").write_text(json.dumps(meta))
            manifest.write(checkpoint, step)


@pytest.fixture
def stranger(grpo_run, tmp_path, monkeypatch):
    """A finished run whose recipe, compiled recipe, task, reward, alarms, settings and samples a
    stranger wrote."""
    # No record: what other tests gave is not given here.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run"
    shutil.copytree(grpo_run, path)
    made = Stranger(path, tmp_path / "markers")
    recipe = path / "recipe.py"
    # Compiled code that is never compared with its source.
    recipe.write_text(RECIPE.format(marker=made.marker("compiled")))
    compiled = cache_from_source(str(recipe))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(recipe), compiled, invalidation_mode=mode)
    recipe.write_text(RECIPE.format(marker=made.marker("recipe")))
    made.write_code("task.py", TASK)
    made.write_code("reward.py", TASK + "\ndef judge(prompt, completion, **fields): return 0.0\n")
    made.change_config(
        recipe="recipe.py:Evil",
        hyperparameters={"knob": 0.5},
        task="task.py:make",
        reward=["task", "reward.py:judge"],
        faults=True,
        on_fault=f"touch {made.marker('on_fault')}",
        unsafe_tools=True,
    )
    touch = f"!!python/object/apply:os.system ['touch {made.marker('yaml')}']"
    (path / "run.yaml").write_text(f"seed: {touch}\n")
    made.seal()
    return made


def test_run_of_a_stranger_is_served_exported_reported_and_verified(stranger, capsys):
    served = open_served_model(str(stranger.path))
    assert served.versions.load()[1] == 2
    assert export.main([str(stranger.path), "--to", "exported"]) == 0
    assert report([str(stranger.path)]) == 0
    assert runs(["verify", str(stranger.path)]) == 1  # the settings are not its checkpoint's
    assert run_of(RunFolder.read(stranger.path)).task == "task.py:make"
    assert stranger.ran == set()


def test_unknown_model_of_a_stranger_is_refused(stranger, capsys):
    stranger.change_config(model="nope")
    with pytest.raises(ValueError, match="model='nope' is not a preset: one of "):
        open_served_model(str(stranger.path))
    assert export.main([str(stranger.path), "--to", "exported"]) == 2
    assert "model='nope' is not a preset: one of " in one_line(capsys.readouterr())


@pytest.mark.slow
def test_run_of_a_stranger_is_evaluated_on_the_user_s_own_task(stranger, capsys):
    command = [str(stranger.path), "--task", "sort", "--json", "numbers.json", *QUICK]
    assert evaluate.main(command) == 0
    assert json.loads(Path("numbers.json").read_text())["recipe"] == "evil"
    assert stranger.ran == set()


def test_run_of_a_stranger_is_evaluated_on_its_task_by_a_flag_only(stranger, capsys):
    assert evaluate.main([str(stranger.path), *QUICK]) == 2
    said = one_line(capsys.readouterr())
    for name in ("task.py", "reward.py"):
        assert f"code/{copy_name(name)} (sha256 " in said
    assert "has code that you have not given" in said and "give --trust-run-code" in said
    assert stranger.ran == set()


@pytest.mark.slow
def test_trusted_task_runs_and_the_recipe_does_not(stranger):
    assert evaluate.main([str(stranger.path), "--trust-run-code", *QUICK]) == 0
    assert stranger.ran == {"task.py", "reward.py"}


OWN_BASES = [("Recipe", "Sampled"), ("Grpo", "Sampled"), ("Tppo", "Ppo"), ("Sft", "Sft")]
"""A class that a custom recipe derives from, and the class of its stand-in."""


@pytest.mark.parametrize(("base", "stand_in"), OWN_BASES)
def test_custom_recipe_is_sampled_by_a_stand_in(stranger, base, stand_in):
    kind = {"Recipe": Sampled, "Sft": Sft, **{k.__name__: k for k in RECIPES.values()}}[base]
    values = asdict(kind(micro_batch=2, temperature=0.7, top_k=5)) | {"knob": 0.5}
    config = json.loads((stranger.path / "config.json").read_text())
    (stranger.path / "config.json").write_text(json.dumps({**config, "hyperparameters": values}))
    recipe = recipe_to_sample(RunFolder.read(stranger.path))
    assert (recipe.name, type(recipe).__mro__[1].__name__) == ("evil", stand_in)
    assert (recipe.temperature, recipe.top_k, recipe.micro_batch) == (0.7, 5, 2)
    assert recipe.supervised == kind.supervised and recipe.uses_critic == kind.uses_critic
    assert replace(recipe, temperature=1.0).name == "evil"
    assert stranger.ran == set()


DAMAGED = [{"hyperparameters": []}, {"hyperparameters": None}, {"recipe": "recipe.py:a b"}]
DAMAGED += [{"recipe": "recipe.py:"}, {"recipe": "grpoo"}, {"recipe": None}, {"recipe": 3}]


@pytest.mark.parametrize("change", DAMAGED, ids=str)
def test_recipe_of_a_stranger_is_refused_without_its_code(stranger, change):
    config = json.loads((stranger.path / "config.json").read_text())
    (stranger.path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=r"config\.json: "):
        recipe_to_sample(RunFolder.read(stranger.path))
    assert stranger.ran == set()


def test_weights_of_a_stranger_start_a_run_and_no_code(stranger):
    command = ["--weights", str(stranger.path), "--run-dir", "own", "--dry-run"]
    assert train.main([*FLAGS, *command]) == 0
    assert stranger.ran == set()


def test_run_of_a_stranger_is_resumed_by_a_flag_only(stranger, capsys):
    command = ["--resume", "--run-dir", str(stranger.path), "--dry-run"]
    assert train.main(command) == 2
    said = one_line(capsys.readouterr())
    for part in ("recipe.py", copy_name("task.py"), copy_name("reward.py"), "touch "):
        assert part in said
    assert stranger.ran == set()
    with pytest.raises(ValueError, match="has code that you have not given"):
        configuration_of(RunFolder.read(stranger.path))
    assert stranger.ran == set()
    assert train.main([*command, "--trust-run-code"]) == 0
    # The source whose hash was looked at, not what is compiled beside it.
    assert stranger.ran == {"recipe", "task.py", "reward.py"}


def test_code_that_differs_from_the_last_checkpoint_is_not_run_even_if_trusted(stranger, capsys):
    with (stranger.path / "recipe.py").open("a") as file:
        file.write("\n")
    command = ["--resume", "--run-dir", str(stranger.path), "--dry-run", "--trust-run-code"]
    assert train.main(command) == 2
    assert "recipe.py is not what it was at the checkpoint of step 2" in capsys.readouterr().err
    assert stranger.ran == set()


def test_code_given_before_or_now_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code = {"recipe.py": b"mine = 1\n", "tasks.mine:make": b"tasks.mine:make"}
    with pytest.raises(ValueError, match=r"recipe\.py \(sha256 .*, tasks\.mine:make \(sha256"):
        trust.check_trusted(tmp_path, code)
    with pytest.raises(ValueError, match=r"machine: recipe\.py \(sha256 \w+\)\. It"):
        trust.check_trusted(tmp_path, code, named={b"tasks.mine:make"})
    trust.remember(code)
    trust.check_trusted(tmp_path, code)
    with pytest.raises(ValueError, match=r"recipe\.py"):
        trust.check_trusted(tmp_path, {"recipe.py": b"mine = 2\n"})


def test_code_that_cannot_be_recorded_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trust.remember({"recipe.py": b""})
    assert "cannot be recorded as yours" in capsys.readouterr().err
    with pytest.raises(ValueError, match="give --trust-run-code"):
        trust.check_trusted(tmp_path, {"recipe.py": b""})


@pytest.mark.slow
def test_run_is_resumed_with_the_files_of_the_command_line(stranger, tmp_path):
    """As by a scheduler, which repeats the first command on a machine that has no record."""
    shutil.copy(stranger.path / "recipe.py", "evil.py")
    for name in ("task.py", "reward.py"):
        shutil.copy(stranger.path / "code" / copy_name(name), name)
    given = ["evil.py:Evil", "--task=task.py:make", "--reward", "task", "reward.py:judge"]
    given += ["--on-fault", f"touch {stranger.marker('on_fault')}"]
    command = ["--resume-if-exists", "--run-dir", str(stranger.path), "--dry-run"]
    assert train.main([*given, *command]) == 0
    # Of a changed file the user has given another content.
    shutil.copy("evil.py", "task.py")
    assert train.main([*given, *command]) == 2


@pytest.mark.parametrize("module", ["antigravity:make", "2 this:make + sort", "os.path:join"])
def test_modules_that_a_run_names_are_code(stranger, module, capsys):
    stranger.change_config(task=module, reward=[])
    assert evaluate.main([str(stranger.path), *QUICK]) == 2
    assert "has code that you have not given" in one_line(capsys.readouterr())


def test_unsafe_tools_are_not_taken_from_a_run(stranger, monkeypatch):
    monkeypatch.delenv("JRL_UNSAFE_TOOLS", raising=False)
    options = evaluate.EvaluateOptions(str(stranger.path), task="sort")
    run, _ = evaluate.evaluation_configuration(options, RunFolder.read(stranger.path))
    assert not run.unsafe_tools
    stranger.change_config(task="sort", reward=[], recipe="grpo", on_fault=None)
    config = json.loads((stranger.path / "config.json").read_text())
    del config["hyperparameters"]["knob"]
    (stranger.path / "config.json").write_text(json.dumps(config))
    command = ["--resume", "--run-dir", str(stranger.path)]
    assert not train.parse_arguments(command).run.unsafe_tools
    assert train.parse_arguments([*command, "--unsafe-tools"]).run.unsafe_tools


def test_templates_of_a_stranger_are_confined(stranger):
    path = stranger.path / "tokenizer.model"
    model = base64.b64encode(path.read_bytes()).decode()
    for expression in ESCAPES:
        source = expression.replace("COMMAND", f"'touch {stranger.marker('template')}'")
        path.write_text(json.dumps({"sentencepiece": model, "chat_template": source}))
        with suppress(ValueError):
            open_served_model(str(stranger.path)).format.encode(load_task("sort", 0).train(0))
        assert stranger.ran == set()


def test_tags_of_a_settings_file_make_no_objects(stranger, capsys):
    assert train.main(["--config", str(stranger.path / "run.yaml"), "--dry-run"]) == 2
    assert "run.yaml is not YAML: could not determine a constructor" in one_line(
        capsys.readouterr()
    )
    assert stranger.ran == set()


METADATA = ["meta/metadata", "tree/metadata", "state/_METADATA", "state/_sharding"]


@pytest.mark.parametrize("name", METADATA)
def test_pickles_in_a_checkpoint_are_not_loaded(stranger, name):
    checkpoint = stranger.path / "checkpoints" / "2"
    (checkpoint / name).write_bytes(pickle.dumps(Touch(stranger.marker("pickle"))))
    manifest.write(checkpoint, 2)
    with suppress(Exception):  # of any kind, as the file is none of Orbax
        open_served_model(str(stranger.path)).versions.load()
    assert stranger.ran == set()


def test_pickled_weights_beside_a_checkpoint_are_not_loaded(stranger):
    for name in ("pytorch_model.bin", "adapters/adapter_model.bin", "origin/optimizer.pt"):
        path = stranger.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(Touch(stranger.marker("weights"))))
    assert open_served_model(str(stranger.path)).versions.load()[1] == 2
    assert export.main([str(stranger.path), "--to", "exported"]) == 0
    assert stranger.ran == set()


def test_html_of_a_stranger_is_text_in_the_report(stranger, tmp_path):
    stranger.change_config(system_prompt=HTML, task=HTML)
    sample = {"step": 0, "kind": HTML, "prompt": HTML, "completion": HTML, "score": 1.0}
    sample |= {"reason": HTML, "answer": HTML, "task": HTML, "rewards": {HTML: 1.0}}
    sample |= {"tokens": {"text": [HTML], "of": 1}}
    (stranger.path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    metrics = (stranger.path / "metrics.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(line), HTML: 1.0}) for line in metrics]
    (stranger.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (stranger.path / "versions.json").write_text(json.dumps({HTML: HTML}))
    named = stranger.path.rename(tmp_path / HTML.replace("/", ""))
    assert report([str(named), "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert "<script>marker" not in page and "<img" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert page.count("marker()") > 10  # as text
    script = Path(page_writer.__file__).parent / "assets"
    for writer in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert writer not in (script / "page.js").read_text()


LINKS = [
    *("origin/special_tokens_map.json", "samples.jsonl", "plots", "report.html", ".lock"),
    *("metrics.jsonl", "tokenizer.model", "code/more.py", "faults"),
]


@pytest.mark.parametrize("name", LINKS)
def test_links_that_lead_outside_are_refused(grpo_run, tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(grpo_run, run)
    outside.write_text("mine")
    path = run / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside)
    for opened in (RunFolder.read, RunFolder.resume):
        with pytest.raises(ValueError, match=r"is a link to .*outside, outside of the run folder"):
            opened(run)
    assert outside.read_text() == "mine"


def test_links_inside_a_run_and_of_its_checkpoints_are_read(grpo_run, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "disk"
    shutil.copytree(grpo_run, run)
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    (run / "samples.jsonl").rename(run / "all.jsonl")
    (run / "samples.jsonl").symlink_to("all.jsonl")
    (tmp_path / "latest").symlink_to(run)
    assert runs(["verify", str(tmp_path / "latest")]) == 0


def test_files_are_not_written_through_links(grpo_run, tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(grpo_run, run)
    outside.write_text("mine")
    (run / "report.html.tmp").symlink_to(outside)
    assert report([str(run)]) == 0
    assert outside.read_text() == "mine" and (run / "report.html").read_text().startswith("<!doc")


def test_markers_of_code_appear_where_it_runs(stranger):
    """Else the tests of this file could not fail."""
    load_recipe("recipe.py:Evil", stranger.path)
    pickle.loads(pickle.dumps(Touch(stranger.marker("pickle"))))
    assert stranger.ran == {"recipe", "pickle"}
