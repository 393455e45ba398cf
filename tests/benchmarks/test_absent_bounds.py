"""Lower bounds of kernels: what an operation needs, and what whole tiles multiply."""

import numpy as np
import pytest

from benchmarks.absent import bounds
from benchmarks.absent.kernel_cases import gpu_cases
from benchmarks.absent.machine_code import Assembly, Kernel
from benchmarks.absent.shapes import MODELS
from sharding.costs.hardware import HARDWARE

HOPPER = HARDWARE["h100"]
QWEN = MODELS["Qwen3-30B-A3B"]


def bound_of(model, operation, kernel):
    (case,) = (case for case in gpu_cases(model) if case.operation == operation)
    return bounds.bound(kernel, MODELS[model], case, HOPPER)


def test_a_product_needs_its_operations_or_its_bytes():
    slots = 4096 * 8
    products = 2 * slots * 2048 * 1536
    moved = 2 * (slots * 2048 + 128 * 2048 * 1536 + slots * 1536) + 4 * 128
    result = bound_of("Qwen3-30B-A3B", "gate/up product", "grouped_product")
    assert result.floor == pytest.approx(max(products / HOPPER.peak, moved / 3.35e12))
    sizes = np.random.default_rng(0).multinomial(slots, [1 / 128] * 128)
    stop = np.cumsum(sizes)
    # A tile for each block of 128 rows and each expert with rows in it.
    tiles = sum(
        len({*range(a // 128, (b - 1) // 128 + 1)}) for a, b in zip(stop - sizes, stop, strict=True)
    )
    issued = tiles * 128 * 2 * 2048 * 1536 / HOPPER.peak
    assert result.issued == pytest.approx(issued)
    slices = sum(-(-b // 64) - a // 64 for a, b in zip(stop - sizes, stop, strict=True))
    summed = bound_of("Qwen3-30B-A3B", "weight gradient", "grouped_sum")
    assert summed.issued == pytest.approx(slices * 64 * 2 * 2048 * 768 / HOPPER.peak)


@pytest.mark.parametrize(("window", "by_query"), [(None, True), (50, True), (50, False)])
def test_attention_visits_the_blocks_with_a_visible_pair(window, by_query):
    model = MODELS["odd"]  # 70 tokens, of blocks of 128
    query, key = np.arange(128)[:, None], np.arange(128)
    visible = (key <= query) & (query < 70) & (key < 70)
    if window is not None:
        visible &= query - key < window
    queries, keys = (128, 64) if by_query else (64, 128)
    blocks = visible.reshape(128 // queries, queries, 128 // keys, keys).any(axis=(1, 3))
    result = bounds._visited(model, window, queries, keys, by_query=by_query)
    assert result == blocks.sum() * queries * keys


def test_two_warpgroups_of_wide_heads_multiply_queries_and_keys_twice():
    pairs, visited = 4096 * 4097 / 2, 64 * 65 / 2 * 64**2
    result = bound_of("DeepSeek-V3", "attention gradient", "attention_grad_key_value")
    assert result.floor == pytest.approx(2 * 128 * 640 * pairs / HOPPER.peak)
    assert result.issued == pytest.approx(2 * 128 * 832 * visited / HOPPER.peak)
    assert 0.75 < result.share < 0.77


def test_a_decoding_step_reads_the_cache_of_its_layer():
    result = bound_of("Qwen3-30B-A3B", "decode attention", "decode_attention")
    cache = 2 * 2 * 16 * 4 * 128 * 4096
    assert cache < result.floor * HOPPER.memory_bandwidth < 1.01 * cache
    # Eight queries of a head are padded to 64.
    assert result.issued == pytest.approx(2 * 16 * 4 * 64 * 4096 * 256 / HOPPER.peak)
    assert result.share == 1


def test_slow_products_and_narrow_copies_are_defects():
    assembly = Assembly(100, 0, serialised=False)
    kernel = Kernel("take_rows", 1, 1, assembly, assembly, 0, {"LDG": 3}, 0)
    assert bounds.defects_of(kernel, bounds.Bound(1.0, 0.0)) == ["loads of less than 16 bytes"]
    kernel = kernel._replace(name="grouped_product")
    assert bounds.defects_of(kernel, bounds.Bound(1.0, 1.2)) == []
    slow = bounds.defects_of(kernel, bounds.Bound(3.0, 4.0))
    assert slow == ["its products allow 75% of the floor's rate"]
