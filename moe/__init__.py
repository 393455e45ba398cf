"""The policy network: a decoder-only transformer with a mixture of experts."""
