"""HTTP listener: the server of a port, and the connections of clients."""
