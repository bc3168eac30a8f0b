"""RLJob files for property-based tests: text as people write it, valid and broken, with the quirks of YAML.

A file is first a tree: dict (of key → tree), list, Plain (a scalar's text, as it stands) or str (a string, which is
then written in one of YAML's ways). Most trees are a good job with some fields set anew, from the schema or from a
short list of values that the joined rules are about; hypothesis shrinks both the tree and the way it is written.
"""

import copy
import functools
import json
import re
from typing import Any

import yaml
from hypothesis import strategies as st

from operators import documents, schema
from operators.schema import Node
from tests.test_spec import EVERYTHING, MINIMAL


class Plain(str):
    """The text of a scalar or of a flow collection, written as it stands."""


Draw = Any
ODD = [
    *("~", "null", "''", "no", "y", "True", "off", "010", "0o17", "0x1F", "0b11", "1_000", "08", "+5", "-1", "0", "-0"),
    *(
        "2e-4",
        "1e1",
        "8.0",
        "8.5",
        "1.0e+1",
        ".5",
        "5.",
        "1e400",
        "1e20",
        "99999999999999999999",
        "9223372036854775808",
    ),
    *("12:30", "2025-09-01", "'8'", '"no"', "[]", "{}", "[1]", "{a: 1}", "[null]", "!!str 5", "!!int '5'", "!!float 5"),
    *("=", '"a\\nb"', '"\\u00e9"', "é", "'$(id)'", "-- x", "'#'", "#", "&a 5", "a b"),
]
BROKEN = [
    ".inf",
    ".nan",
    "'a\nb'",
    '"\\ud83d"',
    "a: b",
    "*a",
    "? a",
    "|\n        line\n",
    ">-\n    line\n",
    "- a",
    "@a",
    "[",
    "'",
]
KEYS = [
    "a",
    "a.b/c",
    "A.b/c",
    "",
    "a/b/c",
    "x" * 63,
    "x" * 64,
    "-a",
    "a_b",
    "é",
    "a..b/c",
    f"{'x' * 64}/a",
    "10",
    "yes",
]
BEFORE = ["# a job\n", "---\n", "\n\n", "--- # first\n", "\ufeff", "%YAML 1.1\n---\n"]
AFTER = ["---\n", "...\n", "# end", "\n---\n# nothing\n", "x", "\x00"]
POOLS: dict[str, list[Any]] = (
    {
        "metadata.name": ["a", "a" * 45, "a" * 46, "1a", "a-", "a.b", "A", Plain("10"), Plain("no"), Plain("null"), ""],
        "metadata.namespace": ["default", "", Plain("~"), "Team_A", Plain("5"), "x" * 64],
        "metadata.labels": [{key: "v"} for key in KEYS] + [{"a": value} for value in ("", "a b", "x" * 64, Plain("~"))],
        "metadata.annotations": [{key: "v"} for key in KEYS] + [{"a": Plain("~")}, {"a": Plain("5")}, {"a": "x" * 300}],
        "metadata.generateName": ["a-", Plain("~")],
        "metadata.uid": ["x", Plain("~")],
        "status": [{"phase": "Running"}, {"phase": Plain("5")}, {"nonsense": "x"}, Plain("~"), {}],
        "spec.model.uri": ["hf://a/b", "s3://models/x", "file:///m", "hf://a", "--option"],
        "spec.model.revision": ["main", Plain("1.0"), Plain("2025-09-01")],
        "spec.model.trustRemoteCode": [Plain("true"), Plain("yes"), "true"],
        "spec.data": [
            {"replayFrom": {"uri": "s3://team-a/b", "where": "reward > 0.5"}},
            {"replayFrom": {"uri": "s3://team-a/../b"}},
            {"replayFrom": {"uri": "s3://team-a/b"}, "sets": []},
            {"replayFrom": Plain("~"), "sets": []},
        ],
        "spec.data.replayFrom": [{"uri": "s3://team-a/miles/b"}, {"where": "reward > 0.5"}, Plain("~")],
        "spec.data.sets": [
            [{"generator": "reasoning-gym/a"}, {"generator": "reasoning-gym/a"}],
            [{"generator": "reasoning-gym/a"}, {"generator": "reasoning-gym/b"}],
            [{"generator": "reasoning-gym/a", "name": "b"}, {"generator": "reasoning-gym/b"}],
            [{"uri": "s3://data/a.jsonl"}, {"generator": "reasoning-gym/a", "name": "b"}],
            [{"uri": "s3://data/a.b.jsonl"}, {"uri": "https://host/x/a.parquet"}],
            [{"uri": "s3://data/_a.jsonl"}],
            [{"uri": "s3://data/.jsonl"}],
            [{"uri": "s3://data/a.csv"}],
            [{"uri": "s3://data/a.jsonl", "generator": "reasoning-gym/a"}],
            [{"uri": "s3://data/a.jsonl", "parameters": {"a": "b"}}],
            [{"uri": "s3://data/a.jsonl", "parameters": {}}],
            [{"generator": "reasoning-gym/a", "parameters": {"seed": Plain("5")}}],
            [{"generator": "reasoning-gym/a", "parameters": {"seed": Plain("~")}}],
            [{"generator": "reasoning-gym/a", "parameters": {"seed": [], "": Plain("1e30"), "b": [Plain("~")]}}],
            [{"generator": "reasoning-gym/a", "weight": weight} for weight in ("0", "1e-9", "1e6", "1000001", "1.")],
            [{"name": "a"}],
            [],
            [Plain("~")],
            [Plain("&s {generator: reasoning-gym/a, name: a}"), Plain("{<<: *s, name: b}")],
            [Plain("&s {generator: reasoning-gym/a, name: a}"), Plain("*s")],
            [Plain("&s {generator: reasoning-gym/a}"), Plain("{<<: *s, nam: b}")],
            [Plain("{<<: 5}")],
            [Plain("&s [*s]")],
        ],
        "spec.rewards": [
            [],
            [{"name": "a", "library": "math-verify"}],
            [{"name": "a", "library": "generator"}],
            [{"name": "a", "library": "environment"}],
            [{"name": "a", "library": "environment", "normalize": Plain("true")}],
            [{"name": "a", "library": "environment", "clip": "5"}],
            [{"name": "a", "library": "length", "normalize": Plain("true"), "clip": "5"}],
            [{"name": "a", "library": "length", "clip": "0"}],
            [{"name": "a", "library": "length"}, {"name": "a", "function": "a:b"}],
            [{"name": "a", "library": "length"}, {"name": "b", "function": "a.py:b", "from": {"configMap": "x"}}],
            [{"name": "a", "function": "a:b", "from": {"configMap": "x"}}],
            [{"name": "a", "endpoint": "http://judge", "from": {"configMap": "x"}}],
            [{"name": "a", "library": "length", "endpoint": "http://judge"}],
            [{"name": "a", "weight": weight, "library": "length"} for weight in ("-1", "1e999", "-1e6", "-1000001")][
                :1
            ],
            [{"name": "a", "weight": "1e999", "library": "length"}],
            [{"name": "a", "weight": "-1000001", "library": "length"}],
            [{"name": "a"}],
            [{"name": "a", "model": {"uri": "s3://models/rm", "resources": {"limits": {"nvidia.com/gpu": "1.5"}}}}],
            [{"name": "a", "model": {"uri": "s3://models/rm", "replicas": Plain("2")}}],
            [{"library": "length"}],
        ],
        "spec.environment": [
            {"library": "reasoning-gym"},
            {"library": "reasoning-gym", "parameters": {"attempts": Plain("2")}},
            {"class": "a.py:B"},
            {"class": "a.py:B", "from": {"configMap": "x"}},
            {"class": "a:B", "from": {"configMap": "x"}},
            {"class": "a:B", "library": "reasoning-gym"},
            {"library": "chess"},
            {"class": "../a.py:B"},
            {"class": "a.py:B", "maxTurns": Plain("0")},
            {},
            Plain("~"),
        ],
        "spec.algorithm.type": ["grpo", "ppo", "reinforce++", "dapo", "gpro", Plain("no")],
        "spec.algorithm.promptsPerStep": [Plain(text) for text in ("1", "6", "16", "1.6e1")],
        "spec.algorithm.updatesPerStep": [Plain(text) for text in ("1", "2", "3", "4")],
        "spec.algorithm.groupSize": [Plain(text) for text in ("1", "2", "8.0", "010")],
        "spec.algorithm.warmupSteps": [Plain(text) for text in ("0", "199", "200", "201")],
        "spec.algorithm.parameters": [
            {"dualClip": value} for value in ("0", "3", "1", "-1", "1e999", Plain("3"), Plain("~"), "x", "1000001")
        ]
        + [{"dynamicSampling": value} for value in (Plain("true"), Plain("1"), "true", Plain("~"))]
        + [{"criticWarmupSteps": Plain(text)} for text in ("0", "199", "200", "1.0", "-1", "1000001", "'5'")]
        + [{"gamma": "0.9"}, {"gamma": "1.1"}, {"overlongBuffer": "0.5", "maskTruncated": Plain("no")}]
        + [{"lambda": "0.95"}, {"lambda": Plain("~")}, {"dual_clip": "3"}, {}, Plain("~"), []],
        "spec.algorithm.kl": [
            {"estimator": estimator, "placement": placement}
            for estimator in ("k1", "k3")
            for placement in ("loss", "reward")
        ]
        + [{"coefficient": coefficient, "target": "0.1"} for coefficient in ("0", "0.0", "0.5", "x")]
        + [{"coefficient": "1", "target": "0.1", "horizon": Plain(text)} for text in ("11", "12", "127", "128")]
        + [{"target": "0.1"}, {"target": "0"}, {"target": Plain("~")}],
        "spec.algorithm.correction": [
            {"type": "masked-is", "band": {"low": "0.9"}, "sequenceBand": {}},
            {"band": {"high": "0.9"}},
            {"sequenceBand": {"low": "1.1"}},
            {"bypass": Plain("true"), "veto": "2"},
            {"bypass": Plain("true"), "veto": "0.0"},
            {"bypass": Plain("true"), "veto": "1e-4"},
            {"bypass": Plain("true"), "sequenceBand": {}},
            {"bypass": Plain("true"), "type": "masked-is"},
        ],
        "spec.algorithm.clip": [
            {"low": low, "high": high} for low, high in (("0.2", "0.3"), ("1", "101"), ("0.999", "0"))
        ],
        "spec.algorithm.learningRate": [
            "1e-6",
            "0",
            "1",
            "1.0001",
            "0.",
            ".5",
            "1e-999",
            "1E-6",
            Plain("1e-6"),
            Plain("1"),
        ],
        "spec.algorithm.sampling.maxNewTokens": [Plain(text) for text in ("63", "64", "4095", "4096")],
        "spec.algorithm.sampling.temperature": ["0", "0.009", "0.01", "10", "10.1", Plain("1")],
        "spec.rollout.maxModelLen": [Plain(text) for text in ("64", "512", "513", "2048", "4096")],
        "spec.rollout.replicas": [Plain(text) for text in ("0", "1", "4", "1025")],
        "spec.rollout.autoscale": [
            {"min": Plain(low), "max": Plain(high)} for low, high in (("0", "1"), ("2", "4"), ("5", "4"), ("1", "0"))
        ],
        "spec.rollout.tensorParallelSize": [Plain(text) for text in ("1", "2", "8")],
        "spec.rollout.adapterLoading": ["merge", "hot"],
        "spec.trainer.lora": [
            {},
            Plain("~"),
            {"rank": Plain("24")},
            {"targets": "q_proj,,v"},
            {"targets": "q_proj,lm_head"},
        ],
        "spec.trainer.processesPerNode": [Plain(text) for text in ("1", "2", "8", "16", "17")],
        "spec.trainer.nodes": [Plain(text) for text in ("1", "2", "6", "0")],
        "spec.trainer.offload": ["none", "reference", "all", "some"],
        "spec.trainer.modelReplicas": [Plain(text) for text in ("1", "2", "3", "0")],
        "spec.trainer.maxTokensPerMicroBatch": [Plain(text) for text in ("64", "4095", "4096", "16384")],
        "spec.store.uri": [
            "s3://team-a/miles",
            "s3://team-a/miles/",
            "s3://team-a/../x",
            "s3://t",
            "file:///x",
            "gs://a/b",
        ],
        "spec.checkpoint.resumeFrom": ["s3://team-a/miles/x/", "s3://a-b/../c", "file:///a/../b", "~"],
        "spec.output": [
            {"uri": uri}
            for uri in (
                "s3://team-a/miles",
                "s3://team-a/miles2",
                "s3://team-a/miles//",
                "s3://team-a",
                "s3://a-b/../c",
            )
        ]
        + [{"uri": "s3://models/x", "what": "best"}],
        "spec.evaluation": [
            {"sets": [{"uri": "s3://data/a.jsonl"}]},
            {"sets": [{"generator": "reasoning-gym/a"}]},
            {"sets": [{"generator": "reasoning-gym/a", "limit": Plain("5"), "temperature": "0"}]},
            {"sets": [{"generator": "reasoning-gym/a", "limit": Plain("5"), "temperature": "0.009"}]},
            {"sets": [{"generator": "reasoning-gym/a", "limit": Plain("5"), "temperature": "11"}]},
            {"sets": []},
        ],
    }
    | {
        f"spec.{part}.resources": [
            {kind: {key: value}}
            for kind in ("limits", "requests")
            for key, value in (
                *(
                    ("cpu", value)
                    for value in ("2", "500m", "1.5", "2k", Plain("2"), Plain("2.0"), Plain("1.5"), Plain("-1"))
                ),
                *(
                    ("nvidia.com/gpu", value)
                    for value in ("1", "2", "08", "0", "1.5", Plain("2"), Plain("8"), Plain("~"))
                ),
                *(("memory", value) for value in ("2Gi", "2GB", "2Gi\n", "1" * 33, Plain("9223372036854775808"))),
                ("", "1"),
                ("a/b/c", "1"),
            )
        ]
        for part in ("rollout", "trainer")
    }
    | {
        f"spec.{part}.template": [
            {"env": [{"name": name, "value": ""}]}
            for name in ("A", "PET_X", "MY_RANK", "RANK", "MILES_", "LOCAL_WORLD_SIZE", "1A", "a-b")
        ]
        + [
            {"env": [{"name": "A", "value": "x"}, {"name": "A", "value": "y"}]},
            {"env": [{"name": "A"}]},
            {"env": [{"name": "A", "value": Plain("~")}]},
            {"env": [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
            {"env": [{"name": "A", "valueFrom": {}}]},
            *({"nodeSelector": {key: "v"}} for key in KEYS),
            *({"annotations": {key: Plain("~")}} for key in KEYS),
            {"tolerations": [{}, {"operator": "Exists"}, {"key": "a/b", "effect": "NoExecute"}]},
        ]
        for part in ("rollout", "trainer")
    }
)
"""Values of the fields that rules join, and what stands around the spec."""


_FROM_POOL = {name: st.sampled_from(values) for name, values in POOLS.items()}


def _tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tree(item) for item in value]
    return value if isinstance(value, str) else Plain(json.dumps(value))


GOOD = {name: _tree(yaml.safe_load(text)) for name, text in (("minimal", MINIMAL), ("everything", EVERYTHING))}


@functools.cache
def _among(*choices: str) -> st.SearchStrategy[str]:
    """One of them. Strategies are dear to make, so that each is made once."""
    return st.sampled_from(choices)


@st.composite
def files(draw: Draw) -> str:
    """The text of one file with one RLJob."""
    tree = copy.deepcopy(GOOD[draw(_among(*GOOD))])
    for _ in range(int(draw(_among("1", "1", "1", "1", "2", "3")))):
        _edit(draw, tree)
    metadata = tree.get("metadata")
    if isinstance(metadata, dict) and re.fullmatch("[a-z0-9][-a-z0-9]{0,62}", str(metadata.get("namespace"))):
        metadata["namespace"] = "default"  # the only one that the server has
    text = draw(_written(tree))
    before = draw(_among("", *BEFORE)) if draw(_rarely(8)) else ""
    after = draw(_among("", *AFTER)) if draw(_rarely(8)) else ""
    return before + text + after


@functools.cache
def _rarely(of: int) -> st.SearchStrategy[bool]:
    """True once in `of` times."""
    return st.sampled_from([False] * (of - 1) + [True])


def _edit(draw: Draw, tree: dict[str, Any]) -> None:
    """One field set anew, taken away, misspelt or given twice."""
    if draw(st.booleans()):
        name = draw(_among(*POOLS))
        _put(tree, name.split("."), copy.deepcopy(draw(_FROM_POOL[name])))
        return
    node: Node = schema.tree()
    place: Any = tree
    if isinstance(tree.get("spec"), dict) and not draw(_rarely(10)):
        place, node = tree["spec"], node["properties"]["spec"]
    while True:
        key = draw(_among(*node["properties"]))
        below = node["properties"][key]
        if "properties" not in below or draw(_rarely(4)):
            break
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place, node = place[key], below
    match draw(_among(*["value"] * 14, "odd", "odd", "remove", "unknown", "misspelt", "broken")):
        case "value":
            place[key] = draw(_value(below))
        case "odd":
            place[key] = Plain(draw(_among(*ODD)))
        case "broken":
            place[key] = Plain(draw(_among(*BROKEN)))
        case "remove":
            place.pop(key, None)
        case "unknown":
            place[draw(_among("foo", "Spec", "", "x-y", "0"))] = Plain(draw(_among(*ODD)))
        case "misspelt":
            place[key.swapcase()] = place.pop(key, Plain("1"))


def _put(tree: Any, path: list[str], value: Any) -> None:
    for step in path[:-1]:
        if not isinstance(tree.get(step), dict):
            tree[step] = {}
        tree = tree[step]
    tree[path[-1]] = value


def _value(node: Node) -> st.SearchStrategy[Any]:
    """Values that fit a node of the schema, or nearly."""
    if id(node) not in _STRATEGIES:
        _STRATEGIES[id(node)] = _value_of(node)
    return _STRATEGIES[id(node)]


_STRATEGIES: dict[int, st.SearchStrategy[Any]] = {}
"""By the node's identity, which lasts: the schema is built once."""


def _value_of(node: Node) -> st.SearchStrategy[Any]:
    odd = st.sampled_from([Plain(text) for text in ODD])
    if "x-kubernetes-int-or-string" in node:
        fitting: st.SearchStrategy[Any] = st.sampled_from(["2", "16Gi", "500m", Plain("2"), "2Ei"])
    elif "enum" in node:
        fitting = st.sampled_from([item if isinstance(item, str) else Plain(str(item)) for item in node["enum"]])
    elif node["type"] == "boolean":
        fitting = st.sampled_from([Plain("true"), Plain("false"), Plain("off")])
    elif node["type"] == "integer":
        low, high = node["minimum"], node["maximum"]
        fitting = st.sampled_from([Plain(str(number)) for number in (low, high, low + 1, low - 1, high + 1)])
    elif node["type"] == "string":
        fitting = _text(node)
    elif node["type"] == "array":
        most = min(2, node["maxItems"])
        fitting = st.lists(_value(node["items"]), max_size=most) | _many(node["maxItems"], _value(node["items"]))
    else:
        fitting = _object(node)
    return st.one_of(fitting, fitting, fitting, fitting, fitting, odd)


def _many(most: int, item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(item, st.sampled_from([most, most + 1])).map(lambda drawn: [drawn[0]] * drawn[1])


def _text(node: Node) -> st.SearchStrategy[str]:
    low, high = node.get("minLength", 0), node.get("maxLength", 64)
    lengths = st.sampled_from([low, high, high + 1, max(0, low - 1)])
    plain = st.tuples(st.sampled_from(["a", "é", "😀", "0", " "]), lengths).map(lambda drawn: drawn[0] * drawn[1])
    if "pattern" not in node:
        return plain
    ascii_only = st.characters(max_codepoint=126, min_codepoint=32)
    fitting = st.from_regex(re.compile(node["pattern"]), fullmatch=True, alphabet=ascii_only)
    return st.one_of(
        fitting, fitting, fitting.map(lambda text: f"{text}\n"), fitting.map(lambda text: f" {text}"), plain
    )


def _object(node: Node) -> st.SearchStrategy[Any]:
    if "properties" not in node:
        values = node.get("additionalProperties")
        item = _value(values) if isinstance(values, dict) else st.sampled_from([Plain(text) for text in ODD])
        return st.dictionaries(st.sampled_from(KEYS), item, max_size=3)
    required = node.get("required", [])
    fields = {name: _value(child) for name, child in node["properties"].items()}
    return st.fixed_dictionaries(
        {name: fields[name] for name in required},
        optional={name: strategy for name, strategy in fields.items() if name not in required},
    )


@st.composite
def _written(draw: Draw, tree: Any) -> str:
    """`tree` as YAML text: nested maps in blocks, the rest in blocks or in flow style."""
    return "".join(_block(draw, tree, 0))


def _block(draw: Draw, tree: dict[str, Any], indent: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if draw(_rarely(400)):
            lines.append(f"{' ' * indent}{_key(draw, key)}: {_flow(draw, value)}\n")  # given twice
        lead = " " * indent + _key(draw, key)
        if isinstance(value, dict) and value and not draw(_rarely(10)):
            lines += [f"{lead}:\n", *_block(draw, value, indent + 2)]
        elif isinstance(value, list) and value and draw(st.booleans()):
            lines += [f"{lead}:\n", *(f"{' ' * indent}- {_flow(draw, item)}\n" for item in value)]
        else:
            comment = " # note" if draw(_rarely(20)) else ""
            lines.append(f"{lead}: {_flow(draw, value)}{comment}\n")
    return lines


def _key(draw: Draw, key: str) -> str:
    if documents.scalar(key or "~") != key or not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_./+]*", key):
        return json.dumps(key) if not draw(_rarely(4)) or not key.isalnum() else key
    return json.dumps(key) if draw(_rarely(20)) else key


def _flow(draw: Draw, value: Any) -> str:
    if isinstance(value, Plain):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(draw, key)}: {_flow(draw, item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(draw, item) for item in value) + "]"
    plain = re.fullmatch(r"[A-Za-z0-9./][-A-Za-z0-9._/+:@]*", value) is not None and not value.endswith(":")
    style = draw(_among("plain", "plain", "double", "single") if plain else _among("double", "single"))
    if style == "plain":
        return value
    single = "'" + value.replace("'", "''") + "'"
    return single if style == "single" and value.isprintable() else json.dumps(value, ensure_ascii=draw(st.booleans()))
