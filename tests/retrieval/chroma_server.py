"""A Chroma server in a process of its own, for tests."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

START = "import sys; from chromadb.cli.cli import app; sys.argv[0] = 'chroma'; app()"
PATIENCE_S = 30.0


class ChromaServer:
    """Starts over a folder; `url` answers until `stop`."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        place = ["--path", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, "run", *place], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + PATIENCE_S
        while not self._answers():
            if time.monotonic() > end or self.process.poll() is not None:
                self.stop()
                raise RuntimeError("the Chroma server does not start")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v2/heartbeat", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
