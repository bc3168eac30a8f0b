"""The user's own kubectl: the one place that runs it. It brings the user's cluster, credentials and permissions.

Arguments are lists and never pass a shell. What kubectl refuses becomes a Refused with one line that says what to do.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

DEADLINE_S = 30
"""Longest that one question to the cluster may take."""
RLJOB = "rljobs.miles.dev"
REMEDIES: tuple[tuple[str, str], ...] = (
    (r"the server doesn't have a resource type|no matches for kind \"?RLJob|could not find the requested resource",
     "this cluster knows no RLJobs; install them: kubectl apply -k manifests/overlays/cluster"),
    (r"\(Forbidden\)", "you may not do this here; ask for the role rljob-editor (or rljob-viewer) in the namespace"),
    (r"Unauthorized|\(Unauthorized\)|must be logged in",
     "the cluster does not know you; log in again, or check --kubeconfig and --context"),
    (r"context .* does not exist|no context exists", "kubectl config get-contexts lists those that exist"),
    (r"refused|no such host|timeout|timed out|deadline exceeded|unreachable|no route to host",
     "the cluster does not answer; check --kubeconfig and --context"),
)  # fmt: skip


class Refused(ValueError):
    """What the cluster, or kubectl itself, would not do; one line."""


class NotFound(Refused):
    """There is no such object."""


@dataclasses.dataclass(frozen=True)
class Kubectl:
    flags: tuple[str, ...] = ()
    """Which cluster and namespace: --context, --kubeconfig, --namespace."""

    def get(self, *arguments: str) -> Any:
        """The object, or list of objects, of `kubectl get`. Raises Refused."""
        return json.loads(self.run("get", *arguments, "--output=json"))

    def items(self, *arguments: str) -> list[dict[str, Any]] | None:
        """The items of a list; None where the user may not see them."""
        try:
            return list(self.get(*arguments)["items"])
        except Refused as error:
            if "Forbidden" in str(error):
                return None
            raise

    def run(self, *arguments: str) -> str:
        """What kubectl prints. Raises Refused, NotFound."""
        command = [*self._command(), *arguments, f"--request-timeout={DEADLINE_S}s"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"no answer from the cluster within {2 * DEADLINE_S} s; check --context") from None
        if done.returncode:
            raise refusal(done.stderr)
        return done.stdout

    def hand_over(self, *arguments: str) -> int:
        """Lets kubectl talk to the terminal itself, for as long as the user wants; returns its exit code."""
        try:
            return subprocess.run([*self._command(), *arguments], check=False).returncode
        except KeyboardInterrupt:
            return 130

    def _command(self) -> Sequence[str]:
        binary = os.environ.get("KUBECTL") or shutil.which("kubectl")
        if binary is None:
            raise Refused("there is no kubectl on the PATH; install it, or name one: KUBECTL=/path/to/kubectl")
        return [binary, *self.flags]


def refusal(stderr: str) -> Refused:
    """kubectl's own words in one line, and a remedy where one is known."""
    lines = [line for line in stderr.splitlines() if line.strip() and not re.match(r"[EWI]\d{4} ", line)]
    said = re.sub(r"^(error: |Error from server )", "", lines[-1].strip()) if lines else "kubectl failed without a word"
    if said.startswith("(NotFound)"):
        return NotFound(said.removeprefix("(NotFound): "))
    remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, stderr)), None)
    return Refused(f"{said[:500]}" + (f"; {remedy}" if remedy else ""))
