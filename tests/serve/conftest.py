"""Fixtures for the tests of Ray Serve. `.ci/nightly` installs Ray; without it, these tests are skipped."""
from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of Ray Serve's HTTP server, in a Ray cluster with this machine alone."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; see .ci/nightly")
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The replicas' processes inherit these. The model's loader is in this file's folder.
    os.environ.update(
        PYTHONPATH=os.pathsep.join([str(ROOT), str(Path(__file__).parent), *sys.path]), OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        # Otherwise Ray makes a token and stores it in the user's home.
        RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0",
    )
    # Not in pytest's own folder, whose name is too long for Ray's sockets.
    folder = tempfile.mkdtemp(prefix="ray-")
    ray.init(num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
