"""Keywords with a typing error: the message names the function that was called."""

import inspect
from functools import partial

import jax
import pytest
from every_call import call, functions

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
def test_a_loss_names_itself_and_the_nearest_keyword(name):
    function = functions()[name]
    takes = {*inspect.signature(function).parameters, "num_tokens"}
    for given, meant in NEAR.items():
        if meant is not None and meant not in takes:
            continue
        fix = f"did you mean '{meant}'\\?" if meant else "it takes .*num_sequences.*num_tokens"
        named = rf"^{function.__name__}\(\) got an unexpected keyword '{given}': {fix}"
        with pytest.raises(TypeError, match=named) as error:
            jax.eval_shape(partial(call, name, **{given: 1}))
        assert "aggregate(" not in str(error.value) and "\n" not in str(error.value)


def test_all_losses_with_denominators_are_tried():
    assert {"ppo_loss", "value_loss", "gspo_loss", "hapo_loss", "gpg_loss"} <= set(LOSSES)
    assert len(LOSSES) == 15
