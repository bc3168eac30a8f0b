"""What the tables of operators/README.md promise, on a real API server: every row has its cases (tests.operator_cases),
and they are played at once before one running operator, which is its own ServiceAccount."""

import concurrent.futures
import pathlib
import time
from collections.abc import Iterator

import pytest

from tests.controlplane import ControlPlane
from tests.kubelet import Kubelet
from tests.operator_cases import CASES, Case, attempts, coverage, deletion, edits, life_cycle, reasons
from tests.replica import Replica, StatusPorts
from tests.stage import Stage

MODULES = (attempts, deletion, edits, life_cycle, reasons)
"""Each enters its cases."""
AT_ONCE = 16
"""Scenes; a scene mostly waits."""
CASE_LIMIT_S = 600

Played = dict[str, concurrent.futures.Future[float]]


def test_every_row_of_the_readme_has_a_case() -> None:
    for table, (covered, rows, cases, bare) in coverage().items():
        print(f"{table}: {covered} of {rows} rows, {cases} cases")
        assert not bare, f"{table}: no case for {bare}"
    assert len(CASES) > 100


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest,
    control_plane: ControlPlane,
    nodes: Kubelet,
    operator_account: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Played]:
    """All cases that were asked for, begun at once; the result of each is the seconds it took."""
    wanted = {item.callspec.params["name"] for item in request.session.items if "played" in item.fixturenames}
    nodes.add_node("node-apart")
    with StatusPorts().serving() as ports, concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        arguments = [f"--status-url={ports.url}"]
        operator = Replica(operator_account, tmp_path_factory.mktemp("tables"), "tables", arguments)
        operator.wait_until_leading()
        stage, began = Stage(control_plane, nodes, ports), time.monotonic()
        longest_first = sorted(wanted, key=lambda name: -CASES[name].lasts_s)
        yield {name: pool.submit(play, stage, CASES[name]) for name in longest_first}
        pool.shutdown()
        print(f"\n{len(wanted)} cases on the API server in {time.monotonic() - began:.0f} s")
        operator.stop()
    nodes.recover()


def play(stage: Stage, case: Case) -> float:
    began = time.monotonic()
    with stage.scene() as scene:
        case.play(scene)
        told = {reason for _, _, reason in scene.conditions} | scene.events()
        missing = {row.first for row in case.rows if row.table == "reason"} - told
        assert not missing, f"these reasons were never told: {missing}"
    return time.monotonic() - began


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(CASE_LIMIT_S + 120)
@pytest.mark.parametrize("name", CASES)
def test_the_operator_does_what_the_tables_say(played: Played, name: str) -> None:
    print(f"{played[name].result(CASE_LIMIT_S):.1f} s")
