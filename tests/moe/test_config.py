"""What a configuration refuses, and the sizes that the presets say they have."""

from dataclasses import replace

import pytest
from annotations import unchecked

from moe.config import PRESETS, GatedDeltaNet, ModelConfig, small, tiny, tiny_dense
from moe.execution import Execution
from moe.placement import specs
from moe.weights import num_active_parameters, num_parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size=0 must be at least 1"),
        ({"num_layers": 0}, r"num_layers=0 must be at least 1"),
        ({"d_model": -2}, r"d_model=-2 must be at least 1"),
        ({"num_heads": 0}, r"num_heads=0 must be at least 1"),
        ({"num_kv_heads": 0}, r"num_kv_heads=0 must be at least 1"),
        ({"head_dim": 0}, r"head_dim=0 must be at least 1"),
        ({"head_dim": 7}, r"head_dim=7 must be even"),
        ({"num_kv_heads": 3}, r"num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"num_experts": 0}, r"num_experts=0 and d_ff=0 leave no feed-forward layer"),
        ({"num_experts": -1}, r"num_experts=-1 is negative"),
        ({"d_ff": -8}, r"d_ff=-8 is negative"),
        ({"d_expert": 0}, r"d_expert=0 must be at least 1"),
        ({"experts_per_token": 0}, r"experts_per_token=0 must be in 1..num_experts=8"),
        ({"experts_per_token": 9}, r"experts_per_token=9 must be in 1..num_experts=8"),
        (
            {"softmax_after_topk": True, "router_scores": "sigmoid"},
            r'softmax_after_topk=True needs router_scores="softmax"',
        ),
        (
            {"softmax_after_topk": True, "renormalise": False},
            r"softmax_after_topk=True does not support renormalise=False",
        ),
        ({"routed_scaling": 0.0}, r"routed_scaling=0.0 must be above 0"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0 must be above 0; None drops no tokens"),
        ({"bias_update_rate": -1.0}, r"bias_update_rate=-1.0 must not be negative"),
        (
            {"num_expert_groups": 2, "expert_groups_per_token": 3},
            r"expert_groups_per_token=3 must be in 1..num_expert_groups=2",
        ),
        ({"num_expert_groups": 3}, r"num_expert_groups=3 does not divide num_experts=8"),
        (
            {"num_expert_groups": 4, "expert_groups_per_token": 2, "experts_per_token": 3},
            r"expert_groups_per_token=2 does not divide experts_per_token=3",
        ),
        (
            {"num_expert_groups": 4, "experts_per_token": 4},
            r"experts_per_token=4 exceeds the experts of expert_groups_per_token=1 groups of 2",
        ),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"vocab_size": 11, **change})


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("router_scores", r"\('softmax', 'sigmoid'\)"),
        ("drop_policy", r"\('probs', 'position'\)"),
        ("drop_scope", r"\('sub_sequence', 'full_sequence'\)"),
        ("norm_placement", r"\('before', 'after', 'both'\)"),
        ("query_key_norm", r"\('head', 'projection', None\)"),
        ("head", r"\('tied', 'untied', 'value'\)"),
        ("dtype", r"\('float32', 'bfloat16'\)"),
    ],
)
def test_refuses_unknown_names(name, choices):
    """Past the types, which only tests check."""
    config = ModelConfig(11)
    object.__setattr__(config, name, "best")
    with pytest.raises(ValueError, match=rf"{name}='best' must be one of {choices}"):
        config.__post_init__()


def test_experts_may_be_none_or_all():
    assert replace(tiny(11), experts_per_token=8).experts_per_token == 8
    # Without experts, how they would be used does not matter.
    assert ModelConfig(11, num_experts=0, d_ff=8, experts_per_token=99, d_expert=0).d_ff == 8


def test_as_critic_changes_the_head_only():
    assert tiny(11).as_critic() == replace(tiny(11), head="value")


# The built-in tasks have 15 to 60 characters; the bounds are the rounding of "about".
@pytest.mark.parametrize("vocab_size", [16, 64])
def test_presets_have_their_documented_sizes(vocab_size):
    assert 0.475e6 < num_parameters(tiny(vocab_size)) < 0.486e6
    assert 11.0e6 < num_parameters(small(vocab_size)) < 11.5e6
    dense, sparse = (num_parameters(preset(vocab_size)) for preset in (tiny_dense, tiny))
    # They differ by the router alone, 3 layers of 96 x 8.
    assert sparse - dense == 3 * 96 * 8
    assert num_active_parameters(tiny_dense(vocab_size)) == dense
    assert small(vocab_size).d_ff > 0
    named = {"tiny": tiny, "tiny-dense": tiny_dense, "small": small}
    assert {name: PRESETS[name] for name in named} == named


def test_biases_of_experts_are_counted():
    plain = tiny(13)
    biased = replace(plain, expert_bias=True, router_bias=True, attention_out_bias=True)
    assert biased.d_expert == 56
    expert, others = 2 * 56 + 96, 96 + 8
    assert num_parameters(biased) - num_parameters(plain) == 3 * (8 * expert + others)
    assert num_active_parameters(biased) - num_active_parameters(plain) == 3 * (2 * expert + others)
    sinks = replace(plain, attention_sinks=True, norm_placement="both")
    assert num_parameters(sinks) - num_parameters(plain) == 3 * (4 + 2 * 96)
    assert num_parameters(replace(plain, norm_placement="after")) == num_parameters(plain)


def delta(**changed):
    plain = {"layers": (0, 2), "num_key_heads": 2, "num_value_heads": 4}
    widths = {"key_head_dim": 5, "value_head_dim": 6, "conv_width": 4}
    return GatedDeltaNet(**{**plain, **widths, **changed})


def test_config_error_names_value():
    for changed, message in (
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"attention_scale": 0.0}, "attention_scale=0.0 must be above 0"),
        ({"num_experts": 0, "d_ff": 8, "router_bias": True}, "router_bias=True needs experts"),
        (
            {"full_attention_layers": (1,)},
            r"layers=\(1,\) must be some .* a window \(sliding_window=None",
        ),
        (
            {"full_attention_layers": (3,), "sliding_window": 4},
            r"all of the layers 0 to 2, and",
        ),
        ({"full_attention_layers": (0, 1, 2), "sliding_window": 4}, r"leave both out if all"),
        (
            {"num_dense_layers": 3, "dense_d_ff": 4},
            "num_dense_layers=3 needs experts in the layers",
        ),
        ({"num_dense_layers": 1}, "a width, dense_d_ff=0"),
        ({"shared_expert_gate": True}, "needs a shared expert"),
        (
            {"delta": delta(layers=(0, 1, 2))},
            r"delta.layers=\(0, 1, 2\) must be some but not all of the lay",
        ),
        (
            {"delta": delta(layers=(1, 0))},
            r"delta.layers=\(1, 0\) must be some but not all of .* in ascending order",
        ),
        ({"delta": delta(num_value_heads=3)}, "num_value_heads=3 is not a multiple of num_key_h"),
        ({"delta": delta(conv_width=1)}, "delta.conv_width=1 must be at least 2"),
        ({"delta": delta(key_head_dim=0)}, "delta.key_head_dim=0 must be at least 1"),
        (
            {"delta": delta(), "num_dense_layers": 1, "dense_d_ff": 4},
            "Gated DeltaNet do not support num_dense_layers=1",
        ),
        (
            {"delta": delta(), "execution": Execution(scan_layers=True)},
            "scan_layers=True needs layer types that",
        ),
        ({"attention_gate": True, "qkv_bias": True}, "attention_gate=True does not support qkv"),
        ({"unused_ids": ((5, 14),)}, r"unused_ids=\(\(5, 14\),\) must be ranges .* vocab_size=13"),
        ({"unused_ids": ((2, 4), (4, 6))}, "must be ranges in ascending order, apart from each"),
        ({"unused_ids": ((4, 4),)}, "must be ranges in ascending order"),
        ({"unused_ids": ((0, 13),)}, "leaves no token"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelConfig(13, **changed)


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([], ()),
        ([12], ((12, 13),)),
        ([12, 10, 11, 11], ((10, 13),)),
        ([0, 1, 5, 7, 8], ((0, 2), (5, 6), (7, 9))),
    ],
)
def test_with_unused_ids_makes_ranges(ids, ranges):
    config = ModelConfig(13).with_unused_ids(ids)
    assert config.unused_ids == ranges
    assert config.num_used_ids == 13 - len(set(ids))


@unchecked()
def test_config_in_place_of_model_is_refused():
    with pytest.raises(TypeError, match=r"pass Model\(config, mesh\)"):
        specs(tiny(8))
    with pytest.raises(AttributeError, match="no attribute 'num_layer'"):
        getattr(tiny(8), "num_layer")  # noqa: B009, no attribute that a type checker accepts
