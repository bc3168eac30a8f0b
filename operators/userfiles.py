"""Reward functions and environments in files of the user's, looked at before anything is started: `miles run` knows
their folder."""

import ast
import os

from operators.spec import RLJob


def check(job: RLJob, folder: str) -> None:
    """Raises ValueError, one line a fault, for code that is not there. `folder`: that of the spec's file."""
    if found := faults(job, folder):
        raise ValueError("\n".join(found))


def faults(job: RLJob, folder: str, brought: bool = True) -> list[str]:
    """One line each. `brought`: look also for files that a cluster takes from a ConfigMap.

    Nothing is run: a name that only running the file would define is refused, too.
    """
    named = [
        (f"spec.rewards[{number}].function", reward.function, reward.from_)
        for number, reward in enumerate(job.spec.rewards)
    ]
    if job.spec.environment is not None:
        named.append(("spec.environment.class", job.spec.environment.class_, job.spec.environment.from_))
    found = []
    for field, code, source in named:
        if code is not None and ".py:" in code:
            file, _, name = code.rpartition(":")
            path = os.path.join(folder, file)
            expected = brought or source is None or os.path.exists(path)
            fault = _fault(path, name) if expected else None
            found += [f'{field}: got "{code}": {fault}'] if fault else []
    return found


def _fault(path: str, name: str) -> str | None:
    try:
        with open(path, "rb") as file:
            module = ast.parse(file.read(), path)
    except OSError as error:
        return f"{path}: {error.strerror}; write the path from the folder of the job's own file"
    except (MemoryError, RecursionError):
        return f"{path}: this is nested too deeply for Python; correct it"
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return f"{path}{line}: this is not Python ({error.args[0]}); correct it"
    known = set(_names(module.body))
    return None if name in known or "*" in known else f"{path} defines no {name}; it has {_listed(known)}"


def _names(body: list[ast.stmt]) -> list[str]:
    """What the statements of a module define; * where it imports all that another has."""
    names: list[str] = []
    below: list[ast.AST] = [*body]
    while below:
        node = below.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)  # what its body defines is its own
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Name):
            names.append(node.id)
        below += ast.iter_child_nodes(node)
    return names


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:10]) or "nothing"
