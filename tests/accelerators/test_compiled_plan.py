"""A layout of the planner is compiled for the absent cluster, and compared with the plan."""

import json
import re

from compilers import needs_compiler, run

SMALL = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16"},
    **{"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "rms_norm_eps": 1e-6},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu"},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    **{"intermediate_size": 512, "norm_topk_prob": True, "rope_theta": 1000000.0},
}
GB = r"([\d.]+) GB"


@needs_compiler("cuda")
def test_compiled_plan_reports_the_prediction(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = f"plan {tmp_path} --hardware h100x8 --tokens 16K --seq 1024 --top 1"
    done = run(*words.split())
    head, line = done.stdout.splitlines()
    assert head.split() == [
        *("layout", "memory", "compiled", "communication", "compiled", "launches", "seconds"),
    ]
    found = re.fullmatch(
        rf"tp.*edp\d+ +{GB} +{GB} +([\d.e-]+) s +([\d.e-]+) s +([\d,]+) +\d+", line
    )
    assert found is not None, line
    planned, compiled, exposed, waited = (float(number) for number in found.groups()[:4])
    # States alone are half of it, so that no other network can be compiled.
    assert 0.5 < compiled / planned < 1.5
    assert exposed > 0 and waited > 0 and int(found[5].replace(",", "")) > 100
