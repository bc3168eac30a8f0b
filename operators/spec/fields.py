"""What the fields of an RLJob are made of: bounded types that a CRD can express, each with a remedy for wrong values.

Kubernetes' conventions hold: no floats (a rate is a patterned string), every string and list is bounded,
durations are whole seconds, a closed choice is an enum. Values are never converted: "8" is not a number.
What a type alone cannot say to `operators.schema` (remedies, what works only in a cluster) travels in its JSON schema.
"""

import decimal
import re
from collections.abc import Iterable
from typing import Annotated, Any

import pydantic
from pydantic.alias_generators import to_camel
from pydantic_core import core_schema

from pipeline.algorithms.registry import OFF_OR_ABOVE_1, SHARES


class Model(pydantic.BaseModel):
    """One object of the resource: camelCase keys, none of them unknown, the text under each field its documentation.

    A known key without a value (null) counts as absent, as it does for the API server.
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {field.alias for field in cls.model_fields.values()}
        return {key: value for key, value in data.items() if value is not None or key not in known}


def cluster_only(instead: str, *, harmless: bool = False) -> Any:
    """Marks a field that the operator acts on in a cluster and `miles run` does not.

    `instead` says in a clause what happens without it; `harmless`: a run goes on all the same, with a warning.
    """
    mark: Any = {"instead": instead, "harmless": harmless}
    return pydantic.Field(json_schema_extra={"clusterOnly": mark})


class OneOf:
    """A closed choice of strings that other modules define; the annotation for what Literal cannot compute."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.literal_schema(self._names)


def text(longest: int, pattern: str | None = None, remedy: str | None = None, shortest: int = 1) -> Any:
    """Bounds of a string; `pattern` must match all of it, `remedy` says what to write where it does not."""
    return pydantic.Field(
        min_length=shortest,
        max_length=longest,
        pattern=pattern and f"^({pattern})$",
        json_schema_extra={"remedy": remedy} if remedy else None,
    )


class Between:
    """Bounds of a rate; its JSON schema carries them as {between: {low, high, above, off, remedy}}."""

    def __init__(self, low: float, high: float, above: bool = False, off: bool = False) -> None:
        """`above`: `low` itself is refused; `off`: 0 is not, wherever `low` lies."""
        limits = f"{'0, or ' if off else ''}{'above' if above else 'at least'} {low:g} and at most {high:g}"
        self.low, self.high, self.above, self.off, self.remedy = low, high, above, off, f"must be {limits}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, made: core_schema.CoreSchema, handler: Any) -> dict[str, Any]:
        node: dict[str, Any] = handler(made)
        return node | {"between": vars(self)}

    def check(self, rate: str) -> str:
        value = float(rate)
        if self.off and value == 0:
            return rate
        if not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError(self.remedy)
        return rate


_RATE = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,3})?"
Rate = Annotated[str, text(32, _RATE, 'write a decimal number in quotes, such as "0.5" or "1e-6"')]
SignedRate = Annotated[str, text(32, f"-?{_RATE}", 'write a decimal number in quotes, such as "0.5" or "-0.1"')]


OWN_COUNT = 1_000_000
"""Largest number among an algorithm's own parameters."""


def own_rate(name: str) -> Between:
    """Bounds of a rate among an algorithm's own parameters."""
    if name in OFF_OR_ABOVE_1:
        return Between(1, OWN_COUNT, above=True, off=True)
    return Between(0, 1 if name in SHARES else OWN_COUNT)


def is_rate(value: str) -> bool:
    return re.fullmatch(_RATE, value) is not None and len(value) <= 32


Name = Annotated[str, text(32, "[a-z0-9]([-a-z0-9]*[a-z0-9])?", "use lower-case letters, digits and inner dashes")]
ObjectName = Annotated[
    str, text(253, "[a-z0-9]([-.a-z0-9]*[a-z0-9])?", "write the name of an object in the job's own namespace")
]
ColumnName = Annotated[str, text(128)]
Image = Annotated[
    str, text(512, "[A-Za-z0-9][-A-Za-z0-9._:/@]*", "write an image reference, such as registry/name:tag")
]

# No quotes, control or shell characters: a URI is data and never becomes part of a command or an option.
_KEY = r"[-A-Za-z0-9._~/%+=,@:]*"
_S3 = rf"s3://[a-z0-9][-a-z0-9.]{{1,61}}[a-z0-9](/{_KEY})?"
_FILE = r"file://\.{0,2}/[-A-Za-z0-9._~/%+=,@: ]*"
_HUB = r"hf://[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*"
_WEB = rf"https?://[A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]{{1,5}})?(/{_KEY})?"
_LOCAL = "file:///path (file://./path starts at the folder of the spec's own file)"
ModelUri = Annotated[
    str, text(1024, f"{_HUB}|{_S3}|{_FILE}", f"write hf://organisation/name, s3://bucket/key or {_LOCAL}")
]
StoreUri = Annotated[str, text(1024, f"{_S3}|{_FILE}", f"write s3://bucket/prefix or {_LOCAL}")]
DataUri = Annotated[str, text(1024, f"{_S3}|{_FILE}|{_WEB}", f"write s3://bucket/key, https://host/path or {_LOCAL}")]
Url = Annotated[str, text(1024, _WEB, "write an http:// or https:// URL")]

_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
ResourceName = Annotated[
    str,
    text(
        253,
        rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_DOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
        "write cpu, memory, ephemeral-storage, or a device with its domain, such as nvidia.com/gpu",
    ),
]


def _key(letters: str) -> tuple[Any, ...]:
    """A key of labels or annotations, with `letters` in the domain before its slash."""
    part = f"[{letters}]([-{letters}]*[{letters}])?"
    name = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    remedy = "keys are at most 63 letters, digits, '-', '_' and '.', after an optional domain and '/'"
    return (text(317, rf"({part}(\.{part})*/)?{name}", remedy),)


LabelKey = Annotated[str, *_key("a-z0-9")]
AnnotationKey = Annotated[str, *_key("A-Za-z0-9")]
LabelValue = Annotated[
    str,
    text(
        63,
        "([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?",
        "label values are letters, digits, '-', '_' and '.'",
        shortest=0,
    ),
]


def _without_empty(value: Any) -> Any:
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


WITHOUT_NULLS = pydantic.BeforeValidator(_without_empty)
"""A map's entries without a value count as absent, as they do for the API server."""


def _with_empty(value: Any) -> Any:
    return {key: "" if item is None else item for key, item in value.items()} if isinstance(value, dict) else value


NULLS_EMPTY = pydantic.BeforeValidator(_with_empty)
"""Labels and annotations without a value are empty ones, as the API server reads them."""
Parameters = Annotated[dict[str, Any], pydantic.Field(max_length=64)]

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def _quantity(value: Any) -> Any:
    if type(value) is int and 0 <= value < 2**63:
        return value
    if not isinstance(value, str) or not re.fullmatch(_QUANTITY, value) or "\n" in value or len(value) > 32:
        raise ValueError("write a quantity, such as 2, 500m or 16Gi")
    return value


SUFFIXES = {"m": "1e-3", "k": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15"} | {
    f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTP", 1)
}


def amount(quantity: int | str) -> decimal.Decimal | None:
    """What a quantity means; None: it is none."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mkMGTP]|[KMGTP]i)?", str(quantity))
    return None if match is None else decimal.Decimal(match[1]) * decimal.Decimal(SUFFIXES.get(match[2], "1"))


Quantity = Annotated[
    int | str,
    pydantic.BeforeValidator(_quantity),
    pydantic.WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY, "maxLength": 32, "minimum": 0}),
]
