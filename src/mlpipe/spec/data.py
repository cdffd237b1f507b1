"""The `data` of a training: where its samples come from, and how many make a step. Other mappings than that
of tokens: `spec/own_data.py`, `spec/chat.py`, `spec/mixture.py`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import ConfigDict, Field, Tag

from mlpipe._core.units import format_bytes, parse_bytes
from mlpipe.spec import fields as f
from mlpipe.spec import placeholders
from mlpipe.spec.base import OnNeedOf, SpecModel, one_of
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, items_of, problem_of_key, text_of

if TYPE_CHECKING:
    from mlpipe.spec.chat import ChatData as ChatData
    from mlpipe.spec.mixture import MixData as MixData
    from mlpipe.spec.mixture import OwnSource as OwnSource
    from mlpipe.spec.mixture import ParquetSource, TarsSource
    from mlpipe.spec.mixture import TokenSource as TokenSource
    from mlpipe.spec.own_data import OwnData as OwnData
    from mlpipe.spec.own_data import ParquetData, TarsData
else:
    _chat, _mixture, _own = OnNeedOf("chat"), OnNeedOf("mixture"), OnNeedOf("own_data")
    ChatData, MixData, TokenSource = _chat.ChatData, _mixture.MixData, _mixture.TokenSource
    OwnSource, ParquetSource, TarsSource = _mixture.OwnSource, _mixture.ParquetSource, _mixture.TarsSource
    OwnData, ParquetData, TarsData = _own.OwnData, _own.ParquetData, _own.TarsData

BUCKET, DEFAULT_CACHE = "s3://", "20 GiB"
_KEYS = ("tokens", "parquet", "tars", "chat", "validation", "tokenizer", "template")
_PATHS = tuple((key,) for key in _KEYS)
FILES = ("parquet", "tars")  # formats of files that are read as they are


class TokenData(SpecModel):
    """A folder of token files, as `mlpipe-corpus` writes it."""

    model_config = ConfigDict(json_schema_extra=one_of("batch_tokens", "batch_size"))

    tokens: f.Text = Field(description=f.TOKENS)
    cache: f.Size | None = Field(None, description=f.CACHE)
    batch_tokens: f.Count | None = Field(
        None, description="Tokens in a step, over all workers: a multiple of `seq_len`."
    )
    batch_size: f.Count | None = Field(
        None, description="Sequences in a step, over all workers; instead of `batch_tokens`."
    )
    micro_batch: f.CountOrAuto = Field(
        "auto", description="Sequences in one forward pass of one worker; `auto`: the fastest that fits."
    )


AnyData = Annotated[
    Annotated[TokenData, Tag("TokenData")]
    | Annotated[OwnData, Tag("OwnData")]
    | Annotated[ParquetData, Tag("ParquetData")]
    | Annotated[TarsData, Tag("TarsData")]
    | Annotated[ChatData, Tag("ChatData")]
    | Annotated[MixData, Tag("MixData")],
    f.by_key(mix=MixData, entry=OwnData, parquet=ParquetData, tars=TarsData, chat=ChatData, tokens=TokenData),
]
Files: TypeAlias = ParquetData | TarsData | ParquetSource | TarsSource
Source: TypeAlias = TokenData | TokenSource | OwnData | OwnSource | Files  # alone, or of a mixture


def cache_bytes(data: Source | MixData | ChatData) -> int:
    """On the disk of each node, for copies of what lies in buckets."""
    if isinstance(data, ChatData):
        return 0
    sources: tuple[Source, ...] = data.mix if isinstance(data, MixData) else (data,)
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
