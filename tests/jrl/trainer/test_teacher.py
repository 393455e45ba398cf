"""A teacher and other networks from files: scores, settings that are refused, resumed runs."""

import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from annotations import unchecked
from jax.sharding import PartitionSpec as P
from programs import on_mesh
from small_runs import (
    fresh_weights,
    metrics_of,
    one_step,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from tiers import full_but

import jrl
from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.recipes import RECIPES, Grpo, NetworkSpec
from jrl.recipes.base.batch import Batch, over_rows
from jrl.recipes.base.teacher import TeacherFailed, check_teacher
from jrl.recipes.load import load_recipe
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.runs.records import read_object
from jrl.text.tokenizer import Tokenizer
from jrl.train import main
from jrl.trainer.evaluation.network_files import (
    NetworkFile,
    _check_same_tokens,
    check_networks,
    load_network_files,
    notes_on_teacher,
)
from jrl.trainer.evaluation.saved_policy import load_model
from jrl.trainer.learner.learner import weights_of
from jrl.trainer.setup.fit import fit
from jrl.trainer.setup.memory import WORKSPACE, memory, run_memory, weight_bytes
from jrl.trainer.setup.network import network_of
from jrl.trainer.setup.setup import build_setup
from jrl.trainer.state import init_state, init_weights
from jrl.trainer.step import _score_frozen, add_teacher_term, with_targets
from moe.architecture.lora import Lora
from moe.config import Model, preset
from moe.model import next_token_logits

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
BEYOND = PAGE.split('```python title="beyond.py"\n')[1].split("```")[0]
"""The recipe as the page has it."""
SIZES = [
    *("--task", "sort", "--prompts", "4", "--group-size", "2"),
    *("--warm-start-steps", "1", "--eval-prompts", "4"),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher") / "run"
    assert main(["grpo", *SIZES, "--model", "small", "--steps", "1", "--run-dir", str(folder)]) == 0
    return folder


def _resumed(folder):
    """Copy of a run that was killed after its first step, resumed."""
    stopped = folder.with_name("stopped")
    shutil.copytree(folder, stopped)
    Checkpoints(stopped / "checkpoints").drop_after(1)
    assert main(["--resume", "--run-dir", str(stopped)]) == 0
    return stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("expert", ["--recipe", "FILE:Beyond"]),
        ("teacher", ["opd", "--layout", "dp2 / ep2", "--model", "tiny", "--group-size", "1"]),
        ("teacher", ["opd", "--layout", "tp2", "--teacher-layout", "dp2", "--lora-rank", "2"]),
        ("teacher", ["opd", "--layout", "pp2", "--teacher-dtype", "bfloat16"]),
        ("teacher", ["tppo", "--window", "5", "--lora-rank", "2", "--teacher-baseline", "kl"]),
        ("teacher", ["grpo", "--max-staleness", "1", "--packing", "True"]),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else each,
)
def test_run_with_network_of_another_width_resumes(tmp_path, teacher, role, options):
    (tmp_path / "own.py").write_text(BEYOND)
    options = [word.replace("FILE", f"{tmp_path}/own.py") for word in options]
    for flag, value in (("--model", "tiny-dense"), ("--group-size", "2")):
        options += [] if flag in options else [flag, value]
    options += [*SIZES[:4], *SIZES[6:], f"--{role}", str(teacher)]
    straight = tmp_path / "straight"
    options += ["--checkpoint-every", "1", "--steps", "2", "--run-dir", str(straight)]
    assert main(options) == 0
    assert metrics_of(_resumed(straight)) == metrics_of(straight)
    # An advantage per token; the checkpoint has a path and a hash.
    for line in metrics_of(straight)[1:]:
        assert line["critic/advantages/max"] != line["critic/advantages/min"]
        if role == "teacher":
            assert float(line["teacher/gap"]) != 0 and float(line["teacher/unscored"]) == 0
    checkpoints = Checkpoints(straight / "checkpoints")
    record = checkpoints.meta(2)["networks"][role]
    assert record["path"] == str(teacher) and record["step"] == 1 and len(record["sha256"]) == 64
    tree = read_object(straight / "checkpoints/2/tree/metadata", "")
    assert not [name for name in tree if role in name]


@pytest.mark.slow
def test_teacher_coef_of_0_is_no_teacher(tmp_path, teacher):
    plain, zero = tmp_path / "plain", tmp_path / "zero"
    options = ["grpo", *SIZES, "--model", "tiny-dense", "--steps", "2"]
    assert main([*options, "--run-dir", str(plain)]) == 0
    options += ["--teacher", str(teacher), "--teacher-coef", "0"]
    assert main([*options, "--run-dir", str(zero)]) == 0
    assert metrics_of(zero) == metrics_of(plain)


@pytest.mark.slow
def test_logprobs_of_a_teacher_equal_its_own_network(teacher):
    """Of every sampled token, by the network and the weights of the teacher's run."""
    recipe = RECIPES["opd"](teacher=str(teacher), prompts=2, group_size=2)
    run = RunConfig(task="sort", model="tiny-dense", warm_start_steps=0, eval_prompts=4)
    setup = build_setup(run, recipe)
    tokens = np.random.default_rng(0).integers(0, setup.tokenizer.vocab_size, (4, 24), np.int32)
    tokens[1::2, :16] = tokens[::2, :16]  # two completions of each prompt
    time = np.arange(24)[None]
    valid, mask = (
        np.broadcast_to(time >= 3, tokens.shape),
        np.broadcast_to(time >= 16, tokens.shape),
    )
    setup = replace(setup, prompt_length=16, response_length=8)
    assert setup.recipe.group_size == 2
    batch = jax.device_put(Batch(tokens, valid, mask), over_rows(setup.mesh))
    loaded, _ = load_network_files(setup.networks, setup.network_files)
    network = setup.networks.frozen["teacher"]
    result, argmax = _score_frozen(setup.networks, network, loaded["teacher"], batch)

    folder = RunFolder.read(teacher)
    config = network_of(preset("small", setup.tokenizer.vocab_size), run_of(folder))
    weights, _ = load_model(folder, Model(config, setup.mesh))
    logits = on_mesh(
        lambda *inputs: next_token_logits(*inputs, Model(config, setup.mesh))[0][None],
        setup.mesh,
        (P(), P(), P()),
        P(setup.mesh.axes),
    )
    assert config.d_model != setup.model.d_model
    expected = logits(weights, tokens, valid).reshape(4, 24, -1)
    is_best = tokens[:, 1:] == np.argmax(expected[:, :-1], axis=-1)
    np.testing.assert_array_equal(np.asarray(argmax)[:, 1:][mask[:, 1:]], is_best[mask[:, 1:]])
    expected = jax.nn.log_softmax(expected[:, :-1])
    expected = np.take_along_axis(np.asarray(expected), tokens[:, 1:, None], -1)[..., 0]
    difference = (np.asarray(result)[:, 1:] - expected)[mask[:, 1:]]
    assert np.max(np.abs(difference)) < 1e-4, difference


@pytest.mark.parametrize(
    ("role", "spec", "message"),
    [
        ("policy", NetworkSpec("x"), "the role is taken"),
        ("judge", NetworkSpec("x", trained=True), "critic of a recipe with uses_critic"),
        ("judge", NetworkSpec(layout="tp2"), "layout='tp2' is for frozen networks from files"),
        ("judge", NetworkSpec(dtype="float32"), "dtype='float32' is for frozen networks"),
    ],
)
def test_networks_that_cannot_be_are_refused(role, spec, message):
    class Own(Grpo):
        networks = {role: spec}  # noqa: RUF012 - in place of a property, never changed

    with pytest.raises(ValueError, match=message):
        check_networks(Own(), 8)


def test_former_hooks_are_refused(tmp_path):
    source = "from dataclasses import dataclass\nfrom jrl.recipes import Grpo\n"
    source += (
        "@dataclass(frozen=True)\nclass Own(Grpo):\n    def entropy_statistics(self, b): ...\n"
    )
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ValueError, match=r"Own defines entropy_statistics.*write update_state"):
        load_recipe(f"{tmp_path}/own.py:Own")()


TIME, PROMPT = 6, 2
MASK = (np.arange(TIME) >= PROMPT) & (np.arange(TIME) < np.array([[6], [5], [2]]))


def _scored(*rows):
    """Batch of three responses, the last of them empty, of which a policy finds every token equally
    likely."""
    teacher = np.where(MASK, np.array(rows, np.float32)[:, None], np.nan).astype(np.float32)
    policy = np.full(MASK.shape, -2.0, np.float32)
    return Batch(
        np.zeros(MASK.shape, np.int32),
        MASK,
        MASK,
        old_logprobs=policy,
        logprobs={"teacher": teacher},
        argmax={"teacher": np.where(np.arange(TIME) == PROMPT, 1.0, 0.0) * MASK},
    )


@pytest.mark.parametrize(
    ("rows", "terms", "metrics"),
    [
        ((-2.0, -2.0), (0.0, 0.0), {"gap": 0.0, "far": 0.0, "agreement": 2 / 7, "unscored": 0.0}),
        ((-1.0, -8.0), (0.5, -3.0), {"gap": 2.0, "far": 3 / 7, "agreement": 2 / 7}),
        ((-1.0, -np.inf), (0.5, None), {"gap": -1.0, "agreement": 1 / 4, "unscored": 0.5}),
        ((np.nan, -1.0), (None, 0.5), {"gap": -1.0, "agreement": 1 / 3, "unscored": 0.5}),
    ],
)
def test_add_teacher_adds_its_signal_to_rows_that_it_scores(rows, terms, metrics):
    recipe, before = Grpo(teacher="x", teacher_coef=0.5), np.full(MASK.shape, 7.0, np.float32)
    found = add_teacher_term(recipe, _scored(*rows, 0.0), before, MASK)
    scored = np.array([[term is not None] for term in (*terms, 0.0)])
    expected = np.array([[term or 0.0] for term in (*terms, 0.0)])
    np.testing.assert_array_equal(found[0], np.where(MASK, before + expected, before))
    np.testing.assert_array_equal(found[1], MASK & scored)
    assert {name: float(found[2][f"teacher/{name}"]) for name in metrics} == pytest.approx(metrics)


def test_divergence_is_the_baseline_of_the_term():
    batch = replace(_scored(-1.0, -8.0, 0.0), kl={"teacher": np.where(MASK, 0.25, np.nan)})
    advantages, _, metrics = add_teacher_term(Grpo(teacher="x"), batch, np.zeros(MASK.shape), MASK)
    np.testing.assert_allclose(advantages[0][MASK[0]], 1.0 + 0.25)
    np.testing.assert_allclose(advantages[1][MASK[1]], -6.0 + 0.25)
    assert float(metrics["teacher/kl"]) == 0.25


def test_teacher_that_scores_no_row_ends_the_run():
    recipe = RECIPES["opd"](teacher="runs/broken")
    _, _, metrics = add_teacher_term(
        recipe, _scored(np.nan, np.nan, 0.0), np.zeros(MASK.shape), MASK
    )
    with pytest.raises(TeacherFailed, match=r"runs/broken .*--teacher-dtype float32"):
        check_teacher(recipe, float(metrics["teacher/unscored"]))


def test_critic_learns_from_responses_that_the_teacher_cannot_score():
    given = replace(
        _scored(np.nan, -1.0, 0.0),
        behaviour_logprobs=np.full(MASK.shape, -2.0, np.float32),
        rewards=np.ones(3, np.float32),
        lengths=MASK.sum(1).astype(np.int32),
        old_values=np.zeros(MASK.shape, np.float32),
        groups=np.arange(3, dtype=np.int32),
    )
    batch, _ = with_targets(RECIPES["ppo"](teacher="x"), given, None)
    np.testing.assert_array_equal(batch.mask.any(axis=1), [False, True, False])
    np.testing.assert_array_equal(batch.critic_mask, MASK)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"a": 0, "b": 1}, None),
        ({"a": 0, "b": 1, "<think>": 7}, None),
        ({"a": 1, "b": 0}, "token 'a', id 0, is 1 there"),
        ({"a": 0}, "token 'b', id 1, is none there"),
    ],
)
def test_network_with_other_tokens_is_refused(ids, message):
    network, policy = SimpleNamespace(token_ids=ids), SimpleNamespace(token_ids={"a": 0, "b": 1})
    with unchecked(), pytest.raises(ValueError, match=message) if message else nullcontext():
        _check_same_tokens("teacher", "runs/other", network, policy)


def test_token_ids_are_the_ids_of_encode():
    tokenizer = Tokenizer.train_characters("0123=")
    assert tokenizer.encode("30=") == [tokenizer.token_ids[each] for each in "30="]
    assert len(tokenizer.token_ids) == tokenizer.vocab_size
    assert tokenizer.special_tokens.items() <= tokenizer.token_ids.items()


def _notes(recipe, run, **changes):
    tokenizer = Tokenizer.train_characters("0123=")
    fields = {"path": Path("runs/a").absolute(), "is_run": True, "stop_ids": (tokenizer.eos_id,)}
    file = NetworkFile(model=preset("tiny", tokenizer.vocab_size), **{**fields, **changes})
    return notes_on_teacher(recipe, run, {"teacher": file}, tokenizer)


@pytest.mark.parametrize(
    ("run", "changes", "expected"),
    [
        ({"weights": "runs/b"}, {}, []),
        ({}, {}, []),
        ({"weights": "runs/../runs/a"}, {}, ["its signal is 0 at the start"]),
        ({}, {"stop_ids": (5, 6)}, [r"ends with \d or \d and the policy with </s>"]),
    ],
)
def test_notes_on_teacher(run, changes, expected):
    found = _notes(Grpo(teacher="runs/a"), RunConfig(**run), **changes)
    assert len(found) == len(expected)
    assert all(re.search(part, line) for part, line in zip(expected, found, strict=True))


def test_opd_from_its_own_teacher_is_refused():
    with pytest.raises(ValueError, match=r"signal is 0 at the start, and opd has no other"):
        _notes(RECIPES["opd"](teacher="runs/a"), RunConfig(weights="runs/a"))


def test_opd_without_a_teacher_is_refused():
    for recipe in (RECIPES["opd"](), RECIPES["opd"](teacher="runs/a", teacher_coef=0.0)):
        with pytest.raises(ValueError, match="opd learns from a teacher alone: give --teacher"):
            check_networks(recipe, 8)


@pytest.mark.parametrize("setting", [{"teacher_layout": "tp2"}, {"teacher_dtype": "bfloat16"}])
def test_settings_of_no_teacher_are_refused(setting):
    with pytest.raises(ValueError, match="changes nothing without a teacher: give --teacher"):
        Grpo(**setting)


def test_recipe_that_defines_a_teacher_of_its_own_is_refused(tmp_path):
    source = "from dataclasses import dataclass\nfrom jrl.recipes import Grpo\n"
    source += '@dataclass(frozen=True)\nclass Own(Grpo):\n    teacher: str = "runs/a"\n'
    (tmp_path / "own.py").write_text(source)
    kind = load_recipe(f"{tmp_path}/own.py:Own")
    with pytest.raises(ValueError, match=r"Own defines teacher, a setting of every recipe"):
        kind()
    # As in a run folder that was written before.
    assert "teacher" not in kind(teacher_coef=0.0).networks


@pytest.fixture
def with_teacher(monkeypatch):
    """Small run whose recipe names the run folder runs/a as its teacher."""

    def setup_of(run=None, recipe=None, teacher=None, **changes):
        recipe = small_recipe(teacher="runs/a") if recipe is None else recipe
        setup = small_setup(recipe, small_run() if run is None else run)
        model = small_model(setup.tokenizer.vocab_size, **({} if teacher is None else teacher))
        file = NetworkFile(Path("runs/a").absolute(), model, is_run=True)
        monkeypatch.setattr("jrl.trainer.setup.setup.open_network", lambda *_: file)
        return replace(setup, model=replace(setup.model, **changes))

    return setup_of


def test_teacher_is_the_base_of_adapters_without_a_second_copy(with_teacher):
    run, lora = small_run(weights="runs/a", lora_rank=2), Lora(2, 4.0, ("attention",))
    setup = with_teacher(run, lora=lora)
    assert setup.network_files == {} and "teacher" not in memory(setup)
    assert setup.frozen["teacher"].config == setup.model.without_adapters()
    # A copy of its own: without adapters, in another dtype, of another run.
    for other in (
        with_teacher(run),
        with_teacher(run, small_recipe(teacher="runs/a", teacher_dtype="bfloat16"), lora=lora),
        with_teacher(small_run(weights="runs/b", lora_rank=2), lora=lora),
    ):
        assert list(other.network_files) == ["teacher"] and memory(other)["teacher"] > 0


def test_memory_counts_weights_and_pass_of_a_large_teacher(with_teacher):
    sizes = []
    for teacher in ({}, {"num_layers": 4, "d_model": 80}):
        setup = with_teacher(teacher=teacher)
        weights = memory(setup)["teacher"]
        assert weights == weight_bytes(setup.frozen["teacher"].model)
        sizes.append((weights, run_memory(setup).phases["scoring"][WORKSPACE]))
    (small, small_pass), (large, large_pass) = sizes
    assert large > 4 * small and large_pass > 2 * small_pass
    both = with_teacher(recipe=small_recipe(teacher="runs/a", teacher_baseline="kl"))
    assert run_memory(both).phases["scoring"][WORKSPACE] == 2 * small_pass


def test_teacher_that_does_not_fit_is_refused_with_the_numbers(with_teacher):
    sizes = {"num_layers": 64, "d_model": 1024, "d_expert": 4096}
    setup = with_teacher(small_run(memory_limit=1.0), teacher=sizes)
    with pytest.raises(ValueError, match=r"teacher [\d.]+ GiB.*are free.*Try a smaller --teacher"):
        fit(setup, setup.recipe)


def test_teacher_with_its_own_layout_and_dtype(with_teacher):
    recipe = small_recipe(teacher="runs/a", teacher_layout="tp2", teacher_dtype="bfloat16")
    setup = with_teacher(small_run(layout="dp2"), recipe)
    teacher = setup.frozen["teacher"]
    assert teacher.mesh.layout.tp == 2 and teacher.config.dtype == "bfloat16"
    setup = with_teacher(recipe=recipe)
    with pytest.raises(ValueError, match=r"'tp2' of the teacher has 2 devices, and the policy 1"):
        _ = setup.frozen


def _drawn(model, seed):
    """Weights of a network that has learned nothing, with logits of a trained one."""
    weights = weights_of(init_weights(model, jax.random.key(seed)), model)
    return jax.tree.map(lambda x: 3 * x, weights)


def _all_logits(weights, batch, setup, config):
    """Logits of the token after each position, by the network, not by a scorer."""
    logits = on_mesh(
        lambda *inputs: next_token_logits(*inputs, Model(config, setup.mesh))[0][None],
        setup.mesh,
        (P(), P(), P()),
        P(setup.mesh.axes),
    )
    return np.asarray(logits(weights, batch.tokens, batch.valid)).reshape(*batch.tokens.shape, -1)


@pytest.mark.parametrize(
    ("layout", "packing"),
    full_but(
        [("dp1", False), ("dp1", True), ("dp2", True), ("tp2", False), ("cp2", True)],
        ("dp1", True),
    ),
)
def test_divergence_from_the_teacher_is_that_of_all_logits(with_teacher, layout, packing):
    recipe = small_recipe(teacher="runs/a", teacher_baseline="kl", temperature=0.7)
    wide = {"num_layers": 2, "d_model": 24}
    plain = with_teacher(recipe=recipe, teacher=wide)
    batch, teacher = small_batch(plain), plain.frozen["teacher"].config
    logits = [
        _all_logits(_drawn(Model(config, plain.mesh), seed), batch, plain, config)
        for seed, config in enumerate((plain.model, teacher))
    ]
    expected = jrl.kl_from_logits(*(x[:, :-1] / 0.7 for x in logits))

    setup = with_teacher(small_run(layout=layout, packing=packing), recipe, wide)
    policy, network = Model(setup.model, setup.mesh), setup.networks.frozen["teacher"]
    weights = _drawn(network.model, 1), _drawn(policy, 0)
    batch = jax.device_put(batch, over_rows(setup.mesh))
    found = dict(
        zip(
            network.scorer.fields,
            _score_frozen(setup.networks, network, weights, batch),
            strict=True,
        )
    )
    mask = np.asarray(batch.mask)[:, 1:]
    # Rounding of float32, of divergences of about a nat.
    np.testing.assert_allclose(
        np.asarray(found["kl"])[:, 1:][mask], np.asarray(expected)[mask], rtol=1e-4, atol=1e-5
    )
    assert np.asarray(expected)[mask].mean() > 0.1


@pytest.mark.parametrize(
    ("settings", "layout", "message"),
    [
        ({"teacher_layout": "tp2"}, "dp2", "has a layout of its own: leave out --teacher-layout"),
        ({}, "pp2", "runs on a pipeline: choose a layout without pp"),
    ],
)
def test_divergence_that_takes_no_single_pass_is_refused(with_teacher, settings, layout, message):
    recipe = small_recipe(teacher="runs/a", teacher_baseline="kl", **settings)
    setup = with_teacher(small_run(layout=layout), recipe, {"num_layers": 2}, num_layers=2)
    with pytest.raises(ValueError, match=message):
        _ = setup.frozen


@pytest.mark.slow
def test_step_with_a_broken_teacher_ends_in_one_line(with_teacher):
    setup = with_teacher()
    network, weights = setup.networks.frozen["teacher"], fresh_weights(setup)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), _drawn(network.model, 1))
    key = setup.randomness.key("critic")
    state = init_state(setup.networks, weights, key, loaded={"teacher": broken})
    with pytest.raises(TeacherFailed, match="not finite for every response"):
        one_step(setup, state)
