"""A real vLLM server on the CPU for tests: started, killed, started again on the same port."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from tests import daemons, job

START_LIMIT_S = 300.0
END_LIMIT_S = 60.0


class VLLMServer:
    """`sockets`: short path of a folder for them, which a server that is killed leaves behind."""

    def __init__(self, model: pathlib.Path, log: pathlib.Path, port: int, sockets: str, *options: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._log, self._sockets, self._options = model, log, sockets, options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; it is not ready when this returns."""
        command = [sys.executable, "-m", "pipeline.vllm_server", "--model", str(self._model)]
        command += ["--served-model-name", "policy", "--enforce-eager", "--dtype", "float32"]
        command += ["--max-model-len", "256", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", *self._options]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": self._sockets,
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, f"vLLM ended: {self._log.read_text()[-3000:]}"
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise AssertionError(f"vLLM is not ready after {START_LIMIT_S} s: {self._log.read_text()[-3000:]}")

    def pids(self) -> list[int]:
        """The server's process and all below it."""
        assert self._process is not None
        return [self._process.pid, *job.descendants(self._process.pid)]

    def kill(self) -> None:
        """At once; its engine has to end with it."""
        if self._process is None:
            return
        below = job.descendants(self._process.pid)
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + END_LIMIT_S
        while (left := [pid for pid in below if pathlib.Path(f"/proc/{pid}/exe").exists()]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None
        assert not left, f"processes of a killed vLLM live on: {left}"


@contextlib.contextmanager
def serve(model: pathlib.Path, log: pathlib.Path, *options: str) -> Iterator[VLLMServer]:
    with daemons.held_port() as port, tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        server = VLLMServer(model, log, port, sockets, *options)
        server.start()
        try:
            server.wait()
            yield server
        finally:
            server.kill()
