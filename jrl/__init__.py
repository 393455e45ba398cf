"""Reinforcement learning on token sequences: the functions one imports, with nothing but jax behind them."""
