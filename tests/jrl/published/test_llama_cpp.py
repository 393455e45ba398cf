"""GGUF files in llama.cpp: greedy tokens and their log-probabilities equal ours."""

import jax
import numpy as np
import pytest
from chat_checkpoint import VOCAB_SIZE
from network_logits import logits_of
from test_gguf_writer import ABOUT, WRITTEN, make_checkpoint

from jrl.published.gguf_writer import write_gguf
from jrl.text.json_tokenizer import checkpoint_tokenizer

pytestmark = pytest.mark.slow
PROMPT = "Ann has 3 pens and buys"
VOCABULARY = range(VOCAB_SIZE)
NEW_TOKENS = 24
"""More than the window of a layer that has one."""


def completion_of(path, banned):
    """Greedy tokens of llama.cpp without those that are banned, and their log-probabilities."""
    llama = pytest.importorskip("xllamacpp", reason='needs pip install -e ".[llamacpp]"')
    settings = llama.CommonParams()
    settings.model.path = str(path)
    settings.n_ctx, settings.n_parallel, settings.warmup = 256, 1, False
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = 1
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    request = {"prompt": PROMPT, "n_predict": NEW_TOKENS, "temperature": 0, "n_probs": 1}
    request["logit_bias"] = [[token, False] for token in banned]
    answer = llama.Server(settings).handle_completions(request)
    content = answer["choices"][0]["logprobs"]["content"]
    return [each["id"] for each in content], [each["logprob"] for each in content]


@pytest.mark.parametrize("kind", WRITTEN)
def test_greedy_tokens_of_llama_cpp(tmp_path, kind):
    make_checkpoint(tmp_path / "model", *WRITTEN[kind])
    write_gguf(tmp_path / "model", tmp_path / "model.gguf", ABOUT)
    tokenizer = checkpoint_tokenizer(tmp_path / "model", VOCAB_SIZE)
    # It reports no parts of characters, and nothing of tokens that are no text.
    texts = [(tokenizer.bytes_of(token) or b"\0").decode(errors="ignore") for token in VOCABULARY]
    banned = [token for token in VOCABULARY if not texts[token].isprintable() or not texts[token]]
    tokens, logprobs = completion_of(tmp_path / "model.gguf", banned)
    prompt = tokenizer.with_prefix(tokenizer.encode(PROMPT))
    logits = logits_of(tmp_path / "model", prompt + tokens)[len(prompt) - 1 : -1]
    ours = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    chosen = ours[np.arange(NEW_TOKENS), tokens]
    # Sums in another order; llama.cpp's GELU, of Gemma, is a table in float16.
    atol = 2e-3 if kind == "gemma3" else 1e-4
    np.testing.assert_allclose(chosen, logprobs, atol=atol)
    np.testing.assert_allclose(np.delete(ours, banned, axis=1).max(axis=1), chosen, atol=atol)
