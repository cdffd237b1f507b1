"""From what a row of a Parquet file or a sample of a tar holds, to the dict of tensors that a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import FilesPlan
from mlpipe.train.data.tokenizer import END_OF_TEXT, load_tokenizer, tokenizer_file
from mlpipe.train.loss import IGNORED


class Fields:
    """Of one set of files. `seq_len`: tokens in a sample."""

    def __init__(self, plan: FilesPlan, seq_len: int) -> None:
        self.columns = plan.columns
        self.seq_len = seq_len
        self.tokenizer: Any = None
        self.vocab_size: int | None = None
        if plan.tokenizer is not None:
            self.tokenizer = load_tokenizer(tokenizer_file(plan.tokenizer))
            self.tokenizer.encode_special_tokens = True  # as mlpipe-corpus has it
            self.vocab_size = self.tokenizer.get_vocab_size()
            self.end = self.tokenizer.token_to_id(END_OF_TEXT)

    def sample(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """By the sample's keys. Numbers, and lists of such, are tensors; text is tokens, cut or padded to
        `seq_len`, and the `inputs` of a sample without `targets` are text to go on with: these are the next
        token of each, and nothing where there is none. What else there is stays as it is, for a `collate`."""
        keys = self.columns or {name: name for name in raw}
        sample: dict[str, Any] = {}
        for key, name in keys.items():
            value = raw[name]
            if value is None:
                raise ValueError(f"{name!r} is null")
            if not isinstance(value, str) or self.tokenizer is None:
                sample[key] = tensor_of(value)
            elif key == "inputs" and "targets" not in keys:
                sample |= self._to_go_on(value)
            else:
                sample[key] = self._padded(self._ids(value)[: self.seq_len], self._padding)
        return sample

    @property
    def _padding(self) -> int:
        return 0 if self.end is None else self.end

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _to_go_on(self, text: str) -> dict[str, torch.Tensor]:
        ids = self._ids(text) + ([] if self.end is None else [self.end])
        ids = ids[: self.seq_len + 1]
        return {
            "inputs": self._padded(ids[:-1], self._padding),
            "targets": self._padded(ids[1:], IGNORED),
        }

    def _padded(self, ids: list[int], padding: int) -> torch.Tensor:
        return torch.tensor(ids + [padding] * (self.seq_len - len(ids)), dtype=torch.int64)


def tensor_of(value: Any) -> Any:
    """Of whole numbers int64, of others fp32, of booleans bool; lists of one length are dims. An array or a
    tensor keeps its dtype, but for fp64. What is no number stays as it is."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(np.float32) if value.dtype == np.float64 else value)
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if not isinstance(value, list):
        return value
    try:
        array = np.array(value)
    except ValueError:
        return value  # of different lengths
    if array.dtype.kind == "u":
        raise ValueError(f"{array.max()} does not fit into int64")
    if array.dtype.kind not in "bif":
        return value
    kinds = {"b": np.bool_, "f": np.float32}
    return torch.from_numpy(array.astype(kinds.get(array.dtype.kind, np.int64)))


def check_tensors(sample: Mapping[str, Any], where: str) -> None:
    """Of a set without a `collate`. Raises TrainError (input) for what is no tensor."""
    odd = next((key for key, value in sample.items() if not torch.is_tensor(value)), None)
    if odd is None:
        return
    is_text = isinstance(sample[odd], str)
    raise TrainError(
        f"{odd!r} is text"
        if is_text
        else f"{odd!r} is {type(sample[odd]).__name__}, not numbers of one length",
        where=where,
        hint=("name a tokenizer: data.tokenizer; " if is_text else "")
        + "leave it out: data.columns; or make the batch yourself: data.collate",
        kind="input",
    )
