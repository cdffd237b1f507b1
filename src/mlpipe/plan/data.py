"""What is trained on (`TrainPlan.data`)."""

from typing import Literal, NamedTuple

from mlpipe.plan.entry import Entry


class FilesPlan(NamedTuple):
    """Files of samples as they are: `path` is one, a folder or a pattern, also in a bucket; `validation` that
    of the held-out ones. `columns`: by the sample's key the column, or the extension; empty: all as they are
    called. `tokenizer`: a tokenizer.json, or the folder of one, for what is text."""

    format: Literal["parquet", "tars"]
    path: str
    validation: str | None
    columns: dict[str, str]
    tokenizer: str | None

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all that is trained on."""
        return (self.path,)


class ChatFile(NamedTuple):
    """One of several that are mixed; `weight`: its share of the samples beside the others'."""

    path: str
    weight: float


class ChatPlan(NamedTuple):
    """Files of JSON lines: conversations, prompts with completions, or text. `path`: the training's, or
    instead `mix`, of what samples are mixed; `validation`: the held-out one. `tokenizer`: a tokenizer.json,
    or the folder of one with all that a model's has. `template`: a Jinja file, or `chatml`; None: that
    folder's. `packing`: several samples in a row of up to `micro_batch * seq_len` tokens, see
    `plan/dealing.py`; None: a sample a row, padded."""

    path: str | None
    validation: str | None
    tokenizer: str
    template: str | None = None
    packing: Literal["best_fit", "balanced"] | None = None
    mix: tuple[ChatFile, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all that is trained on."""
        return tuple(one.path for one in self.mix) if self.path is None else (self.path,)


class SourcePlan(NamedTuple):
    """One of several sources, as in `DataPlan`; `weight`: its share of the samples beside the others'."""

    weight: float
    tokens: str | None
    dataset: Entry | None
    digest: str | None
    cache_bytes: int | None = None
    files: FilesPlan | None = None


class DataPlan(NamedTuple):
    """Where samples come from: a folder of token files (`tokens`, a local path), or a user's own `dataset`
    whose function returns a map-style object (`len`, `[i] -> dict of tensors`). `digest`: sha256 of the
    folder's manifest, which has those of the files; None for a user's own, and before the data exist.
    `collate`: import path of the user's function that makes a batch of a list of samples; None: stacked.
    `workers`: processes that read ahead beside each rank. `splits`: parts of a set that can
    only be iterated over. `mix`: instead of the first three, of what samples are mixed.
    `cache_bytes`: on each node's disk for tokens or files in a bucket (an s3:// URL then). `files`, `chat`:
    instead of tokens and data set. `packing`: of a `dataset` that tells the lengths of its samples, as of
    `ChatPlan`; off: padded; None: all are equally long."""

    tokens: str | None
    dataset: Entry | None
    digest: str | None
    collate: str | None = None
    workers: int | Literal["auto"] = 0
    splits: int = 1
    mix: tuple[SourcePlan, ...] = ()
    cache_bytes: int | None = None
    files: FilesPlan | None = None
    chat: ChatPlan | None = None
    packing: Literal["off", "best_fit", "balanced"] | None = None

    @property
    def is_uneven(self) -> bool:
        """Whether samples differ in length, and how long each is is known before it is read."""
        return self.chat is not None or self.packing is not None

    @property
    def packed(self) -> Literal["best_fit", "balanced"] | None:
        """How several lie in a row; None: they do not."""
        if self.chat is not None:
            return self.chat.packing
        return None if self.packing == "off" else self.packing

    @property
    def sources(self) -> tuple[SourcePlan, ...]:
        """Of a mixture all, of other data the one."""
        own = SourcePlan(1.0, self.tokens, self.dataset, self.digest, self.cache_bytes, self.files)
        return self.mix or (own,)

    @property
    def all_files(self) -> tuple[FilesPlan | ChatPlan, ...]:
        """Of conversations, and of all sources that are files."""
        files = (self.chat, *(source.files for source in self.sources))
        return tuple(one for one in files if one is not None)

    @property
    def functions(self) -> tuple[Entry, ...]:
        """Of the user: those that make data sets, and the one that makes batches."""
        made = tuple(source.dataset for source in self.sources if source.dataset is not None)
        return made if self.collate is None else (*made, Entry(self.collate, {}))
