"""Finding the machine that fails before the run halts: Minder (NSDI 2025), attached to training."""
