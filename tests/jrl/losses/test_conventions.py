"""The settings of other libraries: they are keywords of ours, and give their numbers."""

import ast
import inspect
import itertools
import re
from pathlib import Path
from typing import get_args

import chex
import jax
import numpy as np
import pytest
from compiled import jitted
from every_call import call, values

import jrl

PAGE = Path(__file__).parents[3] / "docs/objectives/conventions.md"
REWARDS, GROUPS = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 0, 0, 8])
PER_TOKEN = np.array([[1.0, 2, 3, 4], [10, 20, 0, 0], [7, 0, 0, 0]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_conventions_are_keywords_of_their_functions(like):
    for function, settings in jrl.conventions(like=like).items():
        parameters = dict(inspect.signature(getattr(jrl, function)).parameters)
        if "denominators" in parameters:
            parameters |= jrl.Denominators.__annotations__
        assert set(settings) <= set(parameters), function


def number(cell):
    """A cell of the table of the documentation; "off" and "none" are None."""
    return None if cell in ("off", "none") else float(cell)


def table(first):
    """The rows of the documentation's table whose first column has this heading."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [cells[0], *cells[2:]]


def value(text):
    """A setting as the page writes it."""
    return float(text) if text == "inf" else ast.literal_eval(text)


def defaults(function):
    """Defaults of a function, with the keywords that it hands on."""
    parameters = dict(inspect.signature(getattr(jrl, function)).parameters)
    if "denominators" in parameters:
        parameters = {**inspect.signature(jrl.aggregate).parameters, **parameters}
    return {name: p.default for name, p in parameters.items()}


def settings_of_the_page(like):
    """The settings as the table of the documentation has them, in its words."""
    header, *rows = table("point")
    column = header.index(f'`like="{like}"`')
    cells = {row[0]: row[column].split(" (")[0] for row in rows}

    reduction = {
        "aggregation": cells["default aggregation"],
        "empty_rows": {"is not counted": "skip", "counts as a sequence": "count"}[
            cells["a row that is all masked"]
        ],
    }
    clip_low, clip_high = map(number, cells["clip"].split(" / "))
    kind, max_log_ratio, max_value = cells[
        "KL: estimator, clamp of the log-ratio, of the estimate"
    ].split(", ")
    settings = {
        "aggregate": {"mode": reduction["aggregation"], "empty_rows": reduction["empty_rows"]},
        "grpo_advantages": {
            "scale": "group",
            "unbiased": {"n - 1": True, "n": False}[
                cells["standard deviation of a group: degrees of freedom"]
            ],
            "epsilon": number(cells["epsilon added to it"]),
            "singleton": {"its raw reward": "reward", "0": "zero"}[cells["a group of one"]],
        },
        "ppo_loss": {
            "clip_low": clip_low,
            "clip_high": clip_high,
            "clip_dual": number(cells["dual clip"]),
            "max_log_ratio": number(cells["clamp of the log-ratio"]),
            **reduction,
        },
        "kl_estimate": {
            "kind": kind,
            "max_log_ratio": number(max_log_ratio),
            "max_value": number(max_value),
        },
    }
    whitening = cells["whitening: variance"].split(", ")
    if whitening != ["none"]:
        added, least = (whitening[1].removeprefix(word) for word in ("plus ", "at least "))
        is_added = whitening[1].startswith("plus")
        settings["whiten"] = {
            "unbiased": whitening[0] == "n - 1",
            "epsilon": number(added) if is_added else 0.0,
            "min_variance": None if is_added else number(least),
        }
    if cells["value clip"] != "no critic":
        settings["value_loss"] = {"clip": number(cells["value clip"]), **reduction}
    if cells["overlong penalty past the limit"] != "unsupported":
        linear = cells["overlong penalty past the limit"] == "continues linearly"
        floor = None if linear else number(cells["overlong penalty past the limit"])
        settings["overlong_penalty"] = {"floor": floor}
    return settings


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_conventions_equal_the_page(like):
    settings = jrl.conventions(like=like)
    page = settings_of_the_page(like)
    assert {function: settings[function] for function in page} == page


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_conventions_page_lists_differences_from_defaults(like):
    header, *rows = table("function")
    column = header.index(f'`like="{like}"`')
    page = {row[0].strip("`"): row[column] for row in rows}
    settings = jrl.conventions(like=like)
    assert {function for function, cell in page.items() if cell != "-"} == set(settings)
    for function, inputs in settings.items():
        name, _, said = page[function].removeprefix("`").partition("`")
        assert name
        differs = dict(re.findall(r"`(\w+)=([^`]*)`", said))
        usual = defaults(function)
        expected = {name: x for name, x in inputs.items() if x != usual[name]}
        assert {name: value(x) for name, x in differs.items()} == expected


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_conventions_refuse_functions_without_counterpart(like):
    settings = jrl.conventions(like=like)
    name = {"verl": "verl 0.9", "trl": "TRL 1.16", "openrlhf": "OpenRLHF 0.11"}[like]
    message = rf"{name} has no counterpart of 'hapo_loss'.*choose one of .*ppo_loss"
    with pytest.raises(KeyError, match=message):
        settings["hapo_loss"]
    assert settings.get("hapo_loss") is None and "hapo_loss" not in settings


def test_conventions_cover_functions_of_each_library():
    verl, trl, openrlhf = (jrl.conventions(like=like) for like in get_args(jrl.Library))
    assert {
        "gpg_advantages",
        "gpg_loss",
        "gmpo_loss",
        "optimal_token_baseline",
        "dppo_loss",
    } <= set(verl)
    assert {"gspo_loss", "luspo_loss", "sapo_loss", "cispo_loss", "vespo_loss"} <= set(trl)
    assert {"gspo_loss", "rloo_advantages", "dr_grpo_advantages"} <= set(openrlhf)


@pytest.mark.slow
@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_conventions_are_accepted_by_their_functions(like):
    settings = jrl.conventions(like=like)
    if "clip_cov_loss" in settings:
        settings["clip_cov_loss"]["key"] = jax.random.key(0)

    @jax.jit
    def results():
        return {function: values(call(function, **inputs)) for function, inputs in settings.items()}

    chex.assert_tree_all_finite(results())


@pytest.mark.parametrize(("like", "epsilon"), [("verl", 1e-6), ("trl", 1e-4), ("openrlhf", 1e-9)])
def test_conventions_group_standard_deviation(like, epsilon):
    advantages = jitted.grpo_advantages(
        REWARDS, GROUPS, **jrl.conventions(like=like)["grpo_advantages"]
    )
    group = np.array([1.0, 0, 0, 1, 1])
    expected = (group - group.mean()) / (group.std(ddof=1) + epsilon)
    # Far below the differences between the three, the least of which is 1e-6.
    np.testing.assert_allclose(advantages[:5], expected, rtol=3e-7)


def test_conventions_group_of_one():
    rewards, groups = np.array([3.0, 1.0, 0.0]), np.array([4, 1, 1])
    verl, trl = (
        jitted.grpo_advantages(rewards, groups, **jrl.conventions(like=x)["grpo_advantages"])
        for x in ("verl", "trl")
    )
    np.testing.assert_allclose(verl[0], 3.0 / (1 + 1e-6), rtol=1e-6)
    assert trl[0] == 0


def test_conventions_whitening_of_openrlhf():
    x = np.array([[1.0, 3.0, 8.0]])
    settings = jrl.conventions(like="openrlhf")["whiten"]
    expected = (x - 4) / np.sqrt(np.var([1.0, 3, 8]))
    np.testing.assert_allclose(jitted.whiten(x, np.ones((1, 3)), **settings), expected, rtol=1e-6)
    # One token has no variance: the clamp stands in, and nothing is divided by zero.
    assert jitted.whiten(x, np.array([[0, 1, 0]]), **settings)[0, 1] == 0


def test_conventions_rows_without_tokens():
    mean = {"mode": "seq-mean-token-mean"}
    verl, trl = (
        jitted.aggregate(PER_TOKEN, MASK, **{**jrl.conventions(like=x)["aggregate"], **mean})
        for x in ("verl", "trl")
    )
    np.testing.assert_allclose(verl, (2.5 + 15) / 2)
    np.testing.assert_allclose(trl, (2.5 + 15) / 3)


def test_conventions_kl_clamps():
    far, near = np.array([-1.0]), np.array([-8.0])
    verl, trl = (
        jitted.kl_estimate(far, near, **{**jrl.conventions(like=x)["kl_estimate"], "kind": "k1"})
        for x in ("verl", "trl")
    )
    assert verl == trl == 7
    k3 = {
        x: jitted.kl_estimate(near, far, **jrl.conventions(like=x)["kl_estimate"])
        for x in ("verl", "trl")
    }
    assert k3["verl"] == 10
    np.testing.assert_allclose(k3["trl"], np.exp(7.0) - 8, rtol=1e-6)


def test_conventions_returns_a_new_dictionary():
    jrl.conventions(like="trl")["grpo_advantages"]["epsilon"] = 1.0
    assert jrl.conventions(like="trl")["grpo_advantages"]["epsilon"] == 1e-4
