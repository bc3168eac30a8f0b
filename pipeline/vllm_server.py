"""`python -m pipeline.vllm_server …`: vLLM's OpenAI server, as `python -m vllm.entrypoints.openai.api_server` runs it,
with two differences.

None of the processes that it starts outlives it. vLLM's engine does not notice that a server was killed by SIGKILL, and
goes on holding memory or a GPU (seen in 0.32). It and its workers are forked, or spawned: then they import the main
module of the one that started them, this one.

On CPUs they are forked, as on GPUs, where vLLM spawns them (0.32): each would import vLLM again, which takes longer
than all else of a start, and hold half a gigabyte of its own. Free of vLLM at import.
"""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.context import BaseContext

from pipeline.parent import end_with_parent


def forked_on_cpus() -> None:
    """Before anything of vLLM that asks for a context has been imported."""
    from vllm.platforms import current_platform
    from vllm.utils import system_utils

    def fork() -> BaseContext:
        return multiprocessing.get_context("fork")

    if current_platform.is_cpu():
        system_utils.get_mp_context = fork


if __name__ == "__mp_main__":  # what multiprocessing calls the main module in what it has spawned
    end_with_parent()
if __name__ == "__main__":
    os.register_at_fork(after_in_child=end_with_parent)
    forked_on_cpus()
    # alter_sys would put vLLM's module in the place of this one, and spawned processes would import that.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
    sys.stdout.flush()
    os._exit(0)  # its engine has ended: taking the modules apart costs a second and frees nothing
