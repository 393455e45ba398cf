"""Clients of a server in an environment of their own: ``python serve_clients.py CLIENT URL MODEL``
prints what a client got as JSON, for the model in a folder.

TRL's client wants vLLM installed and uses nothing of it here.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ASKED = [{"role": "user", "content": "How many pens?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def renderers(url: str, folder: str) -> Any:
    """Generation by the client of prime-rl's and verifiers' renderers, with expert ids."""
    from openai import AsyncOpenAI
    from renderers import create_renderer
    from renderers.client import generate
    from transformers import AutoTokenizer

    renderer = create_renderer(AutoTokenizer.from_pretrained(folder))
    parameters = {"max_tokens": 12, "seed": 3, "routed_experts_prompt_start": 2}

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=ASKED,
                model=Path(folder).name,
                sampling_params=parameters,
                cache_salt="1",
            )

    found = asyncio.run(run())
    names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
    return {**{name: found[name] for name in names}, "experts": found["routed_experts"]["shape"]}


def litellm(url: str, folder: str) -> Any:
    """Chat, completion, response and a call, whole and as streams."""
    import litellm

    asked = {"api_base": f"{url}/v1", "api_key": "any", "temperature": 0}
    model = f"openai/{Path(folder).name}"
    chat = {**asked, "model": model, "messages": ASKED, "max_tokens": 8}
    whole = litellm.completion(**chat, extra_body={"return_token_ids": True})
    stream = litellm.completion(**chat, stream=True)
    completion = {**asked, "model": f"text-completion-{model}", "prompt": "ab", "max_tokens": 5}
    # It asks for sixteen tokens of a response at least.
    response = {**asked, "model": model, "input": ASKED, "max_output_tokens": 16}
    events = list(litellm.responses(**response, stream=True))
    called = litellm.completion(**{**chat, "max_tokens": 80}, tools=[TOOL], tool_choice="required")
    return {
        "chat": whole.choices[0].message.content,
        "prompt_ids": whole.prompt_token_ids,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "completion": litellm.text_completion(**completion).choices[0].text,
        "response": litellm.responses(**response).output[0].content[0].text,
        "events": "".join(e.delta for e in events if e.type == "response.output_text.delta"),
        "arguments": called.choices[0].message.tool_calls[0].function.arguments,
    }


def trl(url: str, folder: str) -> Any:
    """Sampling, and scoring as by a teacher, with TRL's functions that parse answers."""
    import trl.generation.vllm_client as client_of_trl

    with mock.patch.object(client_of_trl, "is_vllm_available", lambda: True):
        client = client_of_trl.VLLMClient(base_url=url)
    prompt = [84, 285, 81]
    sampled = client.generate([prompt, [84]], n=2, max_tokens=6, logprobs=2)
    row = [*prompt, *sampled["completion_ids"][0]]
    regex = client.generate(["How many"], max_tokens=6, structured_outputs_regex="[0-9]{3}")
    chat = client.chat([ASKED], max_tokens=6, logprobs=0)
    return {
        "sampled": sampled,
        "scored": client.get_sequence_logprobs([row], [len(prompt)], top_logprobs=3),
        "regex": regex["completion_ids"],
        "chat": chat,
    }


def guidellm(url: str, folder: str) -> Any:
    """Completed and failed requests of the load generator at 1, 16 and 64 streams."""
    found = {}
    for streams in (1, 16, 64):
        with tempfile.TemporaryDirectory() as place:
            report = Path(place) / "report.json"
            command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
            command += ["--backend", f"kind=openai_http,target={url},model={Path(folder).name}"]
            command += ["--profile", f"kind=concurrent,streams=[{streams}]"]
            command += ["--constraint", f"kind=max_requests,count={streams + 4}"]
            command += ["--tokenizer", f"kind=hf_auto,model={folder}"]
            command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
            command += ["--output", f"kind=json,path={report}"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
            requests = benchmark["requests"]
            found[streams] = [len(requests[kind]) for kind in ("successful", "errored")]
    return found


if __name__ == "__main__":
    name, server, model = sys.argv[1:]
    result = {each.__name__: each for each in (renderers, litellm, trl, guidellm)}[name](
        server, model
    )
    print(json.dumps(result))
