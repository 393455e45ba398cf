"""Feed-forward layers, and the products of rows with the matrix of their expert."""
