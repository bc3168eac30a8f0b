"""Likely causes of a process' end, from its exit code and last lines. Pure; a table, first match wins."""

import re
import signal
from collections.abc import Sequence

CAUSES: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError: CUDA",
     "the GPU's memory is full: lower trainer.maxTokensPerMicroBatch or rollout.maxModelLen, or use more GPUs"),
    (r"No available memory for the cache blocks|Free memory on device .* less than desired",
     "vLLM found too little free GPU memory: another process holds it, or the model is too large for one GPU"),
    (r"CUDA driver version is insufficient|Found no NVIDIA driver",
     "the NVIDIA driver is missing or older than this PyTorch needs"),
    (r"MemoryError|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: can't allocate",
     "the machine's memory is full: a smaller model, trainer.maxTokensPerMicroBatch or rollout.maxModelLen"),
    (r"No space left on device|Errno 28|ENOSPC",
     "the disk is full: free some space, or choose another folder with --run-dir"),
    (r"Address already in use|EADDRINUSE|Errno 98|cannot listen \(",
     "another process listens at this port; if an earlier run is still ending, wait for it"),
    (r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|ExpiredToken|AccessDenied|403 Forbidden|NoCredentials",
     "the store or hub refuses the credentials: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do"),
    (r"NoSuchBucket|bucket does not exist",
     "the bucket does not exist: create it, or correct store.uri"),
    (r"RepositoryNotFound|RevisionNotFound|no config\.json|file named config\.json|not a valid model identifier",
     "there is no such model: check model.uri and model.revision"),
    (r"Name or service not known|Temporary failure in name resolution|getaddrinfo failed",
     "a host name is not known here: check the URIs of model, data and store, and the network"),
    (r"Connection refused|ConnectionRefusedError|ConnectError|Cannot connect to host",
     "a server that it needs does not answer: see the other processes' logs"),
    (r"ModuleNotFoundError: No module named '([^'.]+)|No module named ([\w]+)",
     "the Python package {0} is not installed here: pip install 'miles[local,rollout,trainer]'"),
    (r"User-specified max_model_len \(\d+\) is greater than the derived max_model_len \((\w+=[\d.]+)",
     "the model reads fewer tokens than rollout.maxModelLen ({0}): lower it, or choose another model"),
    (r"Unsupported CPU attention configuration",
     "vLLM's CPU engine cannot run this model's attention head size; 32, 64, 80, 96, 112, 128 and 256 work"),
    (r"rendezvous|RendezvousTimeout|RendezvousConnectionError",
     "the trainer's processes did not find each other: another process may use their port"),
    (r"torchinductor.*(?:file too short|invalid ELF|truncated)",
     "PyTorch was killed while it compiled: delete the folder torchinductor in ~/.cache/miles"),
    (r"Permission denied|EACCES|Errno 13",
     "a file or folder may not be read or written by this user"),
)  # fmt: skip

SIGNALS = {
    signal.SIGKILL: "it was killed from outside; most often the kernel did, because the machine ran out of memory",
    signal.SIGSEGV: "it crashed in native code",
    signal.SIGILL: "it uses instructions that this CPU does not have",
    signal.SIGABRT: "native code gave up; the last lines above say why",
    signal.SIGBUS: "it crashed in native code; /dev/shm or the disk may be full",
}


def likely_cause(code: int, lines: Sequence[str]) -> str | None:
    """A clause that tells the user what happened and what to do; None where nothing is known.

    The last lines come first: an early warning must not hide the final error.
    """
    for line in reversed(lines):
        for pattern, cause in CAUSES:
            match = re.search(pattern, line)
            if match:
                return cause.format(*filter(None, match.groups()))
    return SIGNALS.get(code - 128) if code > 128 else None  # type: ignore[call-overload]


def how_it_ended(code: int) -> str:
    """ "exit 1", or "killed by SIGKILL"."""
    if code > 128 and code - 128 in list(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit {code}"
