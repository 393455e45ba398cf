"""``python -m jrl.serve RUN``: OpenAI-compatible server of a run's policy or a public checkpoint.

The run may still be in progress; nothing is written into its folder.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import tyro

from jrl.checks import check_range, check_seed
from jrl.command_line import exit_status, parse_flags, start_jax
from jrl.program import program
from jrl.published.location import is_checkpoint
from jrl.tasks.data.conversations import template_arguments

if TYPE_CHECKING:
    from jrl.serving.metrics import Metrics, NoMetrics
    from jrl.serving.policy import ApiModel
    from jrl.serving.service import Service
    from jrl.trainer.evaluation.served_model import RequestedSplit, ServedModel
    from moe.config import ModelConfig

KEY_VARIABLE = "JRL_API_KEY"
DEFAULT_LENGTH = 1024
"""Tokens of prompt and completion of a network that says nothing of its positions."""
DEFAULT_CACHE_BYTES = 4 << 30
"""Maximum bytes of the KV cache for a length that is not set (`--length`)."""


@dataclass(frozen=True)
class PolicyOptions:
    """Arguments of ``jrl serve`` and ``jrl chat`` for the policy."""

    run: tyro.conf.Positional[str]
    """Folder of a run, whose newest checkpoint answers; or a published checkpoint: DIR, gguf:FILE
    or pip:NAME."""
    length: int | None = None
    """Maximum tokens of prompt and completion in total; None is what the network supports, or as
    much of that as fits a KV cache of 4 GiB for all slots, and at least 1024."""
    max_tokens: int | None = None
    """Maximum tokens of a completion; None is what the length leaves."""
    chat_template_kwargs: str | None = None
    """A JSON object of default variables for the chat template, such as {"enable_thinking": false};
    None takes the run's."""
    lora: str | None = None
    """Folder of LoRA adapters in PEFT's format to merge into the published checkpoint."""
    chat_template: str = "checkpoint"
    """Chat template: "checkpoint" for the one of the run or checkpoint, "hermes", "llama3",
    "mistral", a Jinja file, or "none"."""
    ignore_options: tuple[str, ...] = ()
    """Options of a checkpoint's config.json to pass over, as --ignore-options of jrl.train."""
    generation_config: Literal["checkpoint", "none"] = "checkpoint"
    """Sampling defaults: a published checkpoint's generation_config.json, or none."""
    layout: str | None = None
    """Layout of the devices (parallelism); None takes the run's layout for sampling, and one device
    for a published checkpoint."""
    devices: int | None = None
    """Number of fake CPU devices; None takes the real ones."""

    def check(self) -> None:
        """Raises ValueError for flags that cannot be."""
        check_range(self, ("max_tokens", "devices"), 1)
        check_range(self, ("length",), 2)
        template_arguments(self.chat_template_kwargs)


@dataclass(frozen=True)
class ServeOptions(PolicyOptions):
    """Arguments of ``python -m jrl.serve``."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of the machine. One that other machines can
    reach needs --api-key, or --allow-anyone."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    name: str | None = None
    """The model's name for clients; None takes the folder's name."""
    slots: int = 16
    """Choices decoded concurrently (continuous batching), a multiple of dp x tp of the layout, or
    of the attention devices of a split times its micro-batches."""
    queue: int = 256
    """Choices that may wait for a slot; requests with more are refused with 429."""
    window: int = 8
    """Tokens of a choice between two scheduler steps, which admit and remove requests: fewer stream
    more smoothly, more take less time in total."""
    connections: int | None = None
    """Maximum concurrent connections of clients: with more, idle ones are closed, the oldest first,
    and without idle ones new connections get 503. None is one for each slot and each choice in the
    queue and 128 more, or as many as the limit of open files (ulimit -n) leaves."""
    max_body: int = 2**20
    """Maximum bytes of a request's body; more are refused with 413."""
    api_key: str | None = None
    """Bearer token that clients must send, except to /health; None takes the environment variable
    JRL_API_KEY, and without it no key is required."""
    allow_anyone: bool = False
    """Let other machines call the server with no key."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser (CORS), such as
    http://localhost:3000; * is every page."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of this machine that clients may use without a key, besides localhost, its addresses
    and --host; * is every name."""
    follow: bool = False
    """Load later checkpoints of the run as they appear; requests in flight are finished by the
    policy that started them."""
    warm_up: bool = True
    """Compile the programs of short requests before serving, and all others while the server is
    idle; programs are cached for the next start. Without it, a request may wait for compilation."""
    routed_experts: bool = False
    """Return the expert ids of each token from /inference/v1/generate, for router replay. Prompts
    then do not share rows in a prefill."""
    prefix_cache: bool = True
    """Keep the keys and values of ended choices in their slots until other choices need these: a
    prompt that begins with the same tokens, such as the next turn of a conversation, runs the
    others only."""
    seed: int = 0
    """Random seed of sampling. The same seed, with the same seed in a request, gives the same
    completion."""
    split: str | None = None
    """Attention and experts on separate device groups (disaggregated decoding), for example "tp1
    dp2 / ep2": attention on tp x dp of them, experts on ep (x etp) others. None takes the run's
    split for sampling, if it has one and no layout is given."""
    micro_batches: int | None = None
    """Micro-batches of slots in flight in disaggregated decoding: while one is with the experts,
    attention works on another. None is 2, or the run's if its split is used."""
    expert_slots: int | None = None
    """Experts per expert device in disaggregated decoding: with more than its share, experts with
    many tokens are replicated on several devices. None is its share, or the run's."""
    replan: int | None = None
    """Tokens of a row between rebalancings of the expert placement, by exponentially decayed token
    counts; None keeps the placement, or is the run's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    return exit_status(lambda: _main(sys.argv[1:] if arguments is None else list(arguments)))


def _main(arguments: list[str]) -> int:
    options = parse_flags(
        ServeOptions,
        program("serve"),
        arguments,
        "Serves a policy: completions and chats by OpenAI's protocol.",
    )
    _check(options)
    _serve(options)
    return 0


def _check(options: ServeOptions) -> None:
    """Raises ValueError for flags that cannot be."""
    options.check()
    check_range(options, ("slots", "window", "max_body", "connections"), 1)
    check_range(options, ("micro_batches", "expert_slots", "replan"), 1)
    check_range(options, ("queue", "port"), 0)
    if options.port >= 2**16:
        raise ValueError(f"port={options.port} must lie in 0..65535.")
    if options.api_key == "":
        raise ValueError(
            "api_key is empty, which any client could show: give one, or leave it out."
        )
    for origin in options.allowed_origins:
        check_origin(origin)
    check_seed(options.seed)
    modules = {
        "starlette": find_spec("starlette"),
        "uvicorn": find_spec("uvicorn"),
        "prometheus-client": find_spec("prometheus_client"),
    }
    missing = [name for name, module in modules.items() if module is None]
    if missing:
        raise ValueError(
            f'serving needs {", ".join(missing)}: run pip install -e ".[serve]" in the clone.'
        )


def check_origin(origin: str) -> None:
    """Raises ValueError unless the text is an origin as browsers state it: scheme, host and port.

    ``*`` is every origin, ``null`` is a local file.
    """
    url = urlsplit(origin)
    if origin in ("*", "null") or origin == f"{url.scheme}://{url.netloc}" != "://":
        return
    raise ValueError(
        f"allowed_origins={origin!r} is no origin: give scheme, host and port without a path, such "
        "as http://localhost:3000, or * for every page."
    )


def _serve(options: ServeOptions) -> None:
    # What listens comes first: a port that is taken is known before anything is loaded.
    from jrl.serving import server

    listening = server.listen(options.host, options.port)
    with listening:
        if not (options.allow_anyone or _key(options)):
            server.check_private(options.host, listening)
        start_jax(options.devices)
        service, front, name = _build_service(options)
        if options.warm_up:
            print(
                f"compiling the programs that serve {name}, or loading them from the cache",
                file=sys.stderr,
            )
        service.start(options.warm_up)
        # Now that all other files are open.
        choices = options.slots + options.queue
        connections, note = server.limit_connections(options.connections, choices)
        if note:
            print(note, file=sys.stderr)
        host, port = listening.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {name} (step {service.version}) on http://{host}:{port}/v1", flush=True)
        server.run(service, front, listening, follow=options.follow, connections=connections)


def _build_service(options: ServeOptions):
    """Builds the service and its front end; returns them and the name of the model."""
    from jrl.serving.application import FrontEnd
    from jrl.serving.metrics import Metrics
    from jrl.trainer.evaluation.served_model import RequestedSplit

    if options.follow and is_checkpoint(options.run):
        raise ValueError(
            f"follow=True has nothing to follow: {options.run} is a checkpoint of one version. "
            "Leave out --follow, or serve a run."
        )
    split = RequestedSplit(
        options.split, options.micro_batches, options.expert_slots, options.replan
    )
    policy, metrics = open_policy(options, split), Metrics(options.slots)
    service, served = build_service(
        options,
        policy,
        metrics,
        seed=options.seed,
        slots=options.slots,
        queue=options.queue,
        window=options.window,
        name=options.name,
        routed_experts=options.routed_experts,
        prefix_cache=options.prefix_cache,
    )
    front = FrontEnd(
        service,
        served,
        metrics,
        api_key=_key(options),
        max_bytes=options.max_body,
        allowed_origins=options.allowed_origins,
        allowed_hosts=(options.host, *options.allowed_hosts),
    )
    return service, front, served.name


def open_policy(options: PolicyOptions, split: "RequestedSplit | None" = None) -> "ServedModel":
    """Opens the policy with its chat template."""
    from jrl.trainer.evaluation.served_model import open_served_model

    policy = open_served_model(
        options.run, options.layout, split, options.ignore_options, options.lora
    )
    return _with_template(options, policy)


def build_service(
    options: PolicyOptions,
    policy: "ServedModel",
    metrics: "Metrics | NoMetrics",
    *,
    seed: int,
    slots: int,
    queue: int,
    window: int,
    name: str | None = None,
    routed_experts: bool = False,
    prefix_cache: bool = True,
) -> "tuple[Service, ApiModel]":
    """Builds the engine of a policy and its service; returns the service and the model in it.

    Args:
      seed: of sampling.
      slots, queue, window: as of `ServeOptions`.
      name: of the model for clients; None takes the folder's name.
      routed_experts, prefix_cache: as of `ServeOptions`.

    Raises:
      ValueError: for a length that the network does not support, and for expert ids of a network
        that has no experts.
    """
    import jax

    from jrl.serving.api.output import MAX_TOP_LOGPROBS
    from jrl.serving.policy import ApiModel
    from jrl.serving.service import Service

    positions, length = policy.model.max_positions, options.length
    if length is None:
        length, note = choose_length(policy.model, slots)
        if note:
            print(note, file=sys.stderr)
    if positions is not None and length > positions:
        raise ValueError(
            f"length={length} is more than the {positions} positions that the network supports: "
            "lower --length."
        )
    if routed_experts and not policy.model.num_experts:
        raise ValueError(
            f"routed_experts=True needs experts, and {policy.name} is a dense network: leave out "
            "--routed-experts."
        )
    engine = policy.engine(
        slots=slots,
        max_length=length,
        key=jax.random.key(seed),
        top_logprobs=min(MAX_TOP_LOGPROBS, policy.model.num_used_ids),
        records_choices=routed_experts,
        prefix_cache=prefix_cache,
    )
    format = policy.format
    if options.chat_template_kwargs is not None:
        arguments = template_arguments(options.chat_template_kwargs)
        format = replace(format, template_arguments=arguments)
    defaults, longest = _defaults(options, policy)
    served = ApiModel(
        name or policy.name,
        format,
        length,
        options.max_tokens,
        int(time.time()),
        defaults,
        longest,
    )
    return Service(engine, served, policy.versions, metrics, queue=queue, window=window), served


def _with_template(options: PolicyOptions, policy: "ServedModel") -> "ServedModel":
    """The model with the requested chat template, and its end of a turn."""
    from jrl.config.run import RunConfig
    from jrl.text.prompt_format import CHECKPOINT_TEMPLATE, prompt_format, with_template

    if options.chat_template == CHECKPOINT_TEMPLATE:
        return policy
    run, format = RunConfig(chat_template=options.chat_template), policy.format
    requested = prompt_format(run, with_template(run, format.tokenizer))
    return replace(
        policy, format=replace(format, tokenizer=requested.tokenizer, template=requested.template)
    )


def _defaults(options: PolicyOptions, policy: "ServedModel") -> tuple[dict[str, Any], int | None]:
    """Default arguments of requests, and most tokens of a chat's completion."""
    from jrl.serving.api.sampling import GENERATION_CONFIG, read_generation_config

    directory = policy.versions.checkpoint
    if options.generation_config == "none" or directory is None:
        return {}, None
    defaults, longest = read_generation_config(directory)
    stated = [f"{name} {value:g}" for name, value in defaults.items()]
    if longest is not None:
        stated.append(f"at most {longest} tokens of a chat")
    if stated:
        print(
            f"defaults of {GENERATION_CONFIG}: {', '.join(stated)} (--generation-config none "
            "leaves them out)",
            file=sys.stderr,
        )
    return defaults, longest


def choose_length(config: "ModelConfig", slots: int) -> tuple[int, str]:
    """Default length of a row in tokens: the network's, or less if the KV cache would be too
    large; and a line that says so, empty otherwise."""
    import jax

    from jrl.trainer.setup.memory import cache_bytes
    from moe.config import Model
    from sharding.folding import Layout, fold

    positions = config.max_positions
    if positions is None:
        return DEFAULT_LENGTH, ""
    model = Model(config, fold(Layout(), jax.devices()[:1]))
    cache_bytes_of = partial(cache_bytes, model, slots)
    length = positions
    # Halves keep lengths as even as in published networks.
    while length > DEFAULT_LENGTH and cache_bytes_of(length) > DEFAULT_CACHE_BYTES:
        length //= 2
    if length == positions:
        return length, ""
    return length, (
        f"length: {length} of the {positions} tokens that the network supports: a KV cache of "
        f"{slots} slots takes {cache_bytes_of(length) / 2**30:.2g} GiB for these, and "
        f"{cache_bytes_of(positions) / 2**30:.2g} GiB with --length {positions}"
    )


def _key(options: ServeOptions) -> str | None:
    return options.api_key if options.api_key is not None else os.environ.get(KEY_VARIABLE) or None


if __name__ == "__main__":
    sys.exit(main())
