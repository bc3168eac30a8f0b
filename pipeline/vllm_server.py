"""`python -m pipeline.vllm_server …`: vLLM's OpenAI server, as `python -m vllm.entrypoints.openai.api_server` runs it,
but none of the processes that it starts outlives it.

vLLM's engine does not notice that a server was killed by SIGKILL, and goes on holding memory or a GPU (seen in 0.32).
It and its workers are spawned, and a spawned process imports the main module of the one that started it: this module,
which asks the kernel to end it together with that one. Free of vLLM at import.
"""

import runpy

from pipeline.parent import end_with_parent

if __name__ == "__mp_main__":  # what multiprocessing calls the main module in what it has spawned
    end_with_parent()
if __name__ == "__main__":
    # alter_sys would put vLLM's module in the place of this one, and spawned processes would import that.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
