"""Recipes by name and from files."""

import dataclasses
import sys
from typing import ClassVar

import jax.numpy as jnp
import pytest

from jrl.config.files import from_json, to_json
from jrl.config.run import RunConfig
from jrl.recipes import RECIPES, ActorCritic, Grpo, Recipe
from jrl.recipes.load import load_recipe, reference_of, source_of
from jrl.runs.folder import RunFolder

OWN = """
from dataclasses import dataclass
from jrl.recipes import Grpo

@dataclass(frozen=True)
class Mine(Grpo):
    "GRPO with a knob."
    knob: float | None = 0.5
    "Turns nothing."

class Bare(Grpo):
    other: int = 3

number = 7
"""


def test_the_library_s_own():
    for name, kind in RECIPES.items():
        assert load_recipe(name) is kind
        assert reference_of(kind()) == name and source_of(kind()) is None


def test_a_recipe_of_a_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    kind = load_recipe(f"{tmp_path}/own.py:Mine")
    assert issubclass(kind, Grpo) and kind().name == "mine"
    assert load_recipe("own.py:Mine", tmp_path) is kind
    recipe = kind(knob=2.0)
    assert reference_of(recipe) == "recipe.py:Mine" and source_of(recipe) == OWN.encode()
    # A run has a copy, by which its configuration is read again.
    (tmp_path / "recipe.py").write_bytes(source_of(recipe))
    config = to_json(RunConfig(), recipe)
    assert from_json(config, tmp_path / "config.json") == (RunConfig(), recipe)
    # Another content is another class.
    (tmp_path / "own.py").write_text(OWN.replace("0.5", "0.25"))
    assert load_recipe("own.py:Mine", tmp_path)().knob == 0.25
    assert kind().knob == 0.5


def test_a_recipe_without_a_file_begins_no_run(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Inline(Grpo):
        pass

    with pytest.raises(ValueError, match=r"Inline of module \S*test_load could not be read again"):
        to_json(RunConfig(), Inline())
    (tmp_path / "own.py").write_text(OWN)
    config = to_json(RunConfig(), load_recipe(f"{tmp_path}/own.py:Mine")())
    with pytest.raises(ValueError, match=r"the file of its recipe recipe\.py:Mine: give recipe="):
        RunFolder.create(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("dappo", "recipe 'dappo' is unknown: did you mean dapo or ppo"),
        ("GRPO", "recipe 'GRPO' is unknown: did you mean grpo"),
        ("\N{EN DASH}steps", "begins with a dash that is no hyphen, .*: type two hyphens"),
        ("nothing.py:Mine", "recipe file .*nothing.py cannot be read: No such file"),
        ("own.py:Other", "own.py has no class Other that derives from jrl.recipes.Recipe"),
        ("own.py:number", "own.py has no class number that derives"),
        ("own.py:Bare", r"Bare is not a dataclass itself.* write @dataclass\(frozen=True\)"),
        ("broken.py:Mine", "broken.py cannot be run: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, reference, message):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0")
    modules = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        load_recipe(reference, tmp_path)
    assert not [name for name in set(sys.modules) - modules if "broken" in name]


def test_hooks_that_are_missing_are_named():
    @dataclasses.dataclass(frozen=True)
    class Empty(Recipe):
        """A recipe that forgot its targets."""

    with pytest.raises(ValueError, match="Empty does not define its targets: write a method"):
        Empty()

    @dataclasses.dataclass(frozen=True)
    class Uncritical(Empty):
        """A recipe that forgot the loss of its critic."""

        uses_critic: ClassVar[bool] = True

        def targets(self, batch):
            raise AssertionError

    with pytest.raises(ValueError, match="Uncritical does not define its critic_loss"):
        Uncritical()


def test_a_critic_without_a_lambda_says_so():
    @dataclasses.dataclass(frozen=True)
    class Silent(ActorCritic):
        """A recipe with a critic whose diagnostics cannot be drawn."""

        def targets(self, batch):
            raise AssertionError

    with pytest.raises(ValueError, match="recipe silent does not define the lambda"):
        Silent().policy_lambda(jnp.ones(2, int))
