"""Declaration of settings: ranges, properties, and the records of a run."""

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest

from jrl.config.files import from_json, to_json
from jrl.config.run import RECORDS, RunConfig
from jrl.recipes import RECIPES, Sft
from jrl.setting import check_settings, names_with, property_of, setting


@dataclass(frozen=True)
class Record:
    CHANGEABLE: ClassVar[bool] = True

    rate: float = setting(1.0, minimum=0, maximum=2)
    bound: float | None = setting(None, above=1)
    size: int = setting(3, minimum=1, changeable=False)
    free: int = -1

    def __post_init__(self):
        check_settings(self)


@dataclass(frozen=True)
class Narrower(Record):
    rate: float = 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": -1.0}, r"rate=-1.0 must lie in 0..2"),
        ({"rate": float("nan")}, r"rate=nan must be a finite number"),
        ({"rate": 2.5}, r"rate=2.5 must lie in 0..2"),
        ({"bound": 1.0}, r"bound=1.0 must be above 1"),
        ({"size": 0}, r"size=0 must be at least 1"),
    ],
)
@pytest.mark.parametrize("kind", [Record, Narrower])
def test_check_settings_number_out_of_range(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_check_settings_numbers_in_range():
    assert Record(rate=2.0, bound=1.5, free=-7).free == -7 and Narrower().rate == 0.5


def test_property_of_redeclared_field_keeps_base_property():
    for kind in (Record, Narrower):
        assert names_with(kind, "changeable") == ["rate", "bound", "free"]
    assert property_of(Sft, "micro_batch", "changeable") is True


def test_setting_unknown_property():
    with pytest.raises(TypeError, match="no property sometimes"):
        setting(1, sometimes=True)


def test_run_config_each_field_has_one_record():
    names = [item.name for record in RECORDS for item in fields(record)]
    assert sorted(names) == sorted(item.name for item in fields(RunConfig))
    assert len(names) == len(set(names)) and max(len(fields(r)) for r in RECORDS) <= 18


@pytest.mark.parametrize("name", [item.name for item in fields(RunConfig)])
def test_from_json_missing_field_takes_default(name):
    config = to_json(RunConfig(), RECIPES["grpo"]())
    default = config["run"].pop(name)
    run, _ = from_json(config, "config.json")
    assert getattr(run, name) == property_of(RunConfig, name, "before", default)
