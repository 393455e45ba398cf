"""Settings: numbers of any library, refusals of one line, traced values, misspelled keywords."""

import inspect
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_call import REQUIRED, arguments, call, functions, values
from tiers import full_but

# Settings that are off or counted unless they are given.
OPTIONAL = {
    "clip": 0.5,
    "clip_dual": 2.0,
    "fallback": 1.5,
    "guard": 4.0,
    "max_value": 0.25,
    "max_length": 4,
    "mean": 1.5,
    "min_variance": 0.5,
    "num_sequences": 4,
    "num_tokens": 8,
}
# Those whose value decides what is compiled.
STATIC = {"k", "fraction", "quantile", "num_bins", "chunk_size"}
# Whose `beta` does; the `beta` of others is a weight.
DIVERGENCES = {"jsd_from_logits", "top_k_divergence"}
# Those that may be below 0.
SIGNED = {
    "adaptive_entropy_coefficient": {"target", "low", "high"},
    "bounded_value": {"low", "high"},
    "clip_cov_loss": {"low", "high"},
    "diagnostics.calibration": {"low", "high"},
    "gpg_advantages": {"alpha"},
    "off_policy_sequence_mask": {"max_divergence"},
    "overlong_penalty": {"floor", "max_length"},
}
# Those that the usual call does not reach, and those that are measured and not chosen.
UNREAD = {"aggregate": {"max_length"}}
MEASURED = {"num_samples"}
DISCOUNTS = {"gamma", "lam", "lam_policy", "lam_critic"}
# Those that may be arrays, one entry per token or row.
SPREAD = {*DISCOUNTS, "clip_low", "clip_high"}
# A scalar in the working precision, and one that keeps its own.
KINDS = (np.float32, jnp.float32, np.float64, lambda x: np.asarray(x, np.float32))


def settings_of(name):
    """The numbers that a function takes by keyword, with a value for each."""
    keywords = {
        p.name: p.default
        for p in inspect.signature(functions()[name]).parameters.values()
        if p.kind == p.KEYWORD_ONLY
    }
    if "denominators" in inspect.signature(functions()[name]).parameters:
        keywords |= dict.fromkeys(("num_tokens", "num_sequences"))
    result = {}
    for setting, default in keywords.items():
        value = REQUIRED.get(name, {}).get(setting, default)
        value = OPTIONAL.get(setting) if value is None else value
        if setting == "alpha" and name == "gpg_advantages":
            value = 1.5
        if type(value) in (int, float) and setting not in MEASURED:
            result[setting] = value
    return result


def static_of(name):
    """The settings of a function that decide what is compiled."""
    static = STATIC | {"beta"} if name in DIVERGENCES else STATIC
    return static & settings_of(name).keys()


NAMES = [name for name in functions() if settings_of(name)]
QUICK = ("gae", "clip_cov_loss", "ppo_loss", "value_loss")


def refused(name, **changes):
    """A call that is to fail. Losses and advantages of groups compute something before they look at
    some settings: traced, that is no program. All others look first, and tracing takes longer."""
    if name.endswith(("_advantages", "_loss")):
        return jax.eval_shape(lambda: call(name, **changes))
    return call(name, **changes)


def program(name, arrays, settings):
    """The computation as text: equal programs have equal results, to the last bit."""

    def of(arrays):
        return call(name, **arrays, **settings)

    return str(jax.make_jaxpr(of)(arrays))


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_settings_accept_numpy_and_jax_numbers(name):
    inputs, of_python = {}, {}
    for n, (setting, value) in enumerate(settings_of(name).items()):
        if setting in DISCOUNTS:
            continue  # Those may be arrays, and stay what they are.
        kind = KINDS[n % 4] if type(value) is float else (np.int64, jnp.int32)[n % 2]
        inputs[setting] = kind(value)
        of_python[setting] = type(value)(inputs[setting])
    arrays = arguments(name)
    assert program(name, arrays, inputs) == program(name, arrays, of_python)


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_settings_may_be_traced(name):
    arrays = arguments(name)
    traced = {s: x for s, x in settings_of(name).items() if s not in static_of(name)}

    def of(settings, arrays):
        return call(name, **arrays, **settings)

    inputs = jax.eval_shape(of, traced, arrays)
    known = jax.eval_shape(lambda arrays: of(traced, arrays), arrays)
    chex.assert_trees_all_equal_shapes_and_dtypes(inputs, known)


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_settings_refuse_values_that_are_no_number(name):
    for setting in settings_of(name).keys() - SPREAD - UNREAD.get(name, set()):
        for wrong, message in (
            (np.array([0.5, 0.25, 1]), rf"{setting} (has shape \(3,\) and )?must be one "),
            (float("nan"), f"{setting}=nan "),
            ("much", f"{setting}='much' "),
        ):
            with pytest.raises(ValueError, match=message) as error:
                refused(name, **{setting: wrong})
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", full_but(NAMES, *QUICK))
def test_settings_refuse_negative_values(name):
    free = SIGNED.get(name, set()) | UNREAD.get(name, set()) | DISCOUNTS
    for setting in settings_of(name).keys() - free:
        for kind in (int, np.float32):
            with pytest.raises(ValueError, match=rf"{setting}=-1(\.0)? ") as error:
                call(name, **{setting: kind(-1)})
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in NAMES if DISCOUNTS & settings_of(name).keys()])
def test_discounts_must_be_between_0_and_1(name):
    rule = r"^{}=\S+ must (lie in \[0, 1\]: beyond|be a number, or an array)"
    for setting in DISCOUNTS & settings_of(name).keys():
        for wrong in (-0.5, 2, np.float32(1.5), float("nan"), "much"):
            with pytest.raises(ValueError, match=rule.format(setting)) as error:
                call(name, **{setting: wrong})
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in NAMES if static_of(name)])
def test_static_settings_refuse_traced_numbers(name):
    for setting in static_of(name):
        with pytest.raises(ValueError, match=rf"{setting} is traced.*static_argnames"):
            jax.eval_shape(lambda x, s=setting: call(name, **{s: x}), 2.0)


def test_ppo_refuses_negative_bounds_per_token():
    wrong = jnp.array([[0.25, -0.5, 0.25]] * 2)
    with pytest.raises(ValueError, match=r"clip_low=-0\.5 is a distance and cannot be negative"):
        call("ppo_loss", clip_low=wrong)
    # What lies under a false mask is not read.
    hidden = {"mask": wrong > 0, "aggregation": None}
    kept, _ = call("ppo_loss", clip_low=wrong, **hidden)
    np.testing.assert_array_equal(kept, call("ppo_loss", clip_low=0.25, **hidden)[0])
    jax.eval_shape(lambda bound: call("ppo_loss", clip_low=bound), wrong)


@pytest.mark.parametrize("wrong", [(0.5, 0.25, 1.0), np.ones(3), np.ones((2, 2)), ()])
def test_value_clip_is_one_or_two_distances(wrong):
    with pytest.raises(ValueError, match=r"clip has shape .* and must be one distance, or two as"):
        call("value_loss", clip=wrong)


def test_value_clip_accepts_lists_and_arrays():
    expected = values(call("value_loss", clip=(0.25, 0.5)))
    both = np.array([0.25, 0.5])
    for pair in (both.tolist(), both, jnp.asarray(both), (np.float32(0.25), 0.5)):
        chex.assert_trees_all_equal(values(call("value_loss", clip=pair)), expected)
    with pytest.raises(ValueError, match=r"clip=-0\.5 is a distance and cannot be negative; None"):
        call("value_loss", clip=jnp.array([0.25, -0.5]))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("top_entropy_mask", "threshold"),
        ("adaptive_kl_coefficient", "kl"),
        ("adaptive_entropy_coefficient", "entropy"),
    ],
)
def test_measured_settings_must_be_scalars(name, argument):
    with pytest.raises(ValueError, match=rf"{argument} has shape \(3,\) and must be one number"):
        call(name, **{argument: jnp.ones(3)})


def test_pass_at_k_refuses_fractions():
    for wrong in (2.5, np.float32(2.5)):
        with pytest.raises(ValueError, match=r"k=2\.5 must be a whole number"):
            call("pass_at_k_exact_advantages", k=wrong)


def test_num_tokens_must_be_a_scalar():
    mask = jnp.ones((2, 3))
    for name in ("aggregate", "ppo_loss", "value_loss"):
        with pytest.raises(ValueError, match=r"num_tokens has shape \(2,\) and must be one number"):
            call(name, mask=mask, num_tokens=mask.sum(-1))
        call(name, mask=mask, num_tokens=mask.sum())


NEAR = {
    "clip_hgh": "clip_high",
    "num_token": "num_tokens",
    "agregation": "aggregation",
    "max_logratio": "max_log_ratio",
    "importance_weight": "importance_weights",
    "loss_mask": "mask",
    "temperature": None,
}
LOSSES = [
    name for name, f in functions().items() if "denominators" in inspect.signature(f).parameters
]


@pytest.mark.parametrize("name", LOSSES)
def test_misspelled_keyword_names_the_nearest(name):
    function = functions()[name]
    takes = {*inspect.signature(function).parameters, "num_tokens"}
    for inputs, meant in NEAR.items():
        if meant is not None and meant not in takes:
            continue
        fix = f"did you mean '{meant}'\\?" if meant else "it takes .*num_sequences.*num_tokens"
        named = rf"^{function.__name__}\(\) got an unexpected keyword '{inputs}': {fix}"
        with pytest.raises(TypeError, match=named) as error:
            jax.eval_shape(partial(call, name, **{inputs: 1}))
        assert "aggregate(" not in str(error.value) and "\n" not in str(error.value)


def test_misspelled_keywords_are_tried_on_all_losses():
    named = {name for name in functions() if name.endswith("_loss")}
    assert {"ppo_loss", "value_loss", "gspo_loss", "hapo_loss", "gpg_loss"} <= set(LOSSES)
    assert named - set(LOSSES) == {"positive_example_loss"}  # it has a count of its own
    assert set(LOSSES) <= named
