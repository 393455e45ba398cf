import re
import subprocess
import sys
import time
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.runs import checkpoints as module
from jrl.runs.checkpoints import Checkpoints


class Moments(NamedTuple):
    mean: jax.Array
    num_updates: jax.Array


def make_state(seed=0):
    """A pytree with every kind of leaf, values that a cast would change among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (5,), dtype=np.uint32)
    return {
        "policy": {"w": jnp.asarray(words.view(np.float32)), "b/c": jnp.ones((2, 3), jnp.bfloat16)},
        "half": jnp.asarray([1 / 3, -0.0, jnp.inf, 1e-40], jnp.bfloat16),
        "special": jnp.asarray([jnp.nan, -0.0, -jnp.inf, 1e-45, 1 / 3], jnp.float32),
        "optimizer": (Moments(jnp.full((2,), 0.1), jnp.int32(-7)), None, ()),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "raw_key": jax.random.PRNGKey(5),
        "mask": jnp.asarray([True, False]),
        "cursor": np.asarray(2**40 + seed, np.int64),
        "pending": jnp.zeros((0, 7), jnp.int32),
        "nothing": np.zeros((3, 0)),
    }


def words(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(one, other):
    chex.assert_trees_all_equal_shapes_and_dtypes(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert isinstance(a, np.ndarray) == isinstance(b, np.ndarray)
        assert words(a) == words(b)


def test_restores_every_bit(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, state, {"cursor": 5, "notes": ["a", None, 0.1]})
    restored, meta = Checkpoints(tmp_path / "checkpoints").restore(None, like=make_state(seed=1))
    assert_same(restored, state)
    assert meta == {"cursor": 5, "notes": ["a", None, 0.1]}
    # The keys are keys: they continue the same stream.
    assert words(jax.random.split(restored["key"])) == words(jax.random.split(state["key"]))
    assert words(restored["keys"][2]) == words(state["keys"][2])


def test_restores_into_shapes_alone(tmp_path):
    state = {"w": jnp.arange(3.0), "key": jax.random.key(7), "none": jnp.zeros((0, 2))}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state)
    like = jax.eval_shape(lambda: state)
    assert_same(checkpoints.restore(0, like)[0], state)


def test_restores_into_another_layout(tmp_path):
    auto = (AxisType.Auto,) * 2
    saved = NamedSharding(jax.make_mesh((2, 4), ("a", "b"), axis_types=auto), P("a", "b"))
    wanted = NamedSharding(jax.make_mesh((4, 2), ("a", "b"), axis_types=auto), P("b"))
    state = {
        "w": jax.device_put(jnp.arange(8.0 * 12).reshape(8, 12), saved),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 6), saved.update(spec=P("a"))),
    }
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    like = {
        "w": jax.ShapeDtypeStruct((8, 12), jnp.float32, sharding=wanted),
        "keys": jax.ShapeDtypeStruct((6,), state["keys"].dtype, sharding=wanted),
    }
    restored, _ = checkpoints.restore(1, like)
    assert_same(restored, state)
    assert restored["w"].sharding == wanted
    assert restored["keys"].sharding.is_equivalent_to(wanted, 1)


@pytest.mark.slow
def test_large_arrays_are_stored_in_chunks(tmp_path, monkeypatch):
    """From which a reader on a mesh takes what it needs; an axis of prime size is not cut."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 1024)
    state = {"w": jnp.arange(16.0 * 96).reshape(16, 96), "prime": jnp.arange(1009.0)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    like = {
        "w": jax.ShapeDtypeStruct(
            (16, 96), jnp.float32, sharding=NamedSharding(mesh, P(None, "a"))
        ),
        "prime": jax.ShapeDtypeStruct((1009,), jnp.float32),
    }
    assert_same(checkpoints.restore(1, like)[0], state)
    stored = {"driver": "ocdbt", "base": (tmp_path / "1" / "state").as_uri()}
    arrays = {
        name: tensorstore.open({"driver": "zarr", "kvstore": {**stored, "path": name}}).result()
        for name in state
    }
    chunks = {name: array.chunk_layout.write_chunk.shape for name, array in arrays.items()}
    assert chunks == {"w": (16, 16), "prime": (1009,)}


def test_restores_a_part_alone(tmp_path):
    state = make_state()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    policy, _ = checkpoints.restore(None, make_state(seed=1)["policy"], part="policy")
    assert_same(policy, state["policy"])
    wrong = {"w": jax.ShapeDtypeStruct((7,), jnp.float32)}
    with pytest.raises(
        ValueError, match=r"extra policy/b/c; policy/w is float32\[5\], not float32\[7\]"
    ):
        checkpoints.restore(None, wrong, part="policy")


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_step() is None
    for step in (0, 9, 10, 30):
        checkpoints.save(step, {"w": jnp.full((2,), float(step))})
    checkpoints.wait()
    assert checkpoints.steps() == [10, 30]
    like = {"w": jnp.zeros(2)}
    assert checkpoints.restore(10, like)[0]["w"][0] == 10.0
    assert checkpoints.restore(None, like)[0]["w"][0] == 30.0
    with pytest.raises(ValueError, match=r"no checkpoint of step 9 in .*: there are 10, 30"):
        checkpoints.restore(9, like)
    checkpoints.drop_after(10)
    assert checkpoints.latest_step() == 10
    with pytest.raises(ValueError, match="keep=0 would leave no checkpoint"):
        Checkpoints(tmp_path, keep=0)


def test_meta_is_read_without_the_state(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="there is none"):
        checkpoints.meta()
    checkpoints.save(2, {"w": jnp.zeros(2)}, {"a": 1})
    assert checkpoints.meta() == {"a": 1}


def test_only_newer_steps_are_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"w": jnp.zeros(2)})
    for step in (5, 4, -1):
        with pytest.raises(ValueError, match=rf"step={step} is not newer than .* step 5"):
            checkpoints.save(step, {"w": jnp.zeros(2)})


def test_a_checkpoint_of_another_model_is_refused_with_all_that_differs(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(
        1, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(5), "c": {"d": jnp.zeros(2)}, "k": jnp.zeros(7)}
    )
    like = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(5, jnp.bfloat16), "e": jnp.zeros(2)}
    like["k"] = jnp.zeros(7)
    with pytest.raises(ValueError) as error:
        checkpoints.restore(1, like)
    message = str(error.value)
    assert "\n" not in message and "is of another model: missing e; extra c/d; " in message
    assert "a is float32[2,3], not float32[3,2]" in message
    assert "b is float32[5], not bfloat16[5]" in message
    assert message.endswith("use the configuration, and the version of jrl, that it was saved with")
    assert not re.search(r"\bk\b", message)


def test_keys_of_another_kind_are_another_model(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match=r"key is key<fry>\[\], not key<rbg>\[\]"):
        checkpoints.restore(1, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(ValueError, match=r"key is key<fry>\[\], not uint32\[2\]"):
        checkpoints.restore(1, {"key": jax.random.PRNGKey(0)})


def test_save_refuses_unsupported_leaves_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r'leaf "a/n" is 3 of type int: .*numpy.asarray'):
        checkpoints.save(1, {"a": {"n": 3}})
    with pytest.raises(ValueError, match='two leaves have the name "a/b"'):
        checkpoints.save(1, {"a": {"b": jnp.zeros(1)}, "a/b": jnp.zeros(1)})
    with pytest.raises(ValueError, match="meta cannot be written as JSON"):
        checkpoints.save(1, {"a": jnp.zeros(1)}, {"x": float("nan")})
    assert not (tmp_path / "checkpoints").exists()


def test_leftovers_are_ignored_by_readers_and_removed_by_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jnp.zeros(2)})
    checkpoints.wait()
    for name in ("2.writing", "2.writing.orbax-checkpoint-tmp", "0.deleting"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    assert Checkpoints(tmp_path).steps() == [1]
    assert (tmp_path / "2.writing.orbax-checkpoint-tmp").exists()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, {"w": jnp.ones(2)})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2", "notes"]


# Saves forever; every leaf of step n holds n, so that a mixture of two steps would show.
WRITER = """
import sys, jax.numpy as jnp
from jrl.runs.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=1)
for step in range(1, 1000):
    checkpoints.save(step, {str(i): jnp.full((64, 1024), step, jnp.int32) for i in range(8)})
"""


@pytest.mark.slow
@pytest.mark.parametrize("milliseconds", [0, 15, 45])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path, milliseconds):
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stderr=-1) as writer:
        try:
            # Step 3 has begun: one save after the first deletion.
            while not list(tmp_path.glob("3.*")) and not (tmp_path / "3").exists():
                assert writer.poll() is None and time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(milliseconds / 1000)
        finally:
            writer.kill()
    checkpoints = Checkpoints(tmp_path, keep=1)
    step = checkpoints.latest_step()
    assert step is not None and step >= 2
    like = {str(i): jnp.zeros((64, 1024), jnp.int32) for i in range(8)}
    restored, _ = checkpoints.restore(step, like)
    for leaf in restored.values():
        np.testing.assert_array_equal(leaf, step)
    checkpoints.save(step + 1, restored)
    checkpoints.wait()
    assert [entry.name for entry in tmp_path.iterdir()] == [str(step + 1)]


@pytest.mark.slow
def test_save_and_restore_print_nothing(tmp_path):
    program = """
import sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
from jrl.runs.checkpoints import Checkpoints
state = {"w": jnp.ones((3, 5)), "key": jax.random.key(0)}
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, state)
Checkpoints(sys.argv[1]).restore(1, state)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
