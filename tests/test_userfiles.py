"""operators.userfiles: a reward function or environment that is not there is refused before anything is started."""

import pytest

from operators import manifest, userfiles
from tests.test_spec import MINIMAL

FILE = """\
import helpers
from other import borrowed
def own(completion): return 1.0
class Callable: pass
alias = own
if True:
    def conditional(completion): return 0.0
    class Nested: pass
    async def waiting(completion): return 0.0
try:
    from fast import score
except ImportError:
    from slow import score as slow_score
"""


def job(tmp_path, function):
    file = tmp_path / "job.yaml"
    file.write_text(MINIMAL + f"  rewards: [{{name: mine, function: {function}}}]\n")
    return manifest.load_one(str(file))


@pytest.mark.parametrize(
    "name", ["own", "Callable", "alias", "borrowed", "conditional", "Nested", "waiting", "score", "slow_score"]
)
def test_what_a_file_defines_or_imports_is_accepted_without_running_it(tmp_path, name):
    (tmp_path / "mine.py").write_text(FILE + "raise SystemExit('run!')\n")
    userfiles.check(job(tmp_path, f"mine.py:{name}"), str(tmp_path))


def test_a_function_of_a_module_is_found_by_the_worker_only(tmp_path):
    userfiles.check(job(tmp_path, "package.module:anything"), str(tmp_path))


def test_an_environment_that_is_not_there_is_named_with_a_remedy(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    file = tmp_path / "job.yaml"
    file.write_text(MINIMAL + "  environment: {class: mine.py:Mine}\n")
    with pytest.raises(
        ValueError, match=r'spec.environment.class: got "mine.py:Mine": .* defines no Mine; it has .*own'
    ):
        userfiles.check(manifest.load_one(str(file)), str(tmp_path))


@pytest.mark.parametrize(
    ("content", "function", "message"),
    [
        (
            None,
            "mine.py:own",
            r'spec.rewards\[0\].function: got "mine.py:own": .*mine.py: No such file.*; write the path',
        ),
        (FILE, "mine.py:onw", r'got "mine.py:onw": .*mine.py defines no onw; it has .*own'),
        ("def own(:\n", "mine.py:own", r"mine.py, line 1: this is not Python \(.*\); correct it"),
        ("", "mine.py:own", r"defines no own; it has nothing"),
        ("x=" + "-" * 200_000 + "1", "mine.py:own", r"mine.py: this is nested too deeply"),
    ],
)
def test_what_is_not_there_is_named_with_a_remedy(tmp_path, content, function, message):
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ValueError, match=message):
        userfiles.check(job(tmp_path, function), str(tmp_path))
