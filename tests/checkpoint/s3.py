"""An S3 server on loopback, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys, time
from pathlib import Path
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
port = Path(sys.argv[1])
port.with_suffix(".new").write_text(str(server.get_host_and_port()[1]))
port.with_suffix(".new").rename(port)
sys.stdin.read()
"""


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """Serves a bucket named "bucket"; yields the environment in which its clients run."""
    if not all(map(find_spec, ("moto", "flask", "flask_cors", "s3fs"))):
        pytest.skip("the extra [remote] and the packages for its tests are not installed")
    port = folder / "port"
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(port)], stdin=subprocess.PIPE) as server:
        try:
            deadline = time.monotonic() + 60
            while not port.exists():
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            url = f"http://127.0.0.1:{port.read_text()}"
            create = urllib.request.Request(f"{url}/bucket", method="PUT")
            with urllib.request.urlopen(create, timeout=60):
                pass
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "a-key-of-a-test",
                "AWS_SECRET_ACCESS_KEY": "a-secret-of-a-test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.kill()
