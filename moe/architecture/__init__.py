"""What makes one architecture another: the choices of `moe.config.ModelConfig`, and which of them
can be had together."""
