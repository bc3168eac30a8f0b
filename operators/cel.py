"""The rules of `operators.rules` that the API server checks itself, in CEL and in the same words; and the rules for
edits, which need the object as it was. Pure.

CEL sees neither the size of an object nor values without a type, so the rules about sizes are Python's alone: an
RLJob that breaks one is stored and gets the condition Stalled. Defaults are filled in before a rule is read, so has()
asks only for fields without one.
"""

import dataclasses
import json
from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from operators import schema
from operators.edits import REFUSED, SUSPENDED, TABLE
from operators.rules import (
    BARE_LAYERS,
    CORRECTS_NOTHING,
    GENERATES,
    MANAGED_VARIABLE,
    NO_ADAPTER,
    NO_COPY,
    NO_REFERENCE,
)
from operators.schema import Node
from operators.spec.pods import GPU
from pipeline.algorithms.registry import ALGORITHMS


@dataclasses.dataclass(frozen=True)
class Rule:
    holds: str
    """CEL that must be true; `self` is the value at the rule's place, `oldSelf` what it was before an edit."""
    message: str
    """What to write instead."""
    field: str = ""
    """Where the fault is shown, from the rule's place on."""

    def as_dict(self) -> dict[str, str]:
        made = {"rule": self.holds, "message": self.message}
        return made | ({"fieldPath": self.field} if self.field else {})


def rules(path: str, node: Node) -> list[Rule]:
    """What must hold at `path`, such as spec.rewards[].model, whose schema is `node`."""
    return [*_of_type(node), *RULES.get(path, ()), *EDITS.get(path, ())]


def _of_type(node: Node) -> Iterator[Rule]:
    fits = f"self.matches({_quoted(node.get('pattern', ''))})"
    if "pattern" in node and "remedy" in node:
        yield Rule(fits, node["remedy"])  # the pattern is kept as well, for editors; its own message shows the regex
    if bounds := node.get("between"):
        above = ">" if bounds["above"] else ">="
        within = f"double(self) {above} {float(bounds['low'])} && double(self) <= {float(bounds['high'])}"
        off = "double(self) == 0.0 || " if bounds["off"] else ""
        yield Rule(f"!{fits} || {off}({within})", bounds["remedy"])
    if names := node.get("propertyNames"):
        fits = f"size(k) <= {names['maxLength']} && k.matches({_quoted(names['pattern'])})"
        yield Rule(f"self.all(k, {fits})", names["remedy"])


def _quoted(text: str) -> str:
    """A string of CEL, which has JSON's escapes."""
    return json.dumps(text)


_NAME = schema.at(("metadata", "name")) or {}
_GPU = _quoted(GPU)
_ONLY_GENERATORS = "(!has(self.data.sets) || self.data.sets.all(s, !has(s.uri) || has(s.generator)))"


def _within(uri: str, folder: str) -> str:
    """CEL: `uri` is the folder, or lies in it."""
    return f"({uri} + '/').startsWith({folder}.endsWith('/') ? {folder} : {folder} + '/')"


def _set_name(item: str) -> str:
    """The name of a prompt set, as `operators.resolve.set_name` finds it."""
    source = f"has({item}.generator) ? {item}.generator : has({item}.uri) ? {item}.uri : ''"
    return f"(has({item}.name) ? {item}.name : {source}).find('[^/]*$').find('^[^.]*')"


def _gpus_are(count: str) -> str:
    """CEL: the limit of self.resources is 0 or `count`."""
    limits = "self.resources.limits"
    given = f"{limits}[{_GPU}]"
    same = f"(type({given}) == int ? {given} in [0, {count}] : {given} in ['0', string({count})])"
    return f"!has({limits}) || !({_GPU} in {limits}) || {same}"


_SETS = (
    Rule(
        f"self.map(e, {_set_name('e')}).all(n, self.exists_one(e, {_set_name('e')} == n))",
        "another set has the same name; give each one a name of its own",
    ),
)
_SET = (
    Rule("has(self.uri) != has(self.generator)", "give exactly one of uri and generator"),
    Rule(
        r"!has(self.uri) || has(self.generator) || self.uri.matches('[.](jsonl|ndjson|parquet)$')",
        "the name must end in .jsonl or .parquet",
        ".uri",
    ),
    Rule(
        f"{_set_name('self')}.matches('^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$')",
        "its name, or that of its file, cannot be a set's name; give it one: name: …",
    ),
)
_TEMPLATE_VARIABLE = (
    Rule(
        f"!self.name.matches({_quoted(f'^({MANAGED_VARIABLE.pattern})$')})",
        "Miles sets this variable itself; remove it",
        ".name",
    ),
    Rule("has(self.value) != has(self.valueFrom)", "give exactly one of value and valueFrom"),
)


def _quantities() -> Iterator[Rule]:
    for kind in ("requests", "limits"):
        for key, pattern, remedy in (
            ("cpu", "^[0-9]+([.][0-9]+)?m?$", "write cores, such as 2 or 500m"),
            (GPU, "^(0|[1-9][0-9]*)$", "write a whole number of GPUs"),
        ):
            given = f"self.{kind}[{_quoted(key)}]"
            yield Rule(
                f"!has(self.{kind}) || !({_quoted(key)} in self.{kind}) || "
                f"type({given}) == int || {given}.matches('{pattern}')",
                remedy,
                f".{kind}",
            )
    yield Rule(
        f"!has(self.requests) || !({_GPU} in self.requests) || (has(self.limits) && {_GPU} in self.limits)",
        "write it under limits; GPUs are never shared",
        ".requests",
    )
    asked, most = (f"quantity(string(self.{kind}[k]))" for kind in ("requests", "limits"))
    yield Rule(
        "!has(self.requests) || !has(self.limits) || "
        f"self.requests.all(k, !(k in self.limits) || {asked}.compareTo({most}) <= 0)",
        "at most the same resource under limits",
        ".requests",
    )


_TOLERATION = (
    Rule("has(self.key) || self.operator == 'Exists'", "without a key, write operator: Exists"),
    Rule(
        "self.operator != 'Exists' || !has(self.value) || self.value == ''",
        "operator Exists takes every value; remove it",
        ".value",
    ),
    Rule(
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        "counts for effect: NoExecute alone; write that, or remove it",
        ".tolerationSeconds",
    ),
)


def _algorithms() -> Iterator[Rule]:
    for name, entry in ALGORITHMS.items():
        least = entry.minimum_group_size
        if least > 1:
            remedy = f"{name} compares samples of a prompt: at least {least}"
            yield Rule(f"self.type != {_quoted(name)} || self.groupSize >= {least}", remedy, ".groupSize")
    for parameter in sorted({to_camel(name) for entry in ALGORITHMS.values() for name in entry.parameters}):
        owners = [name for name, entry in ALGORITHMS.items() if parameter in map(to_camel, entry.parameters)]
        given = f"!has(self.parameters) || !has(self.parameters.{parameter})"
        yield Rule(
            f"{given} || self.type in {json.dumps(owners)}",
            f"only {', '.join(owners)} has this parameter",
            f".parameters.{parameter}",
        )


_NO_WAY_UP = Rule("!self.startsWith('s3://') || !(self + '/').contains('/../')", 'write the key without ".."')

RULES: dict[str, tuple[Rule, ...]] = {
    "": (
        Rule(
            f"self.metadata.name.size() <= {_NAME['maxLength']}",
            f"at most {_NAME['maxLength']} characters",
            ".metadata.name",
        ),
        Rule(f"self.metadata.name.matches({_quoted(_NAME['pattern'])})", _NAME["remedy"], ".metadata.name"),
    ),
    "spec": (
        Rule(
            f"(has(self.rewards) && self.rewards.size() > 0) || {_ONLY_GENERATORS} || has(self.environment)",
            "prompts from a file need a reward, such as [{name: correct, library: math-verify}]",
            ".rewards",
        ),
        Rule(
            f"!has(self.rewards) || {_ONLY_GENERATORS} || "
            "!self.rewards.exists(r, has(r.library) && r.library == 'generator')",
            "a generator scores its own prompts only; use math-verify or a function",
            ".rewards",
        ),
        Rule(
            "!has(self.rewards) || has(self.environment) || "
            "!self.rewards.exists(r, has(r.library) && r.library == 'environment')",
            "the job has no environment; set spec.environment, or use another scorer",
            ".rewards",
        ),
        Rule(
            "!has(self.environment) || !has(self.environment.library) || "
            "self.environment.library != 'reasoning-gym' || "
            "!has(self.data.sets) || self.data.sets.all(s, has(s.generator))",
            "it knows its own tasks only; generate all data.sets, or give a class",
            ".environment.library",
        ),
        *(
            Rule(f"!has(self.data.replayFrom) || !has(self.{given}) || {empty}", GENERATES, f".{given}")
            for given, empty in (
                ("rewards", "self.rewards.size() == 0"),
                ("environment", "false"),
                ("evaluation.sets", "self.evaluation.sets.size() == 0"),
            )
        ),
        Rule(
            "!has(self.output) || !has(self.data.replayFrom) || "
            f"!({_within('self.output.uri', 'self.data.replayFrom.uri')} || "
            f"{_within('self.data.replayFrom.uri', 'self.output.uri')})",
            "must lie apart from data.replayFrom.uri, which is only read",
            ".output.uri",
        ),
        Rule(
            "self.algorithm.sampling.maxNewTokens < self.rollout.maxModelLen",
            "must leave room for the prompt in rollout.maxModelLen",
            ".algorithm.sampling.maxNewTokens",
        ),
        Rule(
            "!has(self.trainer.maxTokensPerMicroBatch) || "
            "self.trainer.maxTokensPerMicroBatch >= self.rollout.maxModelLen",
            "must hold one sample of rollout.maxModelLen",
            ".trainer.maxTokensPerMicroBatch",
        ),
        Rule(
            "!has(self.rollout.adapterLoading) || has(self.trainer.lora)",
            "there is no adapter to load; set trainer.lora or remove it",
            ".rollout.adapterLoading",
        ),
        Rule(
            "self.trainer.offload != 'reference' || has(self.trainer.lora) || "
            f"self.algorithm.type in {json.dumps([name for name, each in ALGORITHMS.items() if each.critic])} || "
            "double(self.algorithm.kl.coefficient) > 0.0",
            NO_REFERENCE,
            ".trainer.offload",
        ),
        Rule(
            "!has(self.output) || self.output.what != 'best' || "
            "(has(self.evaluation.sets) && self.evaluation.sets.size() > 0)",
            "the best version is known by evaluation; add evaluation.sets",
            ".output.what",
        ),
        Rule(
            f"!has(self.output) || !{_within('self.output.uri', 'self.store.uri')}",
            "must lie outside store.uri, whose folders belong to runs",
            ".output.uri",
        ),
        Rule(
            f"!has(self.output) || {_within('self.output.uri', 'self.store.uri')} || "
            f"!{_within('self.store.uri', 'self.output.uri')}",
            "must not hold store.uri; write the model beside it",
            ".output.uri",
        ),
        Rule(
            f"!has(self.output) || !({_within('self.output.uri', 'self.model.uri')} || "
            f"{_within('self.model.uri', 'self.output.uri')})",
            "must lie apart from model.uri, which is only read",
            ".output.uri",
        ),
    ),
    "spec.data.replayFrom.uri": (
        Rule("!self.startsWith('s3://') || !(self + '/').contains('/../')", 'write the key without ".."'),
    ),
    "spec.data": (
        Rule(
            "has(self.replayFrom) != (has(self.sets) && self.sets.size() > 0)",
            "give exactly one of sets and replayFrom",
        ),
    ),
    "spec.model": (
        Rule(
            "!self.trustRemoteCode || !self.uri.startsWith('hf://') || has(self.revision)",
            "name the commit whose code may run: add model.revision",
            ".trustRemoteCode",
        ),
        Rule(
            "!has(self.revision) || !self.uri.startsWith('file://')",
            "a folder has no revisions; remove it, or name the folder of that revision",
            ".revision",
        ),
    ),
    "spec.data.sets": _SETS,
    "spec.data.sets[]": _SET,
    "spec.data.sets[].parameters": (Rule("!has(self.seed)", "use data.seed, which all sets follow", ".seed"),),
    "spec.evaluation.sets": _SETS,
    "spec.evaluation.sets[]": (
        *_SET,
        Rule(
            "!has(self.generator) || has(self.limit)",
            "a generator never runs out; say how many prompts",
            ".limit",
        ),
    ),
    "spec.evaluation.sets[].parameters": (Rule("!has(self.seed)", "use data.seed, which all sets follow", ".seed"),),
    "spec.environment": (
        Rule("has(self.class) != has(self.library)", "give exactly one of class and library"),
        Rule(
            "!has(self.from) || (has(self.class) && self.class.contains('.py:'))",
            "only a class of the form file.py:Class is taken from a ConfigMap",
            ".from",
        ),
    ),
    "spec.rewards[]": (
        Rule(
            "[has(self.__function__), has(self.endpoint), has(self.model), has(self.library)].exists_one(x, x)",
            "give exactly one of function, endpoint, model and library",
        ),
        Rule(
            "!has(self.from) || (has(self.__function__) && self.__function__.contains('.py:'))",
            "only a function of the form file.py:function is taken from a ConfigMap",
            ".from",
        ),
        *(
            Rule(
                f"!has(self.library) || self.library != 'environment' || {absent}",
                "an environment's reward comes turn by turn and cannot be rescaled as a whole; remove it",
                f".{field}",
            )
            for field, absent in (("normalize", "!self.normalize"), ("clip", "!has(self.clip)"))
        ),
    ),
    "spec.rewards[].model.resources": tuple(_quantities()),
    "spec.algorithm": (
        *_algorithms(),
        Rule(
            "self.promptsPerStep % self.updatesPerStep == 0",
            "must divide promptsPerStep",
            ".updatesPerStep",
        ),
        Rule(
            "self.warmupSteps <= self.totalSteps",
            "at most totalSteps",
            ".warmupSteps",
        ),
        Rule(
            "!has(self.parameters) || !has(self.parameters.criticWarmupSteps) || "
            "self.parameters.criticWarmupSteps < self.totalSteps",
            "below totalSteps",
            ".parameters.criticWarmupSteps",
        ),
        Rule(
            "!has(self.kl.target) || self.kl.horizon >= self.promptsPerStep * self.groupSize",
            "at least promptsPerStep times groupSize",
            ".kl.horizon",
        ),
    ),
    "spec.algorithm.kl": (
        Rule(
            "self.estimator != 'k1' || self.placement != 'loss'",
            "k1 has no gradient as a loss; use k3, or placement: reward",
            ".estimator",
        ),
        Rule(
            "!has(self.target) || double(self.coefficient) > 0.0",
            "needs a coefficient above 0 to start from",
            ".target",
        ),
    ),
    "spec.algorithm.correction": (
        Rule(
            "!self.bypass || (self.type != 'masked-is' && !has(self.sequenceBand) && double(self.veto) == 0.0)",
            CORRECTS_NOTHING,
            ".bypass",
        ),
    ),
    "spec.rollout": (
        Rule(
            "!has(self.autoscale) || self.autoscale.min <= self.autoscale.max",
            "at most autoscale.max",
            ".autoscale.min",
        ),
        Rule(
            "!has(self.autoscale) || self.autoscale.min > self.autoscale.max || "
            "(self.autoscale.min <= self.replicas && self.replicas <= self.autoscale.max)",
            "must lie within autoscale",
            ".replicas",
        ),
        Rule(
            f"!has(self.resources) || {_gpus_are('self.tensorParallelSize')}",
            f"must equal resources.limits {GPU}",
            ".tensorParallelSize",
        ),
    ),
    "spec.rollout.resources": tuple(_quantities()),
    "spec.rollout.template.env[]": _TEMPLATE_VARIABLE,
    "spec.rollout.template.tolerations[]": _TOLERATION,
    "spec.trainer.lora": (Rule(f"!self.targets.matches({_quoted(BARE_LAYERS.pattern)})", NO_ADAPTER, ".targets"),),
    "spec.trainer": (
        Rule(
            f"!has(self.processesPerNode) || !has(self.resources) || {_gpus_are('self.processesPerNode')}",
            f"must equal resources.limits {GPU}",
            ".processesPerNode",
        ),
        Rule(
            "self.modelReplicas < 1 || self.nodes % self.modelReplicas == 0",
            "must divide trainer.nodes: a copy fills whole nodes",
            ".modelReplicas",
        ),
        Rule("self.offload != 'reference' || !has(self.lora)", NO_COPY, ".offload"),
    ),
    "spec.trainer.resources": tuple(_quantities()),
    "spec.trainer.template.env[]": _TEMPLATE_VARIABLE,
    "spec.trainer.template.tolerations[]": _TOLERATION,
    "spec.scheduling.tolerations[]": _TOLERATION,
    "spec.store.uri": (_NO_WAY_UP,),
    "spec.output.uri": (_NO_WAY_UP,),
    "spec.checkpoint.resumeFrom": (_NO_WAY_UP,),
}
"""By place in the schema; [] are the items of a list. The same as `operators.rules`, in its order."""


def _same(path: str) -> str:
    """CEL: the field below spec is what it was, there or not. What stands above it always is there."""
    above, _, field = f".{path}".rpartition(".")
    new, old = f"self{above}", f"oldSelf{above}"
    alike = f"has({new}.{field}) == has({old}.{field})"
    return f"({alike} && (!has({new}.{field}) || {new}.{field} == {old}.{field}))"


def _edits() -> Iterator[Rule]:
    for name, (effect, why) in TABLE.items():
        path = name.removeprefix("spec.")
        if effect == REFUSED:
            yield Rule(_same(path), f"cannot change: {why}", f".{path}")
        if effect == SUSPENDED:
            remedy = "changes only while the job is suspended; set suspend: true first"
            yield Rule(f"oldSelf.suspend || {_same(path)}", remedy, f".{path}")


EDITS: dict[str, tuple[Rule, ...]] = {
    "": (
        Rule(
            "!has(oldSelf.status) || !has(oldSelf.status.startTime) || "
            "(has(self.spec.trainer.lora) == has(oldSelf.spec.trainer.lora) && (!has(self.spec.trainer.lora) || "
            "(self.spec.trainer.lora.rank == oldSelf.spec.trainer.lora.rank && "
            "self.spec.trainer.lora.targets == oldSelf.spec.trainer.lora.targets)))",
            "cannot change once the job has started, but for alpha: its checkpoints hold this adapter",
            ".spec.trainer.lora",
        ),
    ),
    "spec": tuple(_edits()),
}
"""What an edit may not do, from the table in `operators.edits`."""


_ONLY_A_GENERATOR_HAS_PARAMETERS = {
    "anyOf": [{"required": ["generator"]}, {"properties": {"parameters": {"maxProperties": 0}}}]
}
_SEED = {"description": "Refused: data.seed is that of all sets.", "x-kubernetes-int-or-string": True}
_NO_SEED: Node = {"properties": {"seed": _SEED}}
SHAPES: dict[str, Node] = {
    f"spec.{part}.sets[]{below}": shape
    for part in ("data", "evaluation")
    for below, shape in (("", _ONLY_A_GENERATOR_HAS_PARAMETERS), (".parameters", _NO_SEED))
}
"""What is added to the schema for rules that CEL cannot tell, since parameters have no type."""
