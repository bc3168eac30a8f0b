"""Warnings of `miles validate`: what a job names and this machine does not have, or has in another form.

No verdict on the job, which other machines may run, with other packages and files than this one: verdicts are the same
here and at the API server, which knows no machine. `miles run` refuses such a job. Prompts are opened by the data
plane's own code, in a process of its own and only where its packages are installed.
"""

import subprocess
import sys

from operators import userfiles
from operators.resolve import Platform, run_config
from operators.spec import RLJob
from operators.spec.inputs import PromptSource

PATIENCE_S = 60.0
"""For prompts to be opened; those that take longer go unmentioned."""


def missing(job: RLJob, folder: str) -> list[str]:
    """One line each, beginning with the field. `folder`: that of the spec's file."""
    config = run_config(job, "validate", Platform(local=True, folder=folder))
    found = userfiles.faults(job, folder, brought=False)
    if any(entry.generator or (entry.uri or "").startswith("file://") for entry in _prompt_sets(job)):
        found += [f"spec.{line}" for line in _unusable_prompts(config.model_dump_json())]
    return found


def _prompt_sets(job: RLJob) -> list[PromptSource]:
    return [*job.spec.data.sets, *job.spec.evaluation.sets]


def _unusable_prompts(config: str) -> list[str]:
    command = [sys.executable, "-m", "pipeline.prompts"]
    try:
        done = subprocess.run(command, input=config, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines()
