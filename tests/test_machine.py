"""operators.machine: GPUs and ports, with a folder in place of /dev and real sockets."""

import pathlib
import socket

import pytest

from operators.machine import Ports, gpu_ids


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        ([], {}, ()),
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"], {}, ("0", "1")),
        (["nvidia3"], {}, ("0",)),  # a container that was given one of several: CUDA counts from 0
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, ("1",)),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, ()),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "GPU-8f2a, GPU-11aa"}, ("GPU-8f2a", "GPU-11aa")),
    ],
)
def test_gpus(tmp_path: pathlib.Path, files: list[str], environment: dict[str, str], expected: tuple[str, ...]) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert gpu_ids(environment, str(tmp_path)) == expected


def listen(port: int) -> socket.socket:
    """As every server of a run does it."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_port_is_given_once_and_stays_with_its_pod() -> None:
    with listen(0) as other:
        taken = other.getsockname()[1]
        ports = Ports()
        first, second = ports("a", taken), ports("b", taken)
        assert len({taken, first, second}) == 3
        assert ports("a", taken) == first
        assert ports("b", taken) == second
        ports.close()


def test_a_given_port_is_kept_for_its_server_and_from_other_runs() -> None:
    ports, other_run = Ports(), Ports()
    given = ports("a", 23456)
    assert other_run("a", given) != given, "nobody listens there yet"
    with listen(given), socket.create_connection(("127.0.0.1", given)):
        pass
    ports.close()
    other_run.close()
