"""The papers' formulas give the papers' numbers."""

from typing import Any

import pytest

from moe.config import ModelConfig, training_flops
from moe.planner.models import PRESETS, ModelSizes
from moe.weights import num_parameters
from sharding.costs.hardware import HARDWARE, parse
from tests.oracles import parallelism

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x22b", 140.6),
        ("mixtral-8x22b-g8t8", 140.6),
        ("llama3-8x70b", 465.0),
        ("qwen2-57b-a14b", 57.4),
        ("mixtral-8x7b", 46.7),
        ("megascale-352b", 351.9),
        ("qwen3-235b-a22b", 235.1),
    ],
)
def test_presets_are_as_large_as_their_names(name, billions):
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "time", "gigaflops"),
    [
        ("mixtral-8x22b", 4096, 242.2),
        ("mixtral-8x22b-g8t8", 4096, 140.7),
        ("llama3-8x70b", 4096, 771.3),
        ("qwen2-57b-a14b", 4096, 84.7),
        ("megascale-352b", 8192, 282.46),
        ("qwen3-235b-a22b", 4096, 148.03),
    ],
)
def test_arithmetic_per_token(name, time, gigaflops):
    assert PRESETS[name].training_flops(time) / 1e9 == pytest.approx(gigaflops, rel=1e-3)


def test_parameters_equal_the_networks():
    given: dict[str, Any] = {
        "num_layers": 3,
        "d_model": 10,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "num_experts": 7,
        "experts_per_token": 2,
        "d_expert": 11,
        "d_ff": 13,
        "num_dense_layers": 1,
        "dense_d_ff": 17,
        "vocab_size": 23,
    }
    sizes, config = ModelSizes(**given), ModelConfig(**given)
    assert sizes.parameters == num_parameters(config)
    assert sizes.training_flops(5) == training_flops(config, 5)


def test_volumes_of_the_352_billion_model():
    b, s, h, n, m, k = 1, 8192, 4096, 8, 4, 3
    megabytes = [
        2 * elements / 1e6
        for elements in (
            parallelism.tensor_parallel(b, s, h, n),
            parallelism.sequence_parallel_printed(b, s, h, n, m),
            parallelism.sequence_parallel_counted(b, s, h, n, m),
            parallelism.expert_parallel(b, s, h, n, k),
        )
    ]
    assert megabytes == pytest.approx([117.4, 36.7, 18.4, 44.0], abs=0.05)


def test_both_readings_of_the_second_formula():
    sizes = 2, 64, 32, 8, 4
    printed = parallelism.sequence_parallel_printed(*sizes)
    assert printed == 2 * parallelism.sequence_parallel_counted(*sizes)
    assert printed / parallelism.tensor_parallel(2, 64, 32, 8) == 0.3125


def test_experts_over_tensor_parallelism_is_k_over_n():
    for k, ratio in ((3, 0.375), (2, 0.25), (1, 0.125), (6, 0.75)):
        sizes = 1, 128, 16, 8
        assert parallelism.expert_parallel(*sizes, k) / parallelism.tensor_parallel(*sizes) == ratio


def test_attention_synchronisation_hides_inside_under_outside():
    outside, inside = parallelism.attention_synchronisation(1e9, n=8, d=64)
    h100 = HARDWARE["h100"]
    assert (outside / h100.outside) / (inside / h100.inside) == pytest.approx(1.27, abs=0.005)


@pytest.mark.parametrize(
    ("d_expert", "bandwidth", "ratio"),
    [(14336, 200e9, 4.35), (14336, 50e9, 1.09), (1408, 200e9, 0.43), (1408, 50e9, 0.11)],
)
def test_scale_up_ratio(d_expert, bandwidth, ratio):
    assert parallelism.scale_up_ratio(d_expert, bandwidth, 989e12) == pytest.approx(
        ratio, abs=0.006
    )


@pytest.mark.parametrize(
    ("k", "f", "m", "kept", "selective"),
    [(3, 3.5, 4, 66.75, 25.5), (2, 3.5, 4, 54.25, 18.5), (2, 8 / 3, 6, 48.83, 15.0)],
)
def test_activations(k, f, m, kept, selective):
    found = [parallelism.activations(1, 8, 1, 8, k, f, m, selective=s) for s in (False, True)]
    assert found == pytest.approx([kept, selective], abs=0.01)


@pytest.mark.parametrize(
    ("name", "tokens", "ep", "etp", "mebibytes"),
    [
        ("mixtral-8x22b", 2048, 8, 1, (84, 0)),
        ("mixtral-8x22b", 2048, 4, 2, (72, 96)),
        ("mixtral-8x22b-g8t8", 1024, 8, 1, (168, 0)),
        ("mixtral-8x22b-g8t8", 2048, 8, 2, (336, 384)),
        ("qwen2-57b-a14b", 2048, 4, 1, (168, 0)),
        ("qwen2-57b-a14b", 2048, 4, 2, (168, 224)),
    ],
)
def test_volumes_of_folding(name, tokens, ep, etp, mebibytes):
    model = PRESETS[name]
    sizes = tokens, model.experts_per_token, model.d_model
    sent = parallelism.expert_exchange(*sizes, ep), parallelism.expert_tensor_exchange(*sizes, etp)
    assert tuple(2 * elements / MIB for elements in sent) == pytest.approx(mebibytes, abs=0.5)


def test_hardware_is_named_with_its_number():
    assert parse("h100x64") == (HARDWARE["h100"], 64)
    assert parse("v5px16") == (HARDWARE["v5p"], 16)
    for wrong in ("h100", "h100x0", "x8", "abacusx4"):
        with pytest.raises(ValueError, match="write for example h100x64"):
            parse(wrong)


def test_sizes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="d_expert=0 must be at least 1"):
        ModelSizes(1, 2, 1, 1, 2, 3, num_experts=2, experts_per_token=1)
