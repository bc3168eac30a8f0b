"""`miles validate`, `explain` and `render` as commands: output, exit codes, and never a traceback."""

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from operators import cli, documents
from pipeline.config import RunConfig
from pipeline.sampling import TOLD
from tests.test_spec import EVERYTHING, MINIMAL

SAMPLES = pathlib.Path(__file__).parent.parent / "manifests" / "samples"
BROKEN = pathlib.Path(__file__).parent / "broken"
REMOTE = MINIMAL.replace("generator: reasoning-gym/chain_sum", "uri: s3://team-a/sums.jsonl") + (
    "  rewards: [{name: correct, library: math-verify}]\n"
)
"""Names nothing that validating would look for on this machine."""


@pytest.fixture
def minimal(tmp_path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(REMOTE)
    return str(path)


@pytest.fixture
def everything(tmp_path) -> str:
    path = tmp_path / "everything.yaml"
    path.write_text(EVERYTHING)
    return str(path)


def test_validate_says_that_a_job_is_valid(minimal, capsys):
    assert cli.main(["validate", minimal]) == 0
    assert capsys.readouterr().out == f"{minimal}: RLJob arithmetic is valid\n"


def test_validate_checks_every_file_and_fails_for_one_that_is_broken(minimal, capsys):
    broken = str(BROKEN / "two-faults.yaml")
    assert cli.main(["validate", broken, minimal]) == 2
    out, err = capsys.readouterr()
    assert "arithmetic is valid" in out
    assert [line.startswith(f"{broken}:") for line in err.splitlines()] == [True, True]


def test_validate_accepts_what_is_not_built_yet_and_says_so(tmp_path, capsys):
    path = tmp_path / "queued.yaml"
    path.write_text(REMOTE.replace("metadata:\n", "metadata:\n  labels: {kueue.x-k8s.io/queue-name: a}\n"))
    assert cli.main(["validate", str(path)]) == 0
    warning = f'{path}: warning: metadata.labels["kueue.x-k8s.io/queue-name"]: not built yet: the job does not wait'
    assert capsys.readouterr().err.startswith(warning)


def test_broken_files_give_exit_code_2_and_no_traceback_in_a_real_process():
    files = sorted(map(str, BROKEN.glob("*.yaml")))
    result = subprocess.run(
        [sys.executable, "-m", "operators.cli", "validate", *files], capture_output=True, text=True, timeout=50
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert {line.partition(".yaml:")[0] for line in result.stderr.splitlines()} == {
        f.removesuffix(".yaml") for f in files
    }


@pytest.mark.parametrize("path", ["trainer.lora.rank", "spec.trainer.lora.rank", ".spec.trainer[0].lora.rank"])
def test_explain_takes_a_path_as_people_write_it(capsys, path):
    assert cli.main(["explain", path]) == 0
    assert "spec.trainer.lora.rank <integer>" in capsys.readouterr().out


def test_a_reader_that_stops_early_sees_no_traceback():
    command = f"{sys.executable} -m operators.cli explain spec | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def bash(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("command", ["explain spec", "render {job}", "validate {job}"])
def test_a_full_disk_is_said_in_one_line(minimal, command):
    done = bash(f"{sys.executable} -m operators.cli {command.format(job=minimal)} >/dev/full")
    assert (done.returncode, done.stderr) == (1, "miles: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_as_one_that_nobody_reads(minimal, closed):
    done = bash(f"{sys.executable} -m operators.cli validate {minimal} {closed}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--run-id", value) for value in ("../x", "", "x" * 300, "a b")),
        *((option, value) for option in ("--image", "--gpu-image") for value in ("", "a b", "a\nb: c")),
    ],
)
def test_render_refuses_an_option_that_no_object_could_hold(minimal, capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["render", minimal, option, value])
    assert f"argument {option}: got " in capsys.readouterr().err


def test_letters_that_the_terminal_lacks_are_replaced():
    done = bash(f"PYTHONIOENCODING=ascii {sys.executable} -m operators.cli explain spec.store.uri")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


INTERRUPTED_IMPORT = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from operators.cli import main
"""


@pytest.mark.parametrize("package", ["pydantic", "subprocess", "argparse"])
def test_an_interrupt_while_packages_are_imported_ends_quietly(package):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_interrupt_while_a_command_works_ends_quietly(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupted)
    assert cli.main(["run", "job.yaml"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_number_of_five_thousand_digits_is_refused_in_one_line(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text(MINIMAL.replace("totalSteps: 200", "totalSteps: " + "9" * 5000))
    assert cli.main(["validate", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "spec.algorithm.totalSteps: got " in error
    assert len(error) < 400


def test_explain_prints_a_field_and_refuses_an_unknown_one(capsys):
    assert cli.main(["explain", "spec.trainer.lora.rank"]) == 0
    assert "one of: 1, 8, 16, 32, 64, 128, 256, 320, 512" in capsys.readouterr().out
    assert cli.main(["explain", "spec.trainer.lora.rnak"]) == 2
    assert capsys.readouterr().err == 'miles explain: spec.trainer.lora.rnak: unknown field; did you mean "rank"?\n'


def test_explain_lists_every_argument_that_a_reward_function_is_offered(capsys):
    cli.main(["explain", "spec.rewards.function"])
    words = set(re.findall("[a-z_]+", capsys.readouterr().out))
    assert words >= TOLD | {"item", "episode_reward"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lora", "lora: did you mean spec.trainer.lora?"),
        ("lora.rank", "lora: did you mean spec.trainer.lora.rank?"),
        ("configMap", "configMap: did you mean spec.environment.from.configMap or spec.rewards.from.configMap?"),
        ("trainer.lora.configMap", "spec.trainer.lora.configMap: unknown field; known are rank, alpha, targets"),
        ("trainr", "trainr: unknown field; known are apiVersion, kind, metadata, spec"),
    ],
)
def test_explain_says_where_a_field_is_that_was_named_without_its_place(capsys, path, message):
    assert cli.main(["explain", path]) == 2
    assert capsys.readouterr().err == f"miles explain: {message}\n"


def test_render_prints_objects_that_kubectl_reads_back_unchanged(everything, capsys):
    from operators import manifest
    from operators.children import children

    assert cli.main(["render", everything, "--run-id", "7"]) == 0
    objects = [document.value for document in documents.read(capsys.readouterr().out)]
    assert objects == children(manifest.load_one(everything), run_id="7")
    assert [item["kind"] for item in objects] == [
        *["NetworkPolicy"] * 4,
        "PodDisruptionBudget",
        "ConfigMap",
        "Deployment",
        "Service",
        "Deployment",
        "Service",
        "Job",
    ]


def test_render_shows_the_configuration_as_it_reads_and_no_yaml_aliases(minimal, capsys):
    cli.main(["render", minimal])
    out = capsys.readouterr().out
    assert '  run.json: |-\n    {\n      "namespace": "default",' in out
    assert "&id" not in out


def test_render_says_on_standard_error_what_is_not_built(everything, capsys):
    cli.main(["render", everything])
    out, err = capsys.readouterr()
    assert (
        f'{everything}: warning: metadata.labels["kueue.x-k8s.io/queue-name"]: not built yet: the job does not wait'
        in err
    )
    assert list(yaml.safe_load_all(out))


def test_render_refuses_a_store_that_pods_cannot_share(capsys):
    file = str(SAMPLES / "tiny.yaml")
    assert cli.main(["render", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"{file}: spec.store.uri: got ")


def test_render_takes_images_and_settings(minimal, capsys):
    assert cli.main(["render", minimal, "--image", "registry/miles:1", "--set", "spec.rollout.replicas=3"]) == 0
    deployment = next(item for item in yaml.safe_load_all(capsys.readouterr().out) if item["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 3
    images = {container["image"] for container in deployment["spec"]["template"]["spec"]["containers"]}
    assert images == {"registry/miles:1"}


def test_an_unknown_command_is_refused_with_the_one_that_was_meant(capsys):
    assert cli.main(["vaildate"]) == 2
    assert capsys.readouterr().err == 'miles: vaildate: unknown command; did you mean "validate"?\n'


def test_without_a_command_the_usage_is_printed(capsys):
    assert cli.main([]) == 0
    assert "validate FILE…" in capsys.readouterr().out


def test_commands_of_the_data_plane_are_its_own_modules(monkeypatch):
    called = []
    monkeypatch.setattr("os.execv", lambda program, arguments: called.append(arguments))
    cli.main(["report", "runs/tiny", "--follow"])
    assert called == [[sys.executable, "-m", "pipeline.report", "runs/tiny", "--follow"]]


@pytest.mark.parametrize(
    ("sample", "sizes", "device"),
    [
        ("gpu-7b", (1, 4, 4, 1), []),
        ("multinode-70b-lora", (2, 8, 4, 4), []),
        ("demo", (1, 2, 1, 1), ["--device=cpu", "--cpu-cache=1", "--one-machine"]),
    ],
)
def test_plan_hands_the_jobs_configuration_and_sizes_to_the_data_plane(monkeypatch, sample, sizes, device):
    called = []

    def run(command, **options):
        called.append((command, options.get("input")))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    steps = ["--set", "spec.algorithm.totalSteps=70"]
    assert cli.main(["plan", str(SAMPLES / f"{sample}.yaml"), *steps, "--price", "2"]) == 1
    ((command, text),) = called
    names = ("nodes", "processes-per-node", "servers", "devices-per-server")
    flags = [f"--{name}={value}" for name, value in zip(names, sizes, strict=True)]
    assert command == [sys.executable, "-m", "pipeline.plan", "/dev/stdin", *flags, *device, "--price", "2"]
    assert RunConfig.model_validate_json(text).algorithm.total_steps == 70


def test_plan_refuses_a_broken_file_before_anything_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: pytest.fail("was started"))
    file = tmp_path / "job.yaml"
    file.write_text("kind: RLJob")
    assert cli.main(["plan", str(file)]) == 2
    assert "spec" in capsys.readouterr().err


def test_validating_needs_neither_torch_nor_vllm_nor_the_packages_of_a_local_run():
    heavy = ("torch", "vllm", "numpy", "aiohttp", "rich")
    program = f"import sys; from operators import cli; cli.main([]); print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.stdout.splitlines()[-1] == "[]"
