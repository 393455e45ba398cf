"""The settings of other libraries: they are keywords of ours, and give their numbers."""

import inspect
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

import jrl

PAGE = Path(__file__).parents[3] / "docs/objectives/conventions.md"
REWARDS, GROUPS = jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), jnp.array([0, 0, 0, 0, 0, 8])
PER_TOKEN = jnp.array([[1.0, 2, 3, 4], [10, 20, 0, 0], [7, 0, 0, 0]])
MASK = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_every_entry_is_a_keyword_of_its_function(like):
    for function, settings in jrl.conventions(like=like).items():
        parameters = dict(inspect.signature(getattr(jrl, function)).parameters)
        if "denominators" in parameters:
            parameters |= jrl.Denominators.__annotations__
        assert set(settings) <= set(parameters), function


def number(cell):
    """A cell of the table of the documentation; "off" and "none" are None."""
    return None if cell in ("off", "none") else float(cell)


def settings_of_the_page(like):
    """The settings as the table of the documentation has them, in its words."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    header, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    column = header.index(f'`like="{like}"`')
    cells = {row[0]: row[column].split(" (")[0] for row in rows}

    reduction = {
        "aggregation": cells["default aggregation"],
        "empty_rows": {"is not counted": "skip", "counts as a sequence": "count"}[
            cells["a row without a true token"]
        ],
    }
    clip_low, clip_high = map(number, cells["clip"].split(" / "))
    kind, max_log_ratio, max_value = cells[
        "KL: estimator, clamp of the log-ratio, of the estimate"
    ].split(", ")
    settings = {
        "aggregate": {"mode": reduction["aggregation"], "empty_rows": reduction["empty_rows"]},
        "grpo": {
            "scale": "group",
            "unbiased": {"n - 1": True, "n": False}[
                cells["standard deviation of a group: degrees of freedom"]
            ],
            "epsilon": number(cells["added to it"]),
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
    if cells["overlong penalty past the limit"] != "not offered":
        linear = cells["overlong penalty past the limit"] == "falls on linearly"
        floor = None if linear else number(cells["overlong penalty past the limit"])
        settings["overlong_penalty"] = {"floor": floor}
    return settings


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_they_are_what_the_documentation_says(like):
    assert jrl.conventions(like=like) == settings_of_the_page(like)


@pytest.mark.parametrize("like", get_args(jrl.Library))
def test_every_entry_is_taken(like):
    settings = jrl.conventions(like=like)
    ones = jnp.ones((3, 4))
    calls = {
        "aggregate": lambda kw: jrl.aggregate(PER_TOKEN, MASK, **kw),
        "grpo": lambda kw: jrl.grpo(REWARDS, GROUPS, **kw),
        "whiten": lambda kw: jrl.whiten(PER_TOKEN, MASK, **kw),
        "ppo_loss": lambda kw: jrl.ppo_loss(-ones, -ones, PER_TOKEN, MASK, **kw)[0],
        "value_loss": lambda kw: jrl.value_loss(ones, ones, PER_TOKEN, MASK, **kw)[0],
        "kl_estimate": lambda kw: jrl.kl_estimate(-ones, -2 * ones, MASK, **kw),
        "overlong_penalty": lambda kw: jrl.overlong_penalty(
            jnp.array([30]), max_length=20, buffer=10, **kw
        ),
    }
    assert set(settings) <= set(calls)
    for function, keywords in settings.items():
        assert np.all(np.isfinite(calls[function](keywords)))


@pytest.mark.parametrize(("like", "epsilon"), [("verl", 1e-6), ("trl", 1e-4), ("openrlhf", 1e-9)])
def test_the_standard_deviation_of_a_group(like, epsilon):
    advantages = jrl.grpo(REWARDS, GROUPS, **jrl.conventions(like=like)["grpo"])
    group = np.array([1.0, 0, 0, 1, 1])
    expected = (group - group.mean()) / (group.std(ddof=1) + epsilon)
    # Far below the differences between the three, the least of which is 1e-6.
    np.testing.assert_allclose(advantages[:5], expected, rtol=3e-7)


def test_a_group_of_one():
    rewards, groups = jnp.array([3.0, 1.0, 0.0]), jnp.array([4, 1, 1])
    verl, trl = (
        jrl.grpo(rewards, groups, **jrl.conventions(like=x)["grpo"]) for x in ("verl", "trl")
    )
    np.testing.assert_allclose(verl[0], 3.0 / (1 + 1e-6), rtol=1e-6)
    assert trl[0] == 0


def test_whitening_by_the_population():
    x = jnp.array([[1.0, 3.0, 8.0]])
    settings = jrl.conventions(like="openrlhf")["whiten"]
    expected = (x - 4) / np.sqrt(np.var([1.0, 3, 8]))
    np.testing.assert_allclose(jrl.whiten(x, jnp.ones((1, 3)), **settings), expected, rtol=1e-6)
    # One token has no variance: the clamp stands in, and nothing is divided by zero.
    assert jrl.whiten(x, jnp.array([[0, 1, 0]]), **settings)[0, 1] == 0


def test_rows_without_tokens():
    mean = {"mode": "seq-mean-token-mean"}
    verl, trl = (
        jrl.aggregate(PER_TOKEN, MASK, **{**jrl.conventions(like=x)["aggregate"], **mean})
        for x in ("verl", "trl")
    )
    np.testing.assert_allclose(verl, (2.5 + 15) / 2)
    np.testing.assert_allclose(trl, (2.5 + 15) / 3)


def test_clamps():
    far, near = jnp.array([-1.0]), jnp.array([-8.0])
    verl, trl = (
        jrl.kl_estimate(far, near, **{**jrl.conventions(like=x)["kl_estimate"], "kind": "k1"})
        for x in ("verl", "trl")
    )
    assert verl == trl == 7
    k3 = {
        x: jrl.kl_estimate(near, far, **jrl.conventions(like=x)["kl_estimate"])
        for x in ("verl", "trl")
    }
    assert k3["verl"] == 10
    np.testing.assert_allclose(k3["trl"], np.exp(7.0) - 8, rtol=1e-6)


def test_the_dictionary_is_the_callers():
    jrl.conventions(like="trl")["grpo"]["epsilon"] = 1.0
    assert jrl.conventions(like="trl")["grpo"]["epsilon"] == 1e-4
