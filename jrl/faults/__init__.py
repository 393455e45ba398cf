"""Detection of faulty machines before the run halts: Minder (NSDI 2025), attached to training."""
