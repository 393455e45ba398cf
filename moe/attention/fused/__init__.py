"""Core attention by JAX's fused kernels (cuDNN, XLA), with sinks and padding rewritten to fit
them."""
