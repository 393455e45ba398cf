"""Products of rows with the matrix of their expert: grouped GEMM, one file for each way."""
