"""Stand-ins for the processes of a run, quick and without models: python stand_in.py trainer|worker|vllm|fetch.

They keep the contracts that `miles run` relies on: GET /status, /readyz, /healthz and /health, POST /pause with a
bearer token, exit codes and the termination message. What they shall do stands in STAND_IN_… variables.
"""

import itertools
import json
import os
import pathlib
import signal
import socketserver
import sys
import threading
import time
from typing import Any

RUN_DIR = pathlib.Path(os.environ["MILES_RUN_DIR"])
TOTAL_STEPS = int(os.environ.get("STAND_IN_STEPS", "3"))
STEP_SECONDS = float(os.environ.get("STAND_IN_STEP_SECONDS", "0.05"))
state: dict[str, Any] = {"phase": "training", "step": 0, "total_steps": TOTAL_STEPS, "waiting_for": None}


class Handler(socketserver.StreamRequestHandler):
    """As much of HTTP as is asked here: `http.server` takes longer to import than all else that a stand-in does."""

    def handle(self) -> None:
        head = list(itertools.takewhile(bytes.strip, self.rfile))
        asks = head and head[0].startswith(b"POST ")
        code, text = self.post(head) if asks else ("200 OK", json.dumps(state))
        self.wfile.write(f"HTTP/1.0 {code}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    def post(self, head: list[bytes]) -> tuple[str, str]:
        if f"Authorization: Bearer {os.environ['MILES_STATUS_TOKEN']}\r\n".encode() not in head:
            return "401 Unauthorized", "no"
        note("paused by request")
        stop()
        return "202 Accepted", "stopping"


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


def stopped(seconds: float = 3600.0) -> bool:
    """Whether this process has been asked to stop, waiting for it at most so long. The signal stays blocked
    otherwise: a handler could run just before the wait begins, and its news would be lost."""
    return signal.sigtimedwait({signal.SIGTERM}, seconds) is not None


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def note(text: str) -> None:
    with open(RUN_DIR / "notes", "a") as file:
        file.write(f"{sys.argv[1]}: {text}\n")


def serve(port: str) -> None:
    server = Server(("127.0.0.1", int(port)), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def trainer() -> int:
    attempt = json.loads(pathlib.Path(os.environ["MILES_CONFIG"]).read_text())["attempt"]
    behaviours = os.environ.get("STAND_IN_TRAINER", "complete").split(",")
    behaviour = behaviours[min(attempt, len(behaviours) - 1)]
    rank = os.environ.get("PET_NODE_RANK", "0")
    if rank == "0" and behaviour in ("complete", "hang"):
        serve(os.environ["MILES_STATUS_PORT"])
    note(f"attempt {attempt} rank {rank}: {behaviour}")
    if behaviour == "refuse":
        pathlib.Path(os.environ["MILES_TERMINATION_LOG"]).write_text("[rank 0] model.uri: no such model\n")
        return 3
    if behaviour == "crash":
        print("RuntimeError: No space left on device", flush=True)
        return 1
    if behaviour == "crash-rank-1":
        behaviour = "crash" if rank == "1" else "hang"
        if behaviour == "crash":
            while not (RUN_DIR / "rank-0").exists():
                stopped(0.02)
            return 1
    (RUN_DIR / f"rank-{rank}").touch()
    while state["step"] < TOTAL_STEPS or behaviour in ("hang", "silent"):
        if stopped(STEP_SECONDS):
            note("checkpoint written")
            return 4
        if behaviour not in ("hang", "silent"):
            state.update(step=state["step"] + 1, reward_mean=0.1 * state["step"])
    run_id = json.loads(pathlib.Path(os.environ["MILES_CONFIG"]).read_text())["run_id"]
    summary = {"run_id": run_id, "steps": TOTAL_STEPS, "samples_per_s": float(os.environ.get("STAND_IN_RATE", "12.5"))}
    (RUN_DIR / "summary.json").write_text(json.dumps(summary))
    return 0


def worker() -> int:
    if os.environ.get("STAND_IN_WORKER") == "crash":
        print("ConnectionRefusedError: [Errno 111] Connection refused", flush=True)
        return 1
    serve(os.environ["MILES_STATUS_PORT"])
    stopped()
    note("worker left")
    return 0


def vllm() -> int:
    serve(os.environ["MILES_VLLM_PORT"])
    if os.environ.get("STAND_IN_VLLM") == "stubborn":
        time.sleep(3600)
    stopped()
    note("vllm left")
    return 0


def fetch() -> int:
    note("fetched")
    pathlib.Path(os.environ["STAND_IN_MODEL"], "config.json").write_text("{}")
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit({"trainer": trainer, "worker": worker, "vllm": vllm, "fetch": fetch}[sys.argv[1]]())
