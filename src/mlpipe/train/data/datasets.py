"""The data sets that a plan names: token files, files of samples, what a user's function returns, and
mixtures. All are tried out when they are opened, so that a mistake shows before the first step."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan, SourcePlan
from mlpipe.plan.entry import Entry
from mlpipe.train.data.chat.samples import ChatSamples, MixedChat, open_chat
from mlpipe.train.data.microbatch import Collated, form, is_sample, no_sample, unlike
from mlpipe.train.data.mixture import Mixture, Shortened
from mlpipe.train.data.tokens import TokenDataset, open_folder
from mlpipe.train.data.windows import Windowed
from mlpipe.train.model import load_entry


class Streams:
    """A user's set that can only be iterated over, in `splits` parts; `make(part)` opens one at its
    beginning. As `[i]`, whatever the index, it gives its first sample, by which the model is tried out; the
    others are read by streams.py."""

    def __init__(self, make: Callable[[int], Any], splits: int, where: str) -> None:
        self.make = make
        self.splits = splits
        self.where = where
        self._first = next(iter(make(0)), None)

    def __getitem__(self, index: int) -> Any:
        return self._first


def open_dataset(plan: DataPlan, *, split: str, seq_len: int) -> Any:
    """Token files, what the user's function returns for `split` ("train", "validation"), or a mixture."""
    if plan.chat is not None:
        return open_chat(plan.chat, split, seq_len)
    if plan.tokens is not None:
        return open_tokens(plan.sources[0], split, seq_len)
    sources = [_open_source(source, plan, split, seq_len) for source in plan.sources]
    dataset = sources[0]
    if plan.mix:
        forms = [form(source[0]) for source in sources]
        odd = next((number for number, form in enumerate(forms) if form != forms[0]), None)
        if odd is not None and plan.collate is None:
            raise TrainError(
                f"samples of the sources 0 and {odd} cannot lie in one batch: {forms[0]} and {forms[odd]}",
                where="data.mix",
                hint="give them the same keys and shapes, or name a function that makes a batch: "
                "data.collate",
                kind="input",
            )
        mixture = Mixture(sources, [source.weight for source in plan.mix])
        dataset = mixture if split == "train" else Shortened(mixture)
    if plan.collate is None:
        return dataset
    collated = Collated(dataset, load_entry(Entry(plan.collate, {})), plan.collate)
    collated.batch([dataset[0], dataset[0 if isinstance(dataset, Streams) else len(dataset) - 1]])
    return collated


def open_files(source: SourcePlan, split: str, seq_len: int) -> Any:
    """A `Windowed`, of Parquet or of tars. Raises TrainError (input)."""
    assert source.files is not None
    plan = source.files
    path = plan.path if split == "train" else plan.validation
    if path is None:
        raise TrainError(
            "there are no files to validate with",
            where=plan.path,
            hint="name them: data.validation",
            kind="input",
        )
    from mlpipe.train.data.fields import Fields  # tokenizers, pyarrow and tarfile, for those who need them

    if plan.format == "parquet":
        from mlpipe.train.data.parquet import ParquetRows as Samples
    else:
        from mlpipe.train.data.tars import TarSamples as Samples  # type: ignore[assignment]
    return Samples(plan, path, Fields(plan, seq_len), source.cache_bytes or 0)


def open_tokens(source: SourcePlan, split: str, seq_len: int) -> TokenDataset:
    """Of a folder, or of a bucket."""
    assert source.tokens is not None
    tokens = open_folder(source.tokens)
    if tokens.url is None:
        return TokenDataset(tokens, split, seq_len)
    from mlpipe.train.data.token_shards import ShardedTokens

    return ShardedTokens(tokens, tokens.split(split), seq_len, source.cache_bytes or 0)


def _open_source(source: SourcePlan, plan: DataPlan, split: str, seq_len: int) -> Any:
    """Without a `collate` one that gives dicts of tensors."""
    if source.tokens is not None:
        return open_tokens(source, split, seq_len)
    if source.files is not None:
        files = open_files(source, split, seq_len)
        if plan.collate is None:
            from mlpipe.train.data.fields import check_tensors

            check_tensors(files[0], files.where(0))
        return files
    if source.dataset is None:
        raise TrainError("the plan names no data", kind="bug")
    entry = Entry(source.dataset.entry, {**source.dataset.args, "split": split})
    dataset = _made(entry, 0, plan.splits)
    if _is_stream(dataset):
        return _open_stream(entry, plan, split)
    if plan.packing is not None:
        from mlpipe.train.data.own_lengths import OwnSamples  # for those who have some

        return OwnSamples(dataset, entry.entry, seq_len)
    if plan.splits > 1:
        raise TrainError(
            "its data set is map-style, whose samples any rank finds by their number",
            where=entry.entry,
            hint="leave data.splits away: it is for streams",
            kind="input",
        )
    try:
        num_samples = len(dataset)
        sample, last = (dataset[0], dataset[num_samples - 1]) if num_samples else (None, None)
    except Exception as error:
        raise TrainError(
            f"its data set is not map-style: {type(error).__name__}: {error}",
            where=entry.entry,
            hint="return an object with len() and [i] -> dict of tensors",
            kind="input",
        ) from error
    if num_samples == 0:
        raise TrainError(
            f"its data set for the split {split!r} has no samples",
            where=entry.entry,
            hint="look at what it reads, and at data.args",
            kind="input",
        )
    if plan.collate is not None:
        return dataset
    if not is_sample(sample) and hasattr(dataset, "with_format"):
        dataset = dataset.with_format("torch")  # as Hugging Face's are asked for tensors
        sample, last = dataset[0], dataset[num_samples - 1]
    if not is_sample(sample):
        raise no_sample(f"of {num_samples} samples ", sample, entry.entry)
    if form(last) != form(sample):
        raise unlike(0, sample, num_samples - 1, last, entry.entry)
    return dataset


def _open_stream(entry: Entry, plan: DataPlan, split: str) -> Streams:
    if plan.mix or plan.packing or split != "train":
        what = "be validated with: that needs the same samples each time"
        if plan.mix or plan.packing:
            what = "be mixed with others" if plan.mix else "tell how long its samples are: data.packing"
        raise TrainError(
            f"its data set can only be iterated over, and so cannot {what}",
            where=entry.entry,
            hint=f"return an object with len() and [i] -> dict of tensors for the split {split!r}",
            kind="input",
        )
    streams = Streams(lambda part: _made(entry, part, plan.splits), plan.splits, entry.entry)
    if plan.collate is not None:
        return streams
    sample = streams[0]
    if not is_sample(sample) and hasattr(streams.make(0), "with_format"):
        streams = Streams(
            lambda part: _made(entry, part, plan.splits).with_format("torch"), plan.splits, entry.entry
        )
        sample = streams[0]
    if not is_sample(sample):
        raise no_sample("", sample, entry.entry)
    return streams


def fingerprint(dataset: Any) -> str | None:
    """Of samples, what decides which of them has which number: how many there are, of files in each piece, in
    words. None of token files, whose digest is known, and of streams."""
    if isinstance(dataset, Collated):
        return fingerprint(dataset.samples)
    if isinstance(dataset, ChatSamples | MixedChat):
        return dataset.identity
    if isinstance(dataset, Mixture):
        told = [words for source in dataset.sources if (words := fingerprint(source)) is not None]
        return ", ".join(told) or None
    if isinstance(dataset, TokenDataset | Streams):
        return None
    if not isinstance(dataset, Windowed):
        return f"{len(dataset)} samples"
    digest = hashlib.sha256(dataset.counts.tobytes()).hexdigest()
    return f"{len(dataset)} samples in {len(dataset.counts)} pieces ({digest[:8]})"


def vocab_size_of(dataset: Any) -> int:
    """Of the tokens in the data; 0 where there are none, or nobody knows."""
    if isinstance(dataset, Collated):
        return vocab_size_of(dataset.samples)
    if isinstance(dataset, Mixture):
        return max(map(vocab_size_of, dataset.sources))
    known = isinstance(dataset, TokenDataset | Windowed | ChatSamples | MixedChat)
    return getattr(dataset, "vocab_size", None) or 0 if known else 0


def tokenizer_of(data: DataPlan) -> str | None:
    """Path of the tokenizer.json that its text was read with."""
    if data.tokens is not None:
        path = open_folder(data.tokens).tokenizer_path
        return str(path) if path is not None else None
    chosen = data.chat or data.files
    if chosen is None or chosen.tokenizer is None:
        return None
    from mlpipe.train.data.tokenizer import tokenizer_file

    return tokenizer_file(chosen.tokenizer)


def _is_stream(dataset: Any) -> bool:
    """torch's own has a [i] that only raises."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _made(entry: Entry, part: int, num_parts: int) -> Any:
    """What the user's function gives. Where it has parameters `rank` and `world_size`, it makes one of so
    many parts of a stream; else the stream is asked for it: `split(rank, world_size)`,
    or `shard(num_shards=, index=)`."""
    make = load_entry(entry)
    names = inspect.signature(make).parameters
    splits = "rank" in names and "world_size" in names
    given = {"rank": part, "world_size": num_parts} if splits else {}
    try:
        made = make(**entry.args, **given)
        if num_parts > 1 and not splits and callable(getattr(made, "split", None)):
            made, splits = made.split(part, num_parts), True
        elif num_parts > 1 and not splits and hasattr(made, "shard") and _is_stream(made):
            made, splits = made.shard(num_shards=num_parts, index=part), True  # Hugging Face's
    except Exception as error:
        raise TrainError(
            f"failed to make the data set for the split {entry.args['split']!r}: "
            f"{type(error).__name__}: {error}",
            where=entry.entry,
            kind="input",
        ) from error
    if num_parts > 1 and not splits and _is_stream(made):
        raise TrainError(
            f"its stream cannot be cut into {num_parts} parts",
            where=entry.entry,
            hint="let the function take rank and world_size, or the stream have split(rank, world_size); or "
            "leave data.splits away: then each rank reads all of it and keeps its share",
            kind="input",
        )
    return made
