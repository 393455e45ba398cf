"""Times serving: clients that stream chats from ``jrl.serve``, and from ``transformers serve``.

One dense network of random weights, in the form of a public checkpoint, is served by both on the
same processors, one after the other; the peer as it comes and with continuous batching. Clients
send one request after another, each a conversation of some dozens of tokens, greedily completed by
16 to 96 more; every side is sent the same ones, after a few that are not counted. Each client sends
so many that beginning and end, when slots are not full, count little. Given are requests and tokens
per second, the time to the first token and that between two arrivals of tokens (median and 99th
percentile): how many tokens arrive together is up to a server.

    python -m benchmarks.serve --threads 2 --peer path/to/peer/bin/transformers
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 2048
END, START, TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LENGTH, PATIENCE = 512, 300


def main() -> None:
    parser = argparse.ArgumentParser(description="Times serving")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores per server")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=12, help="requests per client")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--devices", type=int, help="fake devices of jrl (default: one per core)")
    parser.add_argument("--window", type=int, default=8, help="tokens per scheduler step")
    parser.add_argument("--peer", help="path of the command transformers")
    parser.add_argument("--peer-ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--smoke", action="store_true", help="a single run at a tiny size")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    layers, width = 6, 256
    if arguments.smoke:
        arguments.clients, arguments.requests, arguments.slots = [2], 1, 2
        layers, width = 1, 16
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        texts = write_model(model, layers, width)
        print(f"{layers} layers of {width}, {arguments.threads} thread(s), greedy")
        head = f"{'server':28}{'clients':>8}{'requests/s':>11}{'tokens/s':>10}"
        print(head + f"{'first ms p50':>14}{'p99':>8}{'between ms p50':>16}{'p99':>8}")
        figures: dict[str, Any] = {}
        for name, command, port in sides(arguments, model):
            asked = str(model) if name.startswith("transformers") else "model"
            with running(command, port, arguments.threads, Path(folder) / "log"):
                figures[name] = measured(name, port, asked, texts, arguments)
    if arguments.peer:
        last = {name: rows[-1]["tokens/s"] for name, rows in figures.items()}
        ratio = last["jrl.serve"] / max(v for name, v in last.items() if name != "jrl.serve")
        print(f"tokens/s at {arguments.clients[-1]} clients: {ratio:.1f} times the peer's")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


WAYS = {"as it comes": (), "continuous batching": ("--continuous-batching",)}


def sides(arguments: argparse.Namespace, model: Path) -> Iterator[tuple[str, list[str], int]]:
    """Name, command and port of each server."""
    port = free_port()
    ours = [sys.executable, "-m", "jrl.serve", f"hf:{model}", f"--port={port}"]
    # Rows on as many devices as there are processors: a program of small products takes one.
    devices = arguments.devices or arguments.threads
    ours += [f"--devices={devices}", f"--layout=dp{devices}"]
    ours += [f"--slots={arguments.slots}", f"--length={LENGTH}", f"--window={arguments.window}"]
    ours += ["--no-warm-up"] if arguments.smoke else []
    yield "jrl.serve", ours, port
    for way in arguments.peer_ways if arguments.peer else ():
        port = free_port()
        theirs = [arguments.peer, "serve", str(model), f"--port={port}", "--device=cpu"]
        yield f"transformers {way}", [*theirs, *WAYS[way]], port


def write_model(folder: Path, layers: int, width: int) -> list[str]:
    """Writes a checkpoint of random weights with a tokenizer of the pages of this project, and
    gives texts to ask it."""
    import jax
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from moe import huggingface
    from moe.config import ModelConfig
    from moe.weights import initialise

    config = ModelConfig(
        VOCAB_SIZE,
        num_layers=layers,
        d_model=width,
        num_heads=8,
        num_kv_heads=4,
        head_dim=width // 8,
        num_experts=0,
        d_ff=4 * width,
        query_key_norm="head",
        embedding_scale=1.0,
        max_positions=LENGTH,
    )
    weights = initialise(config, jax.random.key(0))
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 3, initial_alphabet=alphabet, show_progress=False
    )
    pages = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    made.train_from_iterator(pages, trainer)
    made.add_special_tokens([END, START, TURN])
    ends = [made.token_to_id(TURN), made.token_to_id(END)]
    about = {"max_position_embeddings": LENGTH, "eos_token_id": ends}
    huggingface.save(folder, config, weights, architecture="Qwen3ForCausalLM", about=about)
    made.save(str(folder / "tokenizer.json"))
    stated = {"add_bos_token": False, "chat_template": TEMPLATE, "eos_token": TURN}
    stated |= {"pad_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    words = " ".join(pages).split()
    draw = random.Random(0)
    begins = [draw.randrange(len(words) - 40) for _ in range(256)]
    return [" ".join(words[begin : begin + draw.randrange(8, 32)]) for begin in begins]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], port: int, threads: int, log: Path) -> Iterator[None]:
    """A server on some of the processors, from when it answers on."""
    processors = sorted(os.sched_getaffinity(0))[:threads]
    given = {**os.environ, "OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"}
    given |= {"HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, processors)), *command],
            cwd=ROOT,
            env=given,
            stdout=output,
            stderr=output,
        )
    try:
        until_healthy(process, port, log)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    import urllib.error
    import urllib.request

    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            # What ours compiles while nobody asks would share the processors with what is measured.
            if not uncompiled(port):
                return
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")


def uncompiled(port: int) -> float:
    """Trials of programs that are left; 0 of a server that says nothing of them."""
    import urllib.error
    import urllib.request

    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
    except urllib.error.HTTPError:
        return 0.0
    found = re.search(r"^jrl_uncompiled (\S+)", page.decode(), re.M)
    return 0.0 if found is None else float(found[1])


@dataclass
class Received:
    """What one request got.

    Attributes:
      begun: when it was sent; first: when the first token was there, seconds.
      gaps: between two arrivals of tokens, seconds.
      tokens: of the completion.
    """

    begun: float
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


def measured(
    name: str, port: int, model: str, texts: list[str], arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """A row for each number of clients."""
    rows = []
    for clients in arguments.clients:
        # What one side compiles and another allocates at its first requests is left out.
        asyncio.run(load(port, model, texts, clients, 1, seed=clients))
        begin = time.perf_counter()
        received = asyncio.run(load(port, model, texts, clients, arguments.requests, seed=0))
        seconds = time.perf_counter() - begin
        tokens = sum(each.tokens for each in received)
        firsts = [1e3 * (each.first - each.begun) for each in received]
        gaps = [1e3 * gap for each in received for gap in each.gaps] or [0.0]
        row = {
            "clients": clients,
            "requests/s": len(received) / seconds,
            "tokens/s": tokens / seconds,
            "first p50": at(firsts, 0.5),
            "first p99": at(firsts, 0.99),
            "between p50": at(gaps, 0.5),
            "between p99": at(gaps, 0.99),
        }
        print(
            f"{name:28}{clients:>8}{row['requests/s']:>11.1f}{row['tokens/s']:>10.0f}"
            f"{row['first p50']:>14.0f}{row['first p99']:>8.0f}"
            f"{row['between p50']:>16.1f}{row['between p99']:>8.0f}",
            flush=True,
        )
        rows.append(row)
    return rows


def at(values: list[float], share: float) -> float:
    """A quantile: the smallest value that so many do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def load(
    port: int, model: str, texts: list[str], clients: int, requests: int, seed: int
) -> list[Received]:
    """Clients that send one request after another."""

    async def client(number: int) -> list[Received]:
        draw, done = random.Random(1000 * seed + number), list[Received]()
        for _ in range(requests):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": draw.choice(texts)}],
                "max_tokens": draw.randrange(16, 97),
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            done.append(await chat(port, body))
        return done

    every = await asyncio.gather(*(client(number) for number in range(clients)))
    return [each for several in every for each in several]


async def chat(port: int, body: dict[str, Any]) -> Received:
    """One request on a connection of its own."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    received = Received(time.perf_counter())
    writer.write(head.encode() + content)
    status, last = await reader.readline(), 0.0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now, found = time.perf_counter(), json.loads(line[6:])
        if any(choice["delta"].get("content") for choice in found.get("choices", ())):
            if last:
                received.gaps.append(now - last)
            received.first, last = received.first or now, now
        if found.get("usage"):
            received.tokens = found["usage"]["completion_tokens"]
    writer.close()
    if b" 200 " not in status or not received.tokens:
        raise SystemExit(f"a request got {status!r} and {received.tokens} tokens")
    received.first = received.first or time.perf_counter()
    return received


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
