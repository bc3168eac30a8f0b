"""What Argo CD makes of an RLJob: its Lua is run here as Argo CD runs it, in Lua 5.1 with the base and table libraries
alone; a call of string.*, os.* or io.* fails."""

import pathlib

import pytest
import yaml
from lupa import lua51

from operators.spec.status import RLJobStatus

FOLDER = pathlib.Path(__file__).parent.parent / "manifests" / "argocd"
HEALTH = (FOLDER / "health.lua").read_text()
ACTIONS = yaml.safe_load((FOLDER / "actions.yaml").read_text())
SANDBOX = """
return function(source, given)
  local text = getmetatable("")
  debug.setmetatable("", nil)
  local inside = { obj = given, table = table }
  for _, name in ipairs({ "assert", "error", "ipairs", "next", "pairs", "select", "tonumber", "tostring", "type" }) do
    inside[name] = _G[name]
  end
  local chunk = setfenv(assert(loadstring(source)), inside)
  local done, result = pcall(chunk)
  debug.setmetatable("", text)
  assert(done, result)
  return result
end
"""


def run(source: str, job: dict):
    """What the script returns for `obj` = job; dicts and lists for tables."""
    runtime = lua51.LuaRuntime(register_eval=False, register_builtins=False)
    return plain(runtime.execute(SANDBOX)(source, runtime.table_from(job, recursive=True)))


def plain(value):
    if lua51.lua_type(value) != "table":
        return value
    keys = list(value.keys())
    if keys and all(isinstance(key, int) for key in keys):
        return [plain(value[key]) for key in sorted(keys)]
    return {key: plain(value[key]) for key in keys}


def job(*conditions: str, suspend: bool = False, observed: int = 2, **status) -> dict:
    """conditions: "Ready=False some message"."""
    found = []
    for text in conditions:
        (kind, _, rest) = text.partition("=")
        (state, _, message) = rest.partition(" ")
        found.append({"type": kind, "status": state, "reason": "Any", "message": message})
    return {
        "metadata": {"name": "sums", "generation": 2},
        "spec": {"suspend": suspend},
        "status": {"observedGeneration": observed, "conditions": found, **status},
    }


HEALTH_TABLE = {
    "no status": ({"metadata": {"generation": 1}, "spec": {}}, "Progressing", "not acted"),
    "an empty status": ({"metadata": {"generation": 1}, "spec": {}, "status": {}}, "Progressing", "not acted"),
    "an older generation": (job("Ready=True", observed=1), "Progressing", "not acted"),
    "an older generation that failed": (job("Failed=True", observed=1), "Progressing", "not acted"),
    "no conditions yet": (job() | {"status": {"observedGeneration": 2}}, "Progressing", ""),
    "failed": (job("Ready=False", "Failed=True out of memory"), "Degraded", "out of memory"),
    "stalled": (job("Ready=False x", "Stalled=True the spec is invalid"), "Degraded", "the spec is invalid"),
    "stalled while it seems ready": (job("Ready=True", "Stalled=True no"), "Degraded", "no"),
    "complete": (job("Ready=False", "Complete=True 200 steps"), "Healthy", "200 steps"),
    "complete, once suspended": (job("Suspended=True", "Complete=True done"), "Healthy", "done"),
    "failed, once suspended": (job("Suspended=True", "Failed=True no"), "Degraded", "no"),
    "suspended": (job("Ready=False", "Suspended=True at s400"), "Suspended", "at s400"),
    "running": (job("Ready=True training", "Failed=False", "Suspended=False"), "Healthy", "training"),
    "starting": (job("Ready=False pulling images", "Failed=False"), "Progressing", "pulling images"),
    "unknown": (job("Ready=Unknown"), "Progressing", ""),
}


@pytest.mark.parametrize(("given", "status", "message"), HEALTH_TABLE.values(), ids=HEALTH_TABLE.keys())
def test_health(given, status, message):
    found = run(HEALTH, given)
    assert found["status"] == status
    assert message in found["message"] if message else found["message"] == ""


@pytest.mark.parametrize("call", ['string.find("a", "a")', '("a"):upper()', "os.time()", "io.write()", "math.huge"])
def test_the_sandbox_of_these_tests_has_no_library_that_argo_cd_lacks(call):
    with pytest.raises(lua51.LuaError):
        run(f"return {call}", job())


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        (job("Ready=True"), {"suspend"}),
        (job("Suspended=True", suspend=True), {"resume"}),
        (job("Suspended=False", suspend=True), {"resume"}),
        (job("Complete=True"), set()),
        (job("Failed=True", suspend=True), set()),
        ({"metadata": {}, "spec": {}}, {"suspend"}),
        ({"metadata": {}, "spec": {}, "status": {}}, {"suspend"}),
    ],
    ids=["running", "suspended", "suspending", "complete", "failed", "new", "empty status"],
)
def test_the_button_that_can_be_pressed(given, enabled):
    found = run(ACTIONS["discovery.lua"], given)
    assert found.keys() == {"suspend", "resume"}
    assert {name for name, entry in found.items() if not entry["disabled"]} == enabled


@pytest.mark.parametrize(("name", "wanted"), [("suspend", True), ("resume", False)])
def test_an_action_changes_suspend_and_nothing_else(name, wanted):
    (action,) = (entry["action.lua"] for entry in ACTIONS["definitions"] if entry["name"] == name)
    given = job("Ready=True", suspend=not wanted)
    assert run(action, given) == given | {"spec": {"suspend": wanted}}


def test_every_button_has_an_action():
    offered = run(ACTIONS["discovery.lua"], job())
    assert set(offered) == {entry["name"] for entry in ACTIONS["definitions"]}


def test_what_is_passed_over_tells_nothing_of_health_and_is_part_of_the_status():
    known = {field.alias for field in RLJobStatus.model_fields.values()}
    pointers = yaml.safe_load((FOLDER / "ignore.yaml").read_text())["jsonPointers"]
    fields = {pointer.removeprefix("/status/") for pointer in pointers}
    assert fields <= known - {"conditions", "observedGeneration", "phase"}


def test_the_example_applies_server_side_and_leaves_suspend_to_people():
    application = yaml.safe_load((FOLDER / "application.yaml").read_text())
    assert "ServerSideApply=true" in application["spec"]["syncPolicy"]["syncOptions"]
    assert application["spec"]["ignoreDifferences"][0]["jsonPointers"] == ["/spec/suspend", "/spec/rollout/replicas"]
