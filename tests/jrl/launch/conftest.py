import socket

import pytest


@pytest.fixture
def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
