"""The measurement of put → visible, in a folder and in seconds."""

import asyncio
import re

from tests import bench_store


def test_the_reader_is_a_process_of_its_own_and_asks_no_more_often_than_its_interval_allows(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench_store, "INTERVALS", ((0.05, 3), (0.2, 3)))
    asyncio.run(bench_store.visible("folder", str(tmp_path)))
    lines = capsys.readouterr().out.splitlines()[2:]
    rates = [int(re.split(r"  +", line.strip())[4].replace(",", "")) for line in lines]
    assert len(rates) == 2
    assert 0 < rates[1] < rates[0] < 2.5 * 3600 / 0.05  # two of the looks at each key have no pause between them
