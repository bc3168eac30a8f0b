"""pipeline/algorithms/README.md: its example of a new algorithm is complete, and its table names every algorithm."""

import pathlib
import re
import sys
import types

import pytest

from pipeline.algorithms import registry
from pipeline.config import CorrectionConfig
from tests import policies
from tests.batches import batch_of
from tests.test_learner import learner_of

README = pathlib.Path(registry.__file__).parent / "README.md"
TEXT = README.read_text()


@pytest.fixture
def vanilla(monkeypatch):
    """The example, as if its file and its entry were there."""
    file, entry = re.findall(r"```python\n# (?:pipeline|an entry).*\n([\s\S]*?)```", TEXT)
    module = types.ModuleType("pipeline.algorithms.vanilla")
    exec(compile(file, str(README), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.ALGORITHMS, "vanilla", eval(entry, vars(registry)))


def test_the_example_trains_a_step(vanilla, tmp_path):
    folder = policies.save_model("llama", tmp_path / "llama")
    learner = learner_of(folder, type="vanilla", correction=CorrectionConfig(type="none"))
    assert learner.config.algorithm.aggregation == "seq-mean-token-sum"
    batch = batch_of([([1, 2], [[4, 5], [6]])], rewards=[1.0, 0.0])
    row = learner.update(batch, 1, lambda: False)
    assert row["actor/grad_norm"] > 0
    assert row["loss/policy"] == pytest.approx(-(0.5 + 0.5 - 0.5) / 2)  # the ratio is 1; a sum per sample, their mean
    assert row["advantage/mean"] == pytest.approx((0.5 + 0.5 - 0.5) / 3)


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_the_table_names_every_algorithm(name):
    assert f"| `{name}` |" in TEXT


def test_every_parameter_is_documented_once():
    used = {name for entry in registry.ALGORITHMS.values() for name in entry.parameters}
    assert used == registry.PARAMETERS.keys()
