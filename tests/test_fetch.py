import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline import fetch as module
from pipeline import termination
from pipeline.config import ModelConfig, StoreConfig
from pipeline.fetch import fetch
from pipeline.storage import MemoryStorage, Storage, StorageError, open_storage

STORE = StoreConfig(uri="file:///nowhere")
LARGE = "model.safetensors"


def make_model(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True)
    save_file({"model.norm.weight": np.arange(6, dtype=np.float32)}, folder / LARGE)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"of": name, "model": {}}))
    for name in ("README.md", "pytorch_model.bin", "modeling_custom.py", "consolidated.safetensors", "vocab.pkl"):
        (folder / name).write_bytes(b"not to be taken")
    return folder


TAKEN = {LARGE, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_model(tmp_path / "source" / "model")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "target"


def visible(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


async def fetch_from(uri: object, path: pathlib.Path, store: StoreConfig = STORE, **changes: object) -> None:
    await fetch(ModelConfig(uri=str(uri), path=str(path), **changes), store)


@pytest.fixture
def bucket(monkeypatch, clock, model) -> MemoryStorage:
    """A store with the model in it that every s3:// URI leads to."""
    storage = MemoryStorage(clock)
    monkeypatch.setattr(module, "open_storage", lambda *_: storage)
    return storage


async def upload(storage: Storage, folder: pathlib.Path) -> None:
    for file in folder.iterdir():
        await storage.put_file(file.name, str(file))


async def test_a_folder_is_linked_and_only_what_is_needed_of_it(model, path):
    await fetch_from(f"file://{model}", path)
    assert visible(path) == TAKEN
    for name in TAKEN:
        assert (path / name).read_bytes() == (model / name).read_bytes()
        assert (path / name).is_symlink() or (path / name).samefile(model / name)


async def test_a_folder_on_another_file_system_is_linked_symbolically(model, path, monkeypatch):
    def refuse(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    await fetch_from(model, path)
    assert (path / LARGE).readlink() == model / LARGE


async def test_a_model_that_lies_at_its_path_is_checked_and_left_alone(model):
    before = sorted(os.listdir(model))
    await fetch_from(f"file://{model}", model)
    assert sorted(os.listdir(model)) == before
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json: save the tokenizer"):
        await fetch_from(f"file://{model}", model)


async def test_a_model_in_a_bucket_is_downloaded_once(bucket, model, path):
    await upload(bucket, model)
    await fetch_from("s3://bucket/models/tiny", path)
    assert visible(path) == TAKEN
    assert (path / LARGE).read_bytes() == (model / LARGE).read_bytes()
    bucket.memory.objects.clear()
    await fetch_from("s3://bucket/models/tiny", path)


async def test_a_fetch_that_was_broken_off_goes_on_with_the_next_file(bucket, model, path, clock, monkeypatch):
    await upload(bucket, model)

    class Broken:
        log: list[str] = []
        failing = True

        async def before(self, operation, key):
            if operation == "read_range":
                self.log.append(key)
                if self.failing and key == LARGE:
                    raise StorageError("the pod was killed here")

        async def after(self, operation, key):
            pass

    broken = Broken()
    monkeypatch.setattr(module, "open_storage", lambda *_: MemoryStorage(clock, broken, bucket.memory))
    with pytest.raises(StorageError):
        await fetch_from("s3://b/m", path)
    broken.failing, broken.log = False, []
    (path / "leftover.partial").write_bytes(b"half")
    await fetch_from("s3://b/m", path)
    assert broken.log == [LARGE, "tokenizer.json", "tokenizer_config.json"]
    assert visible(path) == TAKEN


async def test_another_model_takes_the_place_of_the_one_before(model, path, tmp_path):
    other = make_model(tmp_path / "other")
    (other / "only_here.json").write_text("{}")
    await fetch_from(other, path)
    await fetch_from(model, path)
    assert visible(path) == TAKEN


async def test_hostile_keys_in_a_bucket_are_not_taken(bucket, model, path, tmp_path):
    await upload(bucket, model)
    found = bucket.memory.objects["config.json"]
    for key in ("../evil.json", "/etc/evil.json", "folder/evil.json", ".hidden.json", "a b.json", "-rf.json"):
        bucket.memory.objects[key] = type(found)(type(found.info)(key, 1, "e", 0.0), found.data, found.metadata)
    await fetch_from("s3://b/m", path)
    assert visible(path) == TAKEN
    assert not list(tmp_path.glob("**/*evil*"))


async def test_an_index_cannot_lead_out_of_the_folder(model, path):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../x.safetensors"}}))
    with pytest.raises(ValueError, match=r"has no file '../../x.safetensors' of its weights"):
        await fetch_from(model, path)


async def test_python_files_come_only_with_trust_remote_code(model, path):
    await fetch_from(model, path, trust_remote_code=True)
    assert visible(path) == TAKEN | {"modeling_custom.py"}


async def test_a_tokenizer_from_elsewhere_replaces_the_models_own(model, path, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (other / name).write_text('{"model": {"of": "other"}}')
    await fetch_from(model, path, tokenizer=f"file://{other}")
    assert '"other"' in (path / "tokenizer.json").read_text()
    assert (path / "chat_template.jinja").read_text() == (other / "chat_template.jinja").read_text()
    assert (path / "config.json").read_text() == (model / "config.json").read_text()
    assert visible(path) == TAKEN - {"tokenizer_config.json"} | {"chat_template.jinja"}
    with pytest.raises(ValueError, match=r"is used where it lies: save the tokenizer .* into it instead"):
        await fetch_from(f"file://{model}", model, tokenizer=f"file://{other}")


def _only_pickles(folder):
    (folder / LARGE).unlink()
    (folder / "consolidated.safetensors").unlink()


def _torn(folder):
    (folder / LARGE).write_bytes((folder / LARGE).read_bytes()[:-1])


def _part_missing(folder):
    index = {"weight_map": {"a": LARGE, "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_only_pickles, "has no safetensors files, only .bin, .pkl: load it with transformers and save it"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (_torn, "model.safetensors is not a complete safetensors file"),
        (_part_missing, "has no file 'model-00002-of-00002.safetensors' of its weights"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "not an index of safetensors"),
    ],
)
async def test_an_unusable_model_is_one_clear_error(model, path, damage, message):
    damage(model)
    with pytest.raises(ValueError, match=message) as caught:
        await fetch_from(model, path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("config.json", "tokenizer.json") for content in ("", "xx", "[]", "null")),
        ("config.json", '{"architectures": [1]}'),
        ("config.json", '{"architectures": "LlamaForCausalLM"}'),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "xx"),
        ("generation_config.json", "xx"),
        ("model.safetensors.index.json", '{"weight_map": {"a": null}}'),
        ("model.safetensors.index.json", "xx"),
    ],
)
async def test_a_broken_file_of_a_model_is_named_in_one_line(model, path, name, content):
    (model / name).write_text(content)
    with pytest.raises(ValueError, match=f"{path / name} is not|{path / name}: arch|{path / name} holds no") as caught:
        await fetch_from(model, path)
    assert "\n" not in str(caught.value)


async def test_a_file_of_weights_without_tensors_is_refused(model, path):
    save_file({}, model / LARGE)
    with pytest.raises(ValueError, match=r"model\.safetensors holds no tensors"):
        await fetch_from(model, path)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///nowhere/at/all", "/nowhere/at/all is not a folder on this machine"),
        ("gs://bucket/model", "is none of file:///folder, s3://bucket/prefix and hf://org/name"),
        ("hf://../../etc", "is not on the hub, or is private"),
        ("hf://org/name@v1", "names another revision than model.revision, v2"),
    ],
)
async def test_a_model_uri_that_leads_nowhere_is_one_clear_error(path, uri, message):
    revision = "v2" if "@" in uri else None
    with pytest.raises(ValueError, match=message):
        await fetch_from(uri, path, revision=revision)


async def test_weights_of_another_model_in_the_folder_are_refused(model, path):
    path.mkdir()
    save_file({"w": np.zeros(1, np.float32)}, path / "model-00009-of-00009.safetensors")
    with pytest.raises(
        ValueError, match=r"holds model-00009-of-00009.safetensors, which is no part of .* empty the folder"
    ):
        await fetch_from(model, path)


async def test_an_empty_bucket_prefix_is_an_error_that_names_it(bucket, path):
    with pytest.raises(ValueError, match="s3://bucket/none is empty or does not exist"):
        await fetch_from("s3://bucket/none", path)


@pytest.mark.slow
async def test_a_model_comes_from_a_real_s3_server(s3_server, model, path):
    await upload(open_storage("s3://miles/models/tiny", s3_server.endpoint), model)
    await fetch_from("s3://miles/models/tiny", path, StoreConfig(uri="s3://miles/run", endpoint=s3_server.endpoint))
    assert visible(path) == TAKEN
    assert (path / LARGE).read_bytes() == (model / LARGE).read_bytes()


# As a process.


def configuration(tmp_path: pathlib.Path, uri: str, path: pathlib.Path, **model: object) -> dict[str, str]:
    """The environment of a container whose configuration names this model."""
    config = {
        "name": "run",
        "run_id": "1",
        "model": {"uri": uri, "path": str(path), **model},
        "data": {"sets": []},
        "rewards": [],
        "algorithm": {"type": "grpo", "total_steps": 1, "prompts_per_step": 1, "group_size": 2},
        "store": {"uri": "file:///nowhere"},
    }
    (tmp_path / "run.json").write_text(json.dumps(config))
    return os.environ | {
        "MILES_CONFIG": str(tmp_path / "run.json"),
        "MILES_TERMINATION_LOG": str(tmp_path / "termination-log"),
        "HF_HOME": str(tmp_path / "hub-home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def run_fetch(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.fetch"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)


def test_the_process_ends_with_0_or_with_3_and_one_line_in_the_termination_message(model, path, tmp_path):
    environment = configuration(tmp_path, f"file://{model}", path)
    assert run_fetch(environment).returncode == termination.COMPLETE
    (model / "config.json").unlink()
    ended = run_fetch(configuration(tmp_path, f"file://{model}", tmp_path / "other"))
    assert ended.returncode == termination.USER_ERROR
    message = (tmp_path / "termination-log").read_text()
    assert message.startswith("model.uri: ")
    assert "has no config.json" in message
    assert ended.stderr == message
    assert message.count("\n") == 1


def test_two_processes_of_one_machine_fetch_once(model, path, tmp_path):
    environment = configuration(tmp_path, f"file://{model}", path)
    command = [sys.executable, "-m", "pipeline.fetch"]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=50)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(bool(output) for output in outputs) == [False, True]


class Hub:
    """As much of the hub's HTTP interface as one repository takes."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.commit, self.downloads = folder, "c" * 40, []

    def files(self) -> list[dict[str, object]]:
        entries = []
        for path in sorted(self.folder.iterdir()):
            entry = {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
            if path.suffix == ".safetensors":
                entry["lfs"] = {"oid": self.sha256(path), "size": path.stat().st_size, "pointerSize": 1}
            entries.append(entry)
        return entries

    @staticmethod
    def sha256(path: pathlib.Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        place = handler.path.partition("?")[0]
        name = place.rpartition("/")[2]
        if place.startswith("/api/models/org/tiny/revision/"):
            self._send(handler, json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": []}).encode())
        elif place.startswith("/api/models/org/tiny/tree/"):
            self._send(handler, json.dumps(self.files()).encode())
        elif place.startswith("/org/tiny/resolve/") and (self.folder / name).is_file():
            if handler.command == "GET":
                self.downloads.append(name)
            path = self.folder / name
            etag = self.sha256(path) if path.suffix == ".safetensors" else hashlib.sha1(path.read_bytes()).hexdigest()
            self._send(handler, path.read_bytes(), {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit})
        else:
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

    def _send(self, handler: http.server.BaseHTTPRequestHandler, data: bytes, headers: dict[str, str] | None = None):
        handler.send_response(200)
        for name, value in (
            {"Content-Type": "application/json", "Content-Length": str(len(data))} | (headers or {})
        ).items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(data)

    @contextlib.contextmanager
    def serve(self):
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def test_a_model_comes_from_the_hub_once_and_then_from_its_cache_offline(model, path, tmp_path):
    hub = Hub(model)
    with hub.serve() as endpoint:
        environment = configuration(tmp_path, "hf://org/tiny", path) | {"HF_ENDPOINT": endpoint}
        ended = run_fetch(environment)
        assert ended.returncode == 0, ended.stderr
        assert visible(path) == TAKEN
        assert set(hub.downloads) == TAKEN
        missing = run_fetch(configuration(tmp_path, "hf://org/none", tmp_path / "none") | {"HF_ENDPOINT": endpoint})
    assert missing.returncode == termination.USER_ERROR
    assert "hf://org/none is not on the hub, or is private" in missing.stderr
    offline = configuration(tmp_path, "hf://org/tiny", tmp_path / "second") | {"HF_HUB_OFFLINE": "1"}
    ended = run_fetch(offline)
    assert ended.returncode == 0, ended.stderr
    assert visible(tmp_path / "second") == TAKEN
    assert (tmp_path / "second" / LARGE).stat().st_ino == (path / LARGE).stat().st_ino
    blob = (path / LARGE).resolve()
    blob.write_bytes(b"x" * blob.stat().st_size)
    ended = run_fetch(configuration(tmp_path, "hf://org/tiny", tmp_path / "third") | {"HF_HUB_OFFLINE": "1"})
    assert ended.returncode == termination.FAILED
    assert "in the hub's cache is damaged and was removed" in ended.stderr


def test_a_model_that_is_not_cached_offline_is_an_error_and_a_silent_hub_an_outage(path, tmp_path):
    environment = configuration(tmp_path, "hf://org/tiny", path)
    ended = run_fetch(environment | {"HF_HUB_OFFLINE": "1"})
    assert (ended.returncode, "HF_HUB_OFFLINE is set" in ended.stderr) == (termination.USER_ERROR, True)
    ended = run_fetch(environment | {"HF_ENDPOINT": "http://127.0.0.1:1"})
    assert (ended.returncode, "the hub does not answer" in ended.stderr) == (termination.FAILED, True)
    assert ended.stderr.count("\n") == 1


def test_a_missing_configuration_is_a_user_error(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MILES_CONFIG"}
    ended = run_fetch(environment | {"MILES_TERMINATION_LOG": str(tmp_path / "log")})
    assert ended.returncode == termination.USER_ERROR
    assert "MILES_CONFIG is not set; it names the run's configuration file" in (tmp_path / "log").read_text()


def test_a_waiting_process_gives_up_when_its_limit_is_over(path, monkeypatch):
    path.mkdir()
    monkeypatch.setattr(module, "LOCK_LIMIT_S", 0.05)
    monkeypatch.setattr(module, "LOCK_PAUSE_S", 0.01)
    started = time.monotonic()
    with module._locked(path), pytest.raises(StorageError, match="another process fetches into"), module._locked(path):
        pass
    assert time.monotonic() - started < 30
