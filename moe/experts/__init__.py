"""Feed-forward layers, dense and MoE, and grouped GEMM."""
