"""The port that is listened on: its server, and the connections of clients."""
