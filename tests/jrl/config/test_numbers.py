"""Numeric settings: only finite numbers, whole ones in fields of whole numbers, from any source."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from annotations import unchecked
from tiers import full_but

from jrl.checks import check_numbers
from jrl.config.files import from_json, to_json
from jrl.config.flags import default_run, parse_arguments
from jrl.config.run import RunConfig
from jrl.config.settings_file import Settings
from jrl.processes.coordinator import SINGLE_PROCESS, Processes
from jrl.recipes.load import LIBRARY

RECORDS = {"run": RunConfig, **LIBRARY}
NOT_FINITE = (math.inf, -math.inf, math.nan)


def numeric_fields(kind: type) -> dict[str, type]:
    """Fields with numbers, by their annotations as text: an implementation of its own."""
    result = {}
    for name, hint in get_type_hints(kind).items():
        if name not in {field.name for field in fields(kind)}:
            continue
        parts = {part.strip() for part in getattr(hint, "__name__", str(hint)).split("|")}
        if parts <= {"int", "float", "None", "NoneType"}:
            result[name] = float if "float" in parts else int
    return result


@pytest.mark.parametrize("record", full_but(RECORDS, "run", "tppo"))
@unchecked()
def test_every_numeric_field_refuses_infinite_numbers_and_nan(record):
    kind = RECORDS[record]
    numeric = numeric_fields(kind)
    assert len(numeric) > 15
    for name in numeric:
        for value in NOT_FINITE:
            with pytest.raises(ValueError, match=f"^{name}={value}"):
                kind(**{name: value})


@pytest.mark.parametrize("record", full_but(RECORDS, "run", "tppo"))
@unchecked()
def test_every_count_refuses_floats_texts_and_booleans(record):
    kind = RECORDS[record]
    for name, number in numeric_fields(kind).items():
        if number is int:
            for value in (8.0, "8", True):
                with pytest.raises(ValueError, match=f"^{name}={value!r} must be a whole number"):
                    kind(**{name: value})


@pytest.mark.parametrize("record", full_but(RECORDS, "run", "tppo"))
@unchecked()
def test_every_float_refuses_texts_and_takes_whole_numbers(record):
    kind = RECORDS[record]
    for name, number in numeric_fields(kind).items():
        if number is float:
            with pytest.raises(ValueError, match=f"^{name}=0.5 must be a finite number"):
                kind(**{name: "0.5"})
    assert kind() == kind(**{name: getattr(kind(), name) for name in numeric_fields(kind)})


@pytest.mark.parametrize("record", full_but(RECORDS, "run", "tppo"))
def test_settings_of_a_file_refuse_infinite_numbers_and_nan_in_every_float(record):
    kind, path = RECORDS[record], Path("settings.yaml")
    for name, number in numeric_fields(kind).items():
        for value in NOT_FINITE:
            with pytest.raises(ValueError, match=rf"settings\.yaml: {name}( is |=){value}"):
                Settings(path, None, {name: value}).apply_to(kind())
        if number is int:
            with pytest.raises(ValueError, match=f"{name} is 8.0, not "):
                Settings(path, None, {name: 8.0}).apply_to(kind())


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
def test_settings_file_refuses_infinite_numbers_and_nan(text, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(f"recipe: grpo\nlearning_rate: {text}\n")
    with pytest.raises(ValueError, match=r"settings\.yaml: learning_rate=.* must be a finite"):
        parse_arguments(["--config", str(path)])


@pytest.mark.parametrize("recipe", full_but(LIBRARY, "tppo"))
def test_config_json_refuses_infinite_numbers_and_nan_in_every_float(recipe, tmp_path):
    kind = LIBRARY[recipe]
    groups = {"run": RunConfig, "hyperparameters": kind}
    config = json.dumps(to_json(default_run(kind), kind()))
    for group, record in groups.items():
        for name, number in numeric_fields(record).items():
            if number is float:
                changed = json.loads(config)
                changed[group][name] = math.inf
                # As JSON has it: a number that no float can hold.
                text = json.dumps(changed).replace("Infinity", "1e999")
                with pytest.raises(ValueError, match=rf"config\.json: {name}=inf must be a finite"):
                    from_json(json.loads(text), tmp_path / "config.json")


FLAGS = [
    "grpo --learning-rate inf",
    "grpo --kl-coef nan",
    "grpo --reward-correct nan",
    "grpo --reward-wrong -inf",
    "grpo --warm-start-learning-rate inf",
    "grpo --lora-rank 4 --lora-alpha inf",
    "ppo --gamma nan",
    "sft --learning-rate nan",
    "grpo --hang-deadline inf",
]


@pytest.mark.parametrize("flags", full_but(FLAGS, *FLAGS[:2]))
def test_flags_refuse_infinite_numbers_and_nan(flags):
    *_, name, value = flags.split()
    field = name.removeprefix("--").replace("-", "_")
    with pytest.raises(ValueError, match=f"{field}={value} must be a finite number"):
        parse_arguments(flags.split())


@unchecked()
def test_nested_settings_and_lists_are_checked():
    @dataclass(frozen=True)
    class Outer:
        weights: tuple[float, ...] = (1.0,)
        processes: Processes = SINGLE_PROCESS

    check_numbers(Outer())
    with pytest.raises(ValueError, match="weights=nan"):
        check_numbers(Outer(weights=(1.0, math.nan)))
    with pytest.raises(ValueError, match="coordinator_timeout=inf"):
        check_numbers(Outer(processes=Processes(coordinator_timeout=math.inf)))  # pyright: ignore
