"""Router: top-k expert selection, load balancing, and token dropping by capacity."""
