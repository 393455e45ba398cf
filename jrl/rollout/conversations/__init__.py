"""Multi-turn rollouts: an environment answers between the policy's turns."""
