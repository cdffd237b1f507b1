"""Byte-level tokenizers, kept as the tokenizer.json that `tokenizers` and `transformers` load.

`bpe` learns merges from text; `bytes` is the same without merges: one token a byte. Both hold all 256 bytes,
so that every text has an encoding, and one special token that ends a document.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlpipe._core.errors import TrainError
from mlpipe.store.open import open_store
from mlpipe.train.data.tokens import BUCKET

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the bytes and END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """At most `vocab_size` tokens (fewer if the text has no more pairs to merge), the same for the same
    texts. `MIN_VOCAB_SIZE` makes the `bytes` tokenizer, which needs no text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Raises TrainError (input) when there is no tokenizer at `path`, which may lie in a bucket."""
    try:
        if str(path).startswith(BUCKET):
            base, _, name = str(path).rpartition("/")
            text = open_store(base).get(name).decode("utf-8")
        else:
            text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError("no tokenizer here", where=str(path), hint=str(error), kind="input") from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise TrainError(
            "this is no tokenizer.json", where=str(path), hint=str(error), kind="input"
        ) from error


def tokenizer_file(path: str) -> str:
    """`path`: of the file, or of its folder."""
    return path if path.endswith(".json") else f"{path.rstrip('/')}/tokenizer.json"
