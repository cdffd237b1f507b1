"""The `data` of a training: where its samples come from, and how many make a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Discriminator, Field, Tag

from mlpipe._core.units import format_bytes, parse_bytes
from mlpipe.spec import fields as f
from mlpipe.spec import placeholders
from mlpipe.spec.base import SpecModel, one_of
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, items_of, problem_of_key, text_of

BUCKET, DEFAULT_CACHE = "s3://", "20 GiB"
_KEYS = ("tokens", "parquet", "tars", "chat", "validation", "tokenizer", "template")
_PATHS = tuple((key,) for key in _KEYS)
FILES = ("parquet", "tars")  # formats of files that are read as they are
_TOKENS = (
    "The folder, usually `{{stages.NAME.output}}`, or `s3://bucket/prefix` with what "
    "`mlpipe-corpus --shard` has written."
)
_CACHE = "Of what lies in a bucket: disk of each node for copies of its files, 20 GiB by default."


class TokenData(SpecModel):
    """A folder of token files, as `mlpipe-corpus` writes it."""

    model_config = ConfigDict(json_schema_extra=one_of("batch_tokens", "batch_size"))

    tokens: f.Text = Field(description=_TOKENS)
    cache: f.Size | None = Field(None, description=_CACHE)
    batch_tokens: f.Count | None = Field(
        None, description="Tokens in a step, over all workers: a multiple of `seq_len`."
    )
    batch_size: f.Count | None = Field(
        None, description="Sequences in a step, over all workers; instead of `batch_tokens`."
    )
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Sequences in one forward pass of one worker; `auto`: the fastest that fits."
    )


class _Read(SpecModel):
    """How samples of one's own are made a batch, and by whom."""

    collate: f.EntryPath | None = Field(
        None,
        description="`package.module:function` of yours that makes a batch, a dict of tensors, of a list of "
        "samples, which then may be anything. Default: they are stacked.",
    )
    workers: f.Workers = Field(
        0,
        description="Processes of each worker of the training that read samples ahead, beside it. `auto`: "
        "none at first, and more while the training waits for data.",
    )
    batch_size: f.Count = Field(description="Samples in a step, over all workers.")
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Samples in one forward pass of one worker; `auto`: the fastest that fits."
    )


class _Own(SpecModel):
    entry: f.EntryPath = Field(
        description="`package.module:function`, called with `args` and `split` "
        "(`train` or `validation`); the result has `len()` and `[i] -> dict of tensors`, or can be iterated "
        "over."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")


class _Splits(SpecModel):
    splits: f.FewCount = Field(
        1,
        description="Of a set that can only be iterated over: parts into which it is cut, each read by one "
        "worker of the training; `batch_size` is a multiple of it. 1: each reads all and keeps its share.",
    )


class OwnData(_Read, _Splits, _Own):
    """A function of yours that returns a data set, map-style or one to iterate over."""

    packing: Literal["off", "best_fit", "balanced"] | None = Field(
        None,
        description="Of a map-style set with `length(i)` or `lengths`, whose samples differ in length: as of "
        "conversations. Left out: all samples are alike.",
    )


class _Weighted(SpecModel):
    weight: f.Weight = Field(1.0, description="Its share of the samples, beside those of the others.")


class TokenSource(_Weighted, SpecModel):
    """A folder of token files, in a mixture."""

    tokens: f.Text = Field(description=_TOKENS)
    cache: f.Size | None = Field(None, description=_CACHE)


class OwnSource(_Weighted, _Own):
    """A data set of your own, in a mixture."""


class _Files(SpecModel):
    validation: f.Text | None = Field(
        None, description="The held-out files, in the same way; without them nothing is validated with."
    )
    columns: dict[f.Text, f.Text] | None = Field(
        None,
        description="What of a row is in a sample: by the sample's key the column, of tars the extension. "
        "Default: all, as they are called.",
    )
    tokenizer: f.Text | None = Field(
        None,
        description="For text: a `tokenizer.json` or its folder, usually `{{stages.NAME.output}}` of "
        "`mlpipe-corpus`. Text is cut or padded to `seq_len` tokens.",
    )
    cache: f.Size | None = Field(None, description=_CACHE)

    @property
    def format(self) -> Literal["parquet", "tars"]:
        return "parquet" if "parquet" in type(self).model_fields else "tars"

    @property
    def path(self) -> str:
        """As written."""
        return cast(str, getattr(self, self.format))


class _Parquet(_Files):
    parquet: f.Text = Field(
        description="A file, a folder, or a pattern like `data/train-*.parquet`; or in a bucket, `s3://...`."
    )


class _Tars(_Files):
    tars: f.Text = Field(
        description="A tar of samples, a folder, or a pattern like `data/train-*.tar`; or in a bucket, `s3://...`."
    )


class ParquetData(_Read, _Parquet):
    """Rows of Parquet files."""


class TarsData(_Read, _Tars):
    """Tars as WebDataset has them: files of one name and several extensions are a sample."""


class ChatFile(_Weighted, SpecModel):
    """A file of conversations, in a mixture."""

    path: f.Text = Field(description="The file, as of `chat`.")


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list | tuple) else "one"


class ChatData(SpecModel):
    """JSON lines of conversations, of which the assistant's part is learnt."""

    chat: Annotated[
        Annotated[f.Text, Tag("one")]
        | Annotated[tuple[ChatFile, ...], Field(strict=False, min_length=1), Tag("several")],
        Discriminator(_one_or_several),
    ] = Field(
        description="A file of JSON lines: `messages`, each with `role` and `content`; `prompt` and "
        "`completion`; or `text`. Or several with a `weight` each, which are mixed."
    )
    validation: f.Text | None = Field(
        None, description="The held-out file, in the same way; without it nothing is validated with."
    )
    tokenizer: f.Text | None = Field(
        None,
        description="A model's folder as Hugging Face has it, with `tokenizer.json` and its chat template; "
        "or a `tokenizer.json` alone, as in `{{stages.NAME.output}}` of `mlpipe-corpus`. "
        "Default: the folder of `model.pretrained`.",
    )
    packing: Literal["auto", "off", "best_fit", "balanced"] = Field(
        "auto",
        description="`balanced`: several samples in a row, so that workers have equal work; `best_fit`: as "
        "few rows as it takes; `off`: a sample a row, padded. `auto`: `off` for your own "
        "models, else `balanced`.",
    )
    template: f.Text | None = Field(
        None, description="Of conversations: a Jinja file, or `chatml`. Default: the tokenizer's folder's."
    )
    batch_size: f.Count = Field(description="Samples in a step, over all workers.")
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Samples in one forward pass of one worker; `auto`: the fastest that fits."
    )

    @property
    def files(self) -> tuple[ChatFile, ...]:
        """One, or those that are mixed."""
        return (ChatFile(path=self.chat, weight=1.0),) if isinstance(self.chat, str) else self.chat


class ParquetSource(_Weighted, _Parquet):
    """Rows of Parquet files, in a mixture."""


class TarsSource(_Weighted, _Tars):
    """Tars of samples, in a mixture."""


def _by_key(**models: type[SpecModel]) -> Discriminator:
    """Which of the `models` checks a mapping: the first whose key stands there, else the last."""
    last = list(models.values())[-1]

    def choose(value: Any) -> str:
        if isinstance(value, SpecModel):
            return type(value).__name__
        keys = value if isinstance(value, dict) else {}
        return next((model for key, model in models.items() if key in keys), last).__name__

    return Discriminator(choose)


AnySource = Annotated[
    Annotated[TokenSource, Tag("TokenSource")]
    | Annotated[OwnSource, Tag("OwnSource")]
    | Annotated[ParquetSource, Tag("ParquetSource")]
    | Annotated[TarsSource, Tag("TarsSource")],
    _by_key(entry=OwnSource, parquet=ParquetSource, tars=TarsSource, tokens=TokenSource),
]


class MixData(_Read):
    """Several sources, of which each gives its share of the samples. All samples are alike in keys and
    shapes; those of tokens have `inputs` and `targets`."""

    mix: tuple[AnySource, ...] = Field(
        strict=False,
        min_length=1,
        description="The sources: `tokens`, `parquet`, `tars` or an `entry` each, with a `weight`.",
    )


AnyData = Annotated[
    Annotated[TokenData, Tag("TokenData")]
    | Annotated[OwnData, Tag("OwnData")]
    | Annotated[ParquetData, Tag("ParquetData")]
    | Annotated[TarsData, Tag("TarsData")]
    | Annotated[ChatData, Tag("ChatData")]
    | Annotated[MixData, Tag("MixData")],
    _by_key(mix=MixData, entry=OwnData, parquet=ParquetData, tars=TarsData, chat=ChatData, tokens=TokenData),
]
OneSource = TokenData | OwnData | ParquetData | TarsData
Files = ParquetData | TarsData | ParquetSource | TarsSource


def cache_bytes(data: OneSource | MixData | ChatData) -> int:
    """On the disk of each node, for copies of what lies in buckets."""
    if isinstance(data, ChatData):
        return 0
    sources = data.mix if isinstance(data, MixData) else (data,)
    return sum(
        parse_bytes(source.cache or DEFAULT_CACHE)
        for source in sources
        if not isinstance(source, OwnData | OwnSource) and _place(source).startswith(BUCKET)
    )


def _place(source: Files | TokenData | TokenSource) -> str:
    return source.tokens if isinstance(source, TokenData | TokenSource) else source.path


def problems(train: Node) -> Iterator[Problem]:
    """Rules between the keys of `data`, and between them and the model's."""
    data = get(train, "data")
    if data is None or not isinstance(data.value, dict):
        return
    if get(data, "chat") is not None or get(data, "packing") is not None:
        from mlpipe.spec import uneven_data  # whoever has none imports none

        yield from uneven_data.problems(train)
    yield from _one_source(data, "data", ("mix", "entry", "chat", *FILES, "tokens"))
    for source in items_of(data, "mix"):
        if (conversations := get(source, "chat")) is not None:
            yield problem_of_key(
                conversations,
                "conversations are not mixed with other data: a mixture's samples have one shape",
                "mix them with each other: 'data: {chat: [{path: ..., weight: 3}, {path: ...}]}'",
            )
        elif isinstance(source.value, dict):
            yield from _one_source(source, "a source of the mixture", ("entry", *FILES, "tokens"))
    if not any(get(data, key) is not None for key in ("entry", "mix", "chat", *FILES)):
        yield from _batch(train, data)
    yield from _divided(data)
    sources = (data, *items_of(data, "mix"))
    for source in sources:
        yield from _cached(source)
        yield from _vocabulary(train, source)
        yield from _held_out(train, source)
    reads_tokens = any(get(one, key) is not None for one in sources for key in ("tokens", "tokenizer"))
    if get(train, "model", "entry") is not None and get(train, "model", "seq_len") is None and reads_tokens:
        yield problem_of_key(
            train.value["model"],
            "a model fed with tokens needs their number in a sample",
            "add 'seq_len: 512'",
        )


def disk_problems(stage: Node) -> Iterator[Problem]:
    """Of a stage whose pods have less disk than the copies take."""
    disk, data = get(stage, "resources", "disk"), get(stage, "train", "data")
    if disk is None or data is None:
        return
    try:
        caches = [
            parse_bytes(text_of(get(source, "cache")) or DEFAULT_CACHE)
            for source in (data, *items_of(data, "mix"))
            if _place_of(source).startswith(BUCKET)
        ]
        room = parse_bytes(text_of(disk) or "")
    except ValueError:
        return  # reported where it stands
    if room < sum(caches):
        needed = format_bytes(sum(caches))
        yield problem_of_key(
            disk, f"copies of what lies in buckets may take {needed}", "write more, or a smaller data.cache"
        )


def _one_source(data: Node, what: str, keys: tuple[str, ...]) -> Iterator[Problem]:
    present = [key for key in keys if key in data.value]
    if len(present) > 1:
        yield problem_of_key(
            data.value[present[-1]], f"{what} has both {present[0]!r} and {present[1]!r}", "keep one of them"
        )
    if not present:
        names = [repr(key) for key in reversed(keys)]
        yield problem_of_key(
            data,
            f"{what} has neither {', '.join(names[:-1])} nor {names[-1]}",
            f"add '{keys[-1]}: ...' or 'entry: ...'",
        )


def _batch(train: Node, data: Node) -> Iterator[Problem]:
    tokens, sequences = get(data, "batch_tokens"), get(data, "batch_size")
    seq_len = get(train, "model", "seq_len")
    if tokens is not None and sequences is not None:
        yield problem_of_key(sequences, "batch_size and batch_tokens say the same thing", "keep one of them")
    if tokens is None and sequences is None and get(data, "tokens") is not None:
        yield problem_of_key(
            data, "the batch has no size", "add 'batch_size: 32' (sequences) or batch_tokens"
        )
    if tokens is not None and seq_len is not None and is_positive(tokens) and is_positive(seq_len):
        rest = tokens.value % seq_len.value
        if rest:
            nearest = max(1, round(tokens.value / seq_len.value)) * seq_len.value
            yield problem_of_key(
                tokens,
                f"batch_tokens {tokens.value} is not a multiple of seq_len {seq_len.value}",
                f"write {nearest}",
            )


def _place_of(source: Node) -> str:
    """Path or URL, as written; nothing of a source that has none."""
    return next((text for key in ("tokens", *FILES) if (text := text_of(get(source, key)))), "")


def _cached(source: Node) -> Iterator[Problem]:
    place, cache = _place_of(source), get(source, "cache")
    if cache is not None and place and not place.startswith(BUCKET) and not placeholders.names(place):
        key = next(key for key in ("tokens", *FILES) if get(source, key) is not None)
        yield problem_of_key(
            cache, "cache is for what lies in a bucket", f"remove it, or write {key}: s3://..."
        )


def _vocabulary(train: Node, source: Node) -> Iterator[Problem]:
    """Of a preset, where nobody reads it off the data before the run."""
    if get(train, "model", "preset") is None or get(train, "model", "vocab_size") is not None:
        return
    if (text_of(get(source, "tokens")) or "").startswith(BUCKET):
        reason, hint = (
            "nobody looks into a bucket before the run",
            "as the manifest.json there has it or more",
        )
    elif get(source, "tokenizer") is not None:
        reason, hint = "nobody opens the tokenizer before the run", "the number of its tokens or more"
    else:
        return
    yield problem_of_key(
        train.value["model"],
        f"{reason}, so the model's vocabulary is not known",
        f"add 'vocab_size: ...', {hint}",
    )


def _held_out(train: Node, source: Node) -> Iterator[Problem]:
    key = next((key for key in (*FILES, "chat") if get(source, key) is not None), None)
    if key is not None and get(train, "validate") is not None and get(source, "validation") is None:
        yield problem_of_key(
            source.value[key],
            "the training validates, and there are no files to do it with",
            "add 'validation: ...', the files that are held out",
        )


def _divided(data: Node) -> Iterator[Problem]:
    splits, batch = get(data, "splits"), get(data, "batch_size")
    if splits is None or batch is None or not is_positive(splits) or not is_positive(batch):
        return
    if batch.value % splits.value:
        nearest = max(1, round(batch.value / splits.value)) * splits.value
        message = f"batch_size {batch.value} is not a multiple of splits {splits.value}"
        yield problem_of_key(batch, message, f"write {nearest}")


def is_positive(node: Node) -> bool:
    """Whether a whole number above 0 stands there."""
    return isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 0


def is_text_with_placeholders(path: Sequence[str | int]) -> bool:
    """Of a leaf below `data`: paths, and arguments."""
    return path[-1:] in _PATHS or "args" in path[:3] or (*path[:1], *path[-1:]) == ("chat", "path")
