"""The functions of `jrl` on all cases and rules of the conformance suite."""

import pytest
from tiers import full_but

from jrl.conformance import check
from jrl.conformance.adapters import ours

FUNCTIONS = {quantity: function for quantity, _, function in ours.functions()}
# By token, of groups and a mask.
QUICK = ("gae", "dr_grpo_advantages", "geometric_rejection_mask")


@pytest.mark.parametrize("quantity", full_but(FUNCTIONS, *QUICK))
def test_function_conforms(quantity):
    report = check(FUNCTIONS[quantity], quantity, "jax")
    findings = (*report.cases, *report.rules)
    assert [f for f in findings if f.state not in ("holds", "rounded")] == []
    assert report.verdict == "agrees"
    assert report.rules or quantity.startswith(("adaptive", "bounded", "length", "overlong"))
