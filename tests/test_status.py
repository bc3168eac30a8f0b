"""pipeline.status: what the HTTP server answers, and to whom."""

import json

import aiohttp
import pytest

from pipeline import status
from pipeline.status import StatusServer


@pytest.fixture
async def served():
    """(server, base URL, list of pauses asked for)."""
    pauses = []
    server = StatusServer(
        "miles_trainer",
        status=lambda: {"step": 3, "reward_mean": float("nan")},
        gauges=lambda: {"reward/mean": 0.5, "loss/policy": float("nan")},
        ready=lambda: "vLLM to answer" if not pauses else None,
        pause=lambda: pauses.append(1),
        token="secret",
    )
    port = await server.start(0, "127.0.0.1")
    yield server, f"http://127.0.0.1:{port}", pauses
    await server.stop()


async def ask(method, url, **options):
    async with aiohttp.ClientSession() as session, session.request(method, url, **options) as response:
        return response.status, await response.text()


async def test_status_is_json_even_when_a_number_is_not_finite(served):
    _, url, _ = served
    code, text = await ask("GET", url + "/status")
    assert code == 200
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 3, "reward_mean": None}


async def test_metrics_are_prometheus_gauges_with_legal_names(served):
    _, url, _ = served
    code, text = await ask("GET", url + "/metrics")
    assert code == 200
    assert "# TYPE miles_trainer_reward_mean gauge\nmiles_trainer_reward_mean 0.5\n" in text
    assert "miles_trainer_loss_policy NaN\n" in text


async def test_readyz_says_what_is_waited_for_while_healthz_is_fine(served):
    _, url, pauses = served
    assert await ask("GET", url + "/readyz") == (503, "vLLM to answer\n")
    assert (await ask("GET", url + "/healthz"))[0] == 200
    pauses.append(1)
    assert (await ask("GET", url + "/readyz"))[0] == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "secret", "Bearer sécret"])
async def test_pause_needs_the_right_bearer_token(served, header):
    _, url, pauses = served
    headers = {"Authorization": header} if header else {}
    assert (await ask("POST", url + "/pause", headers=headers))[0] == 401
    assert pauses == []


async def test_pause_with_the_token_asks_once(served):
    _, url, pauses = served
    assert (await ask("POST", url + "/pause", headers={"Authorization": "Bearer secret"}))[0] == 202
    assert pauses == [1]


@pytest.mark.parametrize("token", [None, ""])
async def test_without_a_token_of_its_own_nobody_may_pause(served, token):
    server, url, pauses = served
    server.token = token
    for header in ("Bearer ", "Bearer None", "Bearer secret"):
        assert (await ask("POST", url + "/pause", headers={"Authorization": header}))[0] == 401
    assert pauses == []


async def test_a_port_in_use_is_one_clear_line(served):
    _, url, _ = served
    taken = url.rsplit(":", 1)[1]
    other = StatusServer("miles", status=dict, gauges=dict)
    with pytest.raises(ValueError, match=f"MILES_STATUS_PORT={taken}: cannot listen"):
        await status.serve(other, {"MILES_STATUS_PORT": taken, "MILES_STATUS_HOST": "127.0.0.1"})


async def test_without_a_port_nothing_is_served():
    assert await status.serve(StatusServer("miles", status=dict, gauges=dict), {}) is None
