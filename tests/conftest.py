import os
import socket

# Two workers share two cores (pyproject's -n 2): one thread each, set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
