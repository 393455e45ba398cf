"""Networks from files that an algorithm needs beside the policy: the policy of a run folder, or a
published checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxtyping import Array

from jrl.config.files import run_of
from jrl.config.run import RunConfig
from jrl.published.location import download_command, is_checkpoint
from jrl.published.network import open_checkpoint
from jrl.recipes.base.batch import CRITIC, TEACHER
from jrl.recipes.base.recipe import POLICY, NetworkSpec, Recipe
from jrl.runs.checkpoints import Checkpoints
from jrl.runs.directory import MANIFEST_NAME
from jrl.runs.folder import RunFolder
from jrl.text.load import load_tokenizer
from jrl.text.tokenizer import Tokenizer
from jrl.trainer.evaluation.saved_policy import load_model, read_model_config
from jrl.trainer.learner.learner import weights_of
from jrl.trainer.learner.networks import Networks
from jrl.trainer.setup.network import network_of
from jrl.trainer.state import RESERVED
from moe.architecture.lora import Lora
from moe.config import Model, ModelConfig, preset
from moe.weights import Transformer


@dataclass(frozen=True)
class NetworkFile:
    """Network of a run folder or of a published checkpoint.

    Attributes:
      path: its folder.
      model: network config, without adapters.
      is_run: true for a run folder, false for a published checkpoint.
      lora: adapters of the run's policy, to be merged; None for a policy without adapters.
      stop_ids: ids that end its own completions.
    """

    path: Path
    model: ModelConfig
    is_run: bool
    lora: Lora | None = None
    stop_ids: tuple[int, ...] = ()

    def record(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Path and hash for a checkpoint; for a run folder the step of its policy too.

        Args:
          saved: record of an earlier start, to load its step again; None takes the latest step.

        Raises:
          ValueError: if the files differ from `saved`.
        """
        record: dict[str, Any] = {"path": str(self.path)}
        if self.is_run:
            checkpoints = Checkpoints(RunFolder.read(self.path).checkpoints_path)
            step = checkpoints.latest_valid_step()[0] if saved is None else saved.get("step")
            record["step"], paths = step, [checkpoints.directory / str(step) / MANIFEST_NAME]
        else:
            paths = sorted(self.path.glob("*.safetensors"))
        # The manifest of a checkpoint has the hashes of its files.
        hashes = {path.name: _hash(path) for path in paths if path.is_file()}
        record["sha256"] = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        if saved is not None and record["sha256"] != saved["sha256"]:
            where = f" of step {saved['step']}" if self.is_run else ""
            raise ValueError(
                f"the weights{where} in {self.path} are not those that the run began with (hash "
                f"{record['sha256'][:8]}, and {saved['sha256'][:8]} then): put the files back, or "
                "start a new run."
            )
        return record

    def load(self, model: Model, record: Mapping[str, Any]) -> Transformer[Array]:
        """Loads the float32 weights.

        Args:
          model: the network with the execution settings of the run, on its mesh.
          record: as `record` returns it.
        """
        if not self.is_run:
            return load_model(self.path, model, masters=True)[0]
        adapted = replace(model, config=replace(model.config, lora=self.lora))
        folder = RunFolder.read(self.path)
        return load_model(folder, adapted, masters=True, step=record["step"])[0]


@lru_cache(maxsize=16)  # for the sizes and layouts that a run is tried on
def open_network(role: str, spec: NetworkSpec, tokenizer: Tokenizer) -> NetworkFile:
    """Reads the network config of a run folder or checkpoint.

    Raises:
      ValueError: if it is neither, or has another tokenizer than the policy.
    """
    name, is_run = spec.weights, not is_checkpoint(spec.weights)
    if not is_run:
        from jrl.text.json_tokenizer import checkpoint_tokenizer  # needs an extra

        path, model = open_checkpoint(name)
        network_tokenizer = checkpoint_tokenizer(path, model.vocab_size)
    else:
        try:
            folder = RunFolder.read(name)
        except ValueError as error:
            hint = ""
            if download_command(name) is not None:
                hint = f"; a model of the Hugging Face Hub is downloaded first: hf download {name}"
            raise ValueError(
                f"the weights {name!r} of the {role} are neither a run folder nor a checkpoint: "
                f"{error}{hint}"
            ) from error
        run, network_tokenizer = run_of(folder), load_tokenizer(folder.tokenizer_path)
        model = read_model_config(folder) or preset(run.model, network_tokenizer.vocab_size)
        path, model = folder.path, network_of(model, run)
    _check_same_tokens(role, path, network_tokenizer, tokenizer)
    plain = model.without_adapters().with_unused_ids(network_tokenizer.unused_ids)
    return NetworkFile(path.absolute(), plain, is_run, model.lora, network_tokenizer.stop_ids)


def _check_same_tokens(role: str, path: Any, network: Tokenizer, policy: Tokenizer) -> None:
    """Raises ValueError if a token of the policy has another id in a network, or none. Padding of
    the vocabulary, and what only the network's tokenizer has, do not matter."""
    ids = network.token_ids
    for token, token_id in policy.token_ids.items():
        if ids.get(token) != token_id:
            other = f"is {ids[token]} there" if token in ids else "is none there"
            raise ValueError(
                f"the {role} in {path} has another tokenizer than the policy: token {token!r}, "
                f"id {token_id}, {other}, so that it would score other tokens than were sampled. "
                "Choose a network with the tokens of the policy."
            )


def check_networks(recipe: Recipe, response_length: int) -> None:
    """Checks roles, networks and the names of the state of a recipe; raises ValueError."""
    if not recipe.uses_rewards and not recipe.uses_teacher:
        raise ValueError(
            f"recipe {recipe.name} learns from a teacher alone: give --teacher, a run folder or a "
            "checkpoint, with a --teacher-coef above 0."
        )
    networks, state = recipe.networks, recipe.init_state(response_length)
    for role, spec in networks.items():
        problem = None
        if role in (POLICY, *RESERVED) or not role.isidentifier():
            problem = "the role is taken, or no name: choose another, for example teacher"
        elif spec.trained != (role == CRITIC and recipe.uses_critic):
            problem = (
                f"trained={spec.trained}, and the network that is trained beside the policy is the "
                "critic of a recipe with uses_critic"
            )
        elif spec.trained or spec.weights == POLICY:
            for name in ("layout", "dtype"):
                if (value := getattr(spec, name)) is not None:
                    problem = f"{name}={value!r} is for frozen networks from files: leave it out"
        if problem is not None:
            raise ValueError(f"network {role!r} of recipe {recipe.name}: {problem}.")
    conflicts = {POLICY, *RESERVED, *networks} & state.keys()
    if conflicts:
        raise ValueError(
            f"state of recipe {recipe.name}: {', '.join(sorted(conflicts))} is the name of "
            "something else in the state of a run: choose another."
        )


def starts_from(run: RunConfig, file: NetworkFile) -> bool:
    """True if the policy of a run starts from the weights of a network file or, with the adapters
    of `lora_from`, on them."""
    source = run.checkpoint if run.weights is None else run.weights
    return source is not None and Path(source).resolve() == file.path.resolve()


def notes_on_teacher(
    recipe: Recipe, run: RunConfig, files: Mapping[str, NetworkFile], tokenizer: Tokenizer
) -> list[str]:
    """Lines about a teacher that is the policy itself or ends its completions otherwise.

    Raises:
      ValueError: if it is the policy, and the recipe has no other signal.
    """
    notes, file = list[str](), files.get(TEACHER)
    if file is None:
        return notes
    if run.lora_from is None and starts_from(run, file):
        line = (
            f"the teacher {recipe.teacher} is the policy that the run starts from, and reads the "
            "same prompts: its signal is 0 at the start"
        )
        if not recipe.uses_rewards:
            raise ValueError(f"{line}, and {recipe.name} has no other. Choose another --teacher.")
        notes.append(f"{line}, and then holds the policy near it")
    if not {*file.stop_ids} & {*tokenizer.stop_ids}:
        spelled = {token_id: token for token, token_id in tokenizer.token_ids.items()}
        teacher_ends, policy_ends = (
            " or ".join(spelled.get(i, f"id {i}") for i in ids)
            for ids in (file.stop_ids, tokenizer.stop_ids)
        )
        notes.append(
            f"the teacher {recipe.teacher} ends with {teacher_ends} and the policy with "
            f"{policy_ends}: it finds every end of the policy unlikely"
        )
    return notes


def load_network_files(
    networks: Networks,
    files: Mapping[str, NetworkFile],
    saved: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Transformer[Array]], dict[str, Any]]:
    """Loads the networks from files, and their records for checkpoints, by role.

    Args:
      saved: records of the checkpoint that the run resumes from, which has the trained networks;
        None for a new run.
    """
    loaded, records = dict[str, Transformer[Array]](), dict[str, Any]()
    for role, file in files.items():
        trained = networks.trained.get(role)
        if trained is not None:
            if saved is None:
                config = replace(trained.config, head=file.model.head)
                loaded[role] = file.load(Model(config, trained.mesh), file.record(None))
            continue
        records[role] = record = file.record(None if saved is None else saved[role])
        model = networks.frozen[role].model
        loaded[role] = weights_of(file.load(model, record), model)
    return loaded, records


def _hash(path: Any) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
