"""Policies that are opened for serving."""

from dataclasses import replace

import jax
import pytest
from served import write_checkpoint

from jrl.trainer.evaluation.served_model import open_served_model


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (True, True), (False, False)])
def test_layers_are_unrolled_in_decoding_on_a_cpu_unless_a_scan_is_asked_for(
    asked, expected, tmp_path
):
    served = open_served_model(str(write_checkpoint(tmp_path / "model")))
    execution = replace(served.model.execution, scan_layers=asked)
    served = replace(served, model=replace(served.model, execution=execution))
    engine = served.engine(slots=1, max_length=8, key=jax.random.key(0), top_logprobs=0)
    assert engine.backend.decoder.config.execution.scan_layers is expected


def test_a_served_checkpoint_samples_no_id_without_a_token(tmp_path):
    served = open_served_model(str(write_checkpoint(tmp_path / "model")))
    assert served.model.unused_ids == ((303, 310),)
    assert served.format.tokenizer.unused_ids == set(range(303, 310))
