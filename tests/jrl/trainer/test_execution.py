"""Settings of a run that say how the network is computed reach the network."""

import pytest

from jrl.config.run import RunConfig
from jrl.recipes import Grpo
from jrl.trainer.setup.setup import build_setup


@pytest.mark.parametrize("remat", ["none", "selective", "projections", "full"])
def test_remat(remat):
    setup = build_setup(RunConfig(remat=remat), Grpo())
    assert setup.model.execution.remat == remat
    assert setup.networks.policy.objective.config.execution.remat == remat
    setup.task.close()
