import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import setuptools

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters="=", comment_prefixes="#")
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def test_only_operators_and_pipeline_are_installed(setup):
    include = words(setup["options.packages.find"]["include"])
    packages = setuptools.find_packages(str(ROOT), include=include)
    assert {name.split(".")[0] for name in packages} == {"operators", "pipeline"}


def test_every_folder_of_modules_is_a_package(setup):
    packages = setuptools.find_packages(str(ROOT), include=words(setup["options.packages.find"]["include"]))
    folders = {file.parent for top in ("operators", "pipeline") for file in (ROOT / top).rglob("*.py")}
    assert {".".join(folder.relative_to(ROOT).parts) for folder in folders} == set(packages)


def test_every_target_that_make_names_does_something():
    text = (ROOT / "Makefile").read_text()
    (named,) = [line.split()[1:] for line in text.splitlines() if line.startswith(".PHONY:")]
    commands = [name for name in named if name not in ("test", "setup", "models")]  # made of others
    for name in commands:
        assert re.search(rf"^{name}:.*##", text, re.MULTILINE), f"make help does not tell of {name}"
        assert re.search(rf"^{name}:.*##.*\n\t", text, re.MULTILINE), f"make {name} has no recipe"


def test_pip_and_uv_agree_on_the_python_versions(setup, project):
    assert project["project"]["requires-python"] == setup["options"]["python_requires"]


def test_the_lock_has_hashes_for_every_package_and_names_no_folder_of_a_machine():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    for package in lock["package"]:
        if "registry" in package["source"]:
            files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
            assert files, package["name"]
            assert all(file["hash"].startswith("sha256:") for file in files), package["name"]
        else:
            assert package["source"] == {"editable": "."}


def test_the_operator_alone_asks_for_neither_torch_nor_vllm(setup):
    core = setup["options"]["install_requires"] + setup["options.extras_require"]["operator"]
    assert not [name for name in ("torch", "vllm", "numpy", "pyarrow", "miles[") if name in core]


def uv() -> str | None:
    return next(map(str, sorted(ROOT.glob(".cache/uv-*/bin/uv"))), shutil.which("uv"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(uv() is None and not os.environ.get("CI"), reason="no uv: make setup")
def test_an_installation_without_extras_has_both_commands_and_neither_torch_nor_vllm(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    for name in ("operators", "pipeline"):
        shutil.copytree(ROOT / name, source / name)
    command = [uv(), "sync", "--quiet", "--frozen", "--no-editable", "--no-dev", "--python", sys.executable]
    variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(environment)}
    variables.pop("VIRTUAL_ENV", None)
    subprocess.run(command, cwd=source, env=variables, check=True)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / program), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    for program in ("miles", "kubectl-miles"):
        assert "miles COMMAND" in run(program, "--help").stdout
    assert run("miles", "explain", "spec.trainer.lora").returncode == 0
    absent = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'numpy', 'tests') if u.find_spec(n)])"
    assert run("python", "-c", absent).stdout == "[]\n"
    page = "import importlib.resources as r; print(len(list(r.files('pipeline.report').glob('page.*'))))"
    assert run("python", "-c", page).stdout == "3\n"
    described = "import importlib.metadata as m; d = m.metadata('miles'); print(d['License'], len(d.get_payload()))"
    licence, length = run("python", "-c", described).stdout.split()
    assert (licence, int(length) > 1000) == ("Apache-2.0", True)
    refused = run("miles", "report", ".")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
