"""Types of single values in a pipeline: what each accepts, and what it says when it does not.

Each check has its twin in the JSON Schema (a pattern or a bound), and the tests feed both the same files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    GetPydanticSchema,
    Tag,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from mlpipe._core.gate import GATE_PATTERN, parse_gate
from mlpipe._core.gate import NAME_PATTERN as METRIC_PATTERN
from mlpipe._core.ids import BUCKET_PATTERN, BUCKET_RULE, NAME_PATTERN, NO_FOLDER_PATTERN, is_bucket, is_name
from mlpipe._core.units import parse_bytes, parse_cadence, parse_seconds
from mlpipe.spec.problems import closest
from mlpipe.spec.tree import Ambiguous


def _checked(schema: CoreSchema, **twin: Any) -> GetPydanticSchema:
    """Of single values: `schema` checks them, `twin` is what the JSON Schema says of it besides. Pydantic's
    Field and AfterValidator would be looked into for each key, which takes a hundredth of a command."""
    return GetPydanticSchema(
        lambda source, handler: {**schema},  # pydantic adds to it
        lambda core, handler: {**handler(core), **twin},
    )


def wrong(message: str, hint: str) -> PydanticCustomError:
    """A mistake that pydantic reports with a hint."""
    return PydanticCustomError("mlpipe", "{what}", {"what": message, "hint": hint})


def name_or_settings(
    what: str,
    names: Sequence[str],
    models: Mapping[str, type[BaseModel]],
    *,
    alone: str = "{}",
    several: str = "keep one of them",
) -> Any:
    """The type of a value that is one of `names`, or, of those that `models` has, a mapping of one to its
    settings. `what` it is, with its article; in hints: how a name is written `alone`, what to do with
    `several`."""

    def check(value: Any) -> Any:
        written = [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []
        for name in written:
            if name not in names:
                raise wrong(f"unknown {what.split()[-1]} {str(name)!r}", closest(str(name), names))
        if isinstance(value, dict) and len(written) != 1:
            raise wrong(f"{what} is one name", several)
        if isinstance(value, dict) and written[0] not in models:
            raise wrong(f"{written[0]} has no settings", f"write the name alone: {alone.format(*written)}")
        return value

    def tag(value: Any) -> str:
        if isinstance(value, dict):
            return next((models[name].__name__ for name in value if name in models), "name")
        return type(value).__name__ if isinstance(value, BaseModel) else "name"

    tagged = [Annotated[model, Tag(model.__name__)] for model in models.values()]
    name: Any = Annotated[Literal[tuple(names)], Tag("name")]
    return Annotated[Union[(name, *tagged)], Discriminator(tag), BeforeValidator(check)]


def by_key(**models: type[BaseModel]) -> Discriminator:
    """Which of the `models` checks a mapping: the first whose key stands there, else the last."""
    last = list(models.values())[-1]

    def choose(value: Any) -> str:
        if isinstance(value, BaseModel):
            return type(value).__name__
        keys = value if isinstance(value, dict) else {}
        return next((model for key, model in models.items() if key in keys), last).__name__

    return Discriminator(choose)


def _unambiguous(value: Any) -> Any:
    if isinstance(value, Ambiguous):
        raise wrong(value.message, value.hint)
    return value


def _json(value: Any) -> Any:
    """Of `args`: whatever JSON can say."""
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return _unambiguous(value)


def _matches(pattern: str, what: str, hint: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:  # compiled when it is needed first
            raise wrong(f"{text!r} is not {what}", hint)
        return text

    return check


def _parses(parse: Callable[[str], Any], above: float | None = None) -> Callable[[str], str]:
    def check(text: str) -> str:
        if len(text) > MAX_QUANTITY:
            raise wrong(f"{text[:MAX_QUANTITY]!r}... is too long", "write fewer digits")
        try:
            value = parse(text)
        except ValueError as error:
            message, _, hint = str(error).partition("; ")
            raise wrong(message, hint or "write a number and a unit") from None
        if above is not None and value <= above:
            raise wrong(f"{text!r} is nothing", "write more than 0")
        return text

    return check


def _text(check: Callable[[str], str], pattern: str, **twin: int) -> GetPydanticSchema:
    """Of text that `check` takes, which is what matches `pattern`."""
    checked = core_schema.no_info_after_validator_function(check, _TEXT)
    return _checked(checked, pattern=f"^(?:{pattern})$", **twin)


def _like(pattern: str, what: str, hint: str) -> GetPydanticSchema:
    return _text(_matches(pattern, what, hint), pattern)


def _matching(pattern: str, what: str, hint: str) -> Any:
    return Annotated[str, _like(pattern, what, hint)]


def _quantity(parse: Callable[[str], str], example: str, pattern: str) -> GetPydanticSchema:
    """Of text of a number and its unit, like `example`, which `parse` takes."""

    def with_unit(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise wrong(f"{value!r} has no unit", f"write like {example}")
        return _unambiguous(value)

    parsed = core_schema.no_info_after_validator_function(parse, core_schema.str_schema())
    checked = core_schema.no_info_before_validator_function(with_unit, parsed)
    return _checked(checked, pattern=f"^(?:{pattern})$", maxLength=MAX_QUANTITY)


def _int(least: int, most: int) -> GetPydanticSchema:
    return _checked(core_schema.int_schema(ge=least, le=most))


def _float(**bounds: Any) -> GetPydanticSchema:
    return _checked(core_schema.float_schema(**bounds))


MAX_QUANTITY = 64
_NUMBER = r"\s*(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?\s*"
_STEPS = r"\s*0*[1-9][0-9]*\s*steps?\s*"
ENV_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*"
ENTRY_PATTERN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
IMAGE_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}"
STORE_PATTERN = (
    rf"s3://{BUCKET_PATTERN}(/[A-Za-z0-9._=-]+)*/?|file:///[^{{}}]*|(?!{NO_FOLDER_PATTERN})[^{{}}]+"
)

_TEXT = core_schema.no_info_before_validator_function(_unambiguous, core_schema.str_schema())
Text = Annotated[str, _checked(_TEXT)]
_JSON = core_schema.no_info_before_validator_function(_json, core_schema.any_schema())
Json = Annotated[Any, _checked(_JSON)]


def _name(text: str) -> str:
    if not is_name(text):
        raise wrong(
            f"{text!r} is not a name",
            "write 1 to 63 of a-z, 0-9, '.', '_', '-', starting with a letter or digit",
        )
    return text


_is_store = _matches(STORE_PATTERN, "a store", "write a folder like './runs', or 's3://bucket/prefix'")


def _store(text: str) -> str:
    bucket = text.removeprefix("s3://").partition("/")[0]
    if text.startswith("s3://") and not is_bucket(bucket):
        raise wrong(f"{text!r} names no bucket", f"write 's3://bucket/prefix'; {BUCKET_RULE}")
    return _is_store(text)


Name = Annotated[str, _text(_name, NAME_PATTERN)]
EnvName = Annotated[
    str,
    _like(ENV_PATTERN, "a name of an environment variable", "write letters, digits and '_', like MY_FLAG"),
]
EntryPath = Annotated[
    str, _like(ENTRY_PATTERN, "an import path", "write like 'my_package.my_module:build_model'")
]
Image = Annotated[
    str, _like(IMAGE_PATTERN, "an image reference", "write like 'registry.example.com/team/mlpipe:1.4'")
]
Program = Annotated[str, _like(r"\S(.*\S)?", "a program", "write its name or its path, like 'python3'")]
StoreUrl = Annotated[str, _text(_store, STORE_PATTERN)]
_BYTES = _NUMBER + r"(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)\s*"
Size = Annotated[str, _quantity(_parses(parse_bytes, above=0), "'30 GiB'", _BYTES)]
SizeOrAuto = Annotated[
    str,
    _quantity(
        _parses(lambda text: 1 if text == "auto" else parse_bytes(text), above=0),
        "'8 MiB', or auto",
        rf"{_BYTES}|auto",
    ),
]
_SECONDS = _NUMBER + r"(ms|s|min|h|d)\s*"
Duration = Annotated[str, _quantity(_parses(parse_seconds, above=0), "'15 min'", _SECONDS)]
Every = Annotated[str, _quantity(_parses(parse_cadence), "'100 steps' or '15 min'", rf"{_STEPS}|{_SECONDS}")]


def _steps(text: str) -> str:
    if parse_cadence(text).steps is None:
        raise ValueError(f"{text!r} is a time; write a number of steps, like '200 steps'")
    return text


Steps = Annotated[str, _quantity(_parses(_steps), "'200 steps'", _STEPS)]

# What Kubernetes takes: apimachinery's util/validation, which the API server runs on the same values.
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*"
_QUALIFIED = (
    rf"(?:(?=[^/]{{1,253}}/){_LABEL}(?:\.{_LABEL})*/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
)
_PATH = r"(?:/(?!\.\.?(?:/|$))[^/:\x00-\x1f]+)+"
_LABEL_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"

DnsLabel = _matching(_LABEL, "a DNS label", "write 1 to 63 of a-z, 0-9 and '-', like 'team-a'")
ObjectName = _matching(
    _SUBDOMAIN,
    "a name in Kubernetes",
    "write a-z, 0-9, '-' and '.', starting and ending with one of the first two",
)
QueueName = _matching(  # stands in a label, too
    rf"(?=.{{1,63}}$){_LABEL}(?:\.{_LABEL})*",
    "a queue",
    "write 1 to 63 of a-z, 0-9, '-' and '.', like 'team-a'",
)
LabelKey = _matching(_QUALIFIED, "a label key", "write like 'example.com/rack'")
LabelValue = _matching(_LABEL_VALUE, "a label value", "write up to 63 letters, digits, '-', '_' and '.'")
DataKey = _matching(
    r"[-._A-Za-z0-9]{1,253}", "a key of a Secret or ConfigMap", "write letters, digits, '-', '_', '.'"
)
ResourceName = _matching(
    rf"(?=[^/]{{1,253}}/){_LABEL}(?:\.{_LABEL})*/[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
    "an extended resource",
    "write like 'rdma/hca'",
)
# Of a network's profile, which a platform hands to all of its users.
_OF_NETWORKS = "write it in the pipeline file, under 'network', where whoever submits sees it"
NetworkEnv = _matching(
    r"(?:TORCH_NCCL|NCCL|RCCL|GLOO|FI|OFI|UCX|UCC|RDMAV|IBV|MLX[45]|PSM[23])_[A-Z0-9_]+|LD_LIBRARY_PATH",
    "a variable of networks",
    _OF_NETWORKS,
)
NetworkAnnotation = _matching(
    r"(?:k8s\.v1\.cni\.cncf\.io|v1\.multus-cni\.io|networking\.gke\.io|cni\.projectcalico\.org|k8s\.ovn\.org"
    r"|ovn\.kubernetes\.io|network\.alibabacloud\.com|network\.openshift\.io)/[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    "an annotation of networks",
    _OF_NETWORKS,
)
NetworkResource = _matching(
    rf"(?!(?:nvidia\.com/(?:gpu|mig)|amd\.com/gpu|gpu\.intel\.com/))(?=[^/]{{1,253}}/){_LABEL}(?:\.{_LABEL})*"
    r"/[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    "a device of networks",
    "write like 'rdma/hca'",
)
MountPath = _matching(_PATH, "an absolute path", "write like '/data', without '..' and ':'")
# of a container's mounts, which stand in one word with commas between them
ListedPath = _matching(
    _PATH.replace("/:", "/:,"), "an absolute path", "write like '/data', without '..', ':' and ','"
)
SubPath = _matching(
    r"(?!\.\.?(?:/|$))[^/:\x00-\x1f]+(?:/(?!\.\.?(?:/|$))[^/:\x00-\x1f]+)*",
    "a path inside a volume",
    "write like 'team/data', without '..'",
)
# What stands in a line `#SBATCH --option=value`, where nothing is quoted.
SlurmName = _matching(
    r"[A-Za-z0-9][A-Za-z0-9_.,:@%+/-]{0,127}",
    "a name in Slurm",
    "write letters, digits, '_', '-', '.', ','",
)
SlurmConstraint = _matching(
    r"[A-Za-z0-9_.&|*,()\[\]-]{1,255}",
    "a constraint",
    "write features like 'a100&nvlink', without blanks",
)
SbatchOption = _matching(r"[a-z][a-z0-9-]{1,40}", "an option of sbatch", "write its long name without '--'")
HttpUrl = _matching(
    r"https?://[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?(?:/[!-z|~]*)?",
    "a URL",
    "write like 'http://minio.storage:9000'",
)
Arn = _matching(r"arn:[!-z|~]{1,2043}", "an ARN", "write like 'arn:aws:iam::123456789012:role/mlpipe-worker'")
Audience = _matching(r"[!-z|~]{1,253}", "an audience", "write like 'sts.amazonaws.com'")
WeightsPath = _matching(
    r"(?![^\n]*\.(?:pt|pth|bin|ckpt|pkl|pickle)$)[^\n]+",
    "a file that mlpipe reads: a pickle runs the code that it holds",
    "write it as safetensors where you trust it: safetensors.torch.save_file(torch.load(FILE, "
    "weights_only=True), 'model.safetensors')",
)
Revision = _matching(
    r"(?!.*\.\.)[A-Za-z0-9_](?:[A-Za-z0-9._/-]{0,253}[A-Za-z0-9_-])?",
    "a revision",
    "write a commit, a branch or a tag, like 'main'",
)
ModelVersion = _matching(
    rf"{NAME_PATTERN}(?:@{NAME_PATTERN}|/[0-9]+)",
    "a version of a model",
    "write like 'stdlib-lm@production' or 'stdlib-lm/3'",
)
MetricName = _matching(METRIC_PATTERN, "a name of a metric", "write letters, digits and '_', like top_five")
GateText = Annotated[str, _text(_parses(parse_gate), GATE_PATTERN, maxLength=MAX_QUANTITY)]

# Bounds that no one meets, so that arithmetic on nonsense ends.
Count = Annotated[int, _int(1, 10**12)]
CountOrZero = Annotated[int, _int(0, 10**12)]
HundredAtMost = Annotated[int, _int(1, 100)]
FewCount = Annotated[int, _int(1, 100_000)]
FewOrZero = Annotated[int, _int(0, 100_000)]
_NODES = r"0*[1-9][0-9]{0,4}\.\.0*[1-9][0-9]{0,4}"


def is_range(nodes: Any) -> bool:
    """Whether it is meant as one."""
    return isinstance(nodes, str) and ".." in nodes


def limits_of(nodes: str) -> tuple[int, int] | None:
    """The fewest and the most of a range like `2..8`; None for what is none."""
    if re.fullmatch(_NODES, nodes) is None:
        return None
    fewest, most = nodes.split("..")
    return int(fewest), int(most)


NodeRange = Annotated[
    str, _like(_NODES, "a range of nodes", "write the fewest, 1 at least, and the most, like 2..8")
]
Nodes = Annotated[
    Annotated[FewCount, Tag("number")] | Annotated[NodeRange, Tag("range")],
    Discriminator(lambda value: "range" if is_range(value) else "number"),
]
CountOrAuto = Count | Literal["auto"]
CountOrFill = Count | Literal["fill"]
Workers = Annotated[int, _int(0, 1_000)] | Literal["auto"]
Port = Annotated[int, _int(0, 65_535)]
Cpus = Annotated[float, _float(ge=0.1, le=100_000)]
Positive = Annotated[float, _float(gt=0)]
Weight = Annotated[float, _float(ge=0.001, le=1_000_000)]
NotNegative = Annotated[float, _float(ge=0)]
PositiveRatio = Annotated[float, _float(gt=0, le=1)]
Ratio = Annotated[float, _float(ge=0, le=1)]
BelowOne = Annotated[float, _float(ge=0, lt=1)]

# What is said of keys that stand in several mappings.
TOKENS = (
    "The folder, usually `{{stages.NAME.output}}`, or `s3://bucket/prefix` with what "
    "`mlpipe-corpus --shard` has written."
)
CACHE = "Of what lies in a bucket: disk of each node for copies of its files, 20 GiB by default."
WEIGHT = "Its share of the samples, beside those of the others."
PREFER = "Labels of the nodes to take first, such as a spot pool's; others where these have no room."
