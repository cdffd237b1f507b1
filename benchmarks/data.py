"""`python -m benchmarks.data`: reading tokens, and making them out of text.

loading  `MicrobatchLoader.step` (order, memory-mapped windows, tensors) on one core: tokens a second, over
         what a training of 7.4M parameters consumes here a core, as `benchmarks.overhead` last measured it.
         Memory: what loading adds to the process's own (anonymous) memory for a small and a 64 times larger
         corpus; pages of the mapped file are the kernel's to drop.
corpus   `mlpipe-corpus` with its tokenizer at hand (`_encode`: reading, splitting, encoding, writing,
         hashing) against `encode_batch_fast` of the `tokenizers` library alone on the same texts in memory,
         on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import measure

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # MB/s per core
TIMES_THE_STEP = 5.0
OF_THE_LIBRARY = 0.9
FLAT = 1.1
SMALL_TOKENS = 4 * 2**20
GROWTH = 64
VOCAB_SIZE = 8192


def token_folder(folder: Path, num_tokens: int) -> Path:
    """Random tokens of one split."""
    import numpy as np

    folder.mkdir()
    draw = np.random.default_rng(0)
    with (folder / "train.bin").open("wb") as file:
        for start in range(0, num_tokens, SMALL_TOKENS):
            size = min(SMALL_TOKENS, num_tokens - start)
            file.write(draw.integers(0, VOCAB_SIZE, size, dtype=np.uint16).tobytes())
    split = {"file": "train.bin", "num_tokens": num_tokens, "num_bytes": num_tokens, "sha256": ""}
    manifest = {"format": 1, "dtype": "uint16", "vocab_size": VOCAB_SIZE, "tokenizer": None}
    manifest["splits"] = {"train": split}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def load(folder: Path, num_steps: int) -> dict[str, float]:
    """In a process of its own: tokens per CPU second, and MiB of memory that loading added."""
    argv = [sys.executable, "-m", "benchmarks.data_worker", str(folder), str(num_steps)]
    root = Path(__file__).parents[1]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=300, cwd=root)
    return json.loads(done.stdout)


def corpus_sides(folder: Path, max_bytes: int) -> dict:
    """The two ways of encoding one text, after a warm-up of each; both count bytes of text."""
    from mlpipe.train.data import corpus
    from mlpipe.train.data.tokenizer import train_tokenizer

    documents = corpus._find(None, max_bytes, 0, folder)
    texts = [text for document in documents for text, _ in document.pieces()]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    tokenizer.encode_special_tokens = True
    num_mb = sum(document.size for document in documents) / 1e6

    def ours() -> measure.Figures:
        began = time.process_time()
        corpus._encode(tokenizer, documents, folder / "out.bin", "uint16")
        return {"speed": num_mb / (time.process_time() - began)}

    def library() -> measure.Figures:
        """Batches of about a megabyte: all at once would need the memory of the whole."""
        began = time.process_time()
        batch, size = [], 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= 1_000_000:
                tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                batch, size = [], 0
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        return {"speed": num_mb / (time.process_time() - began)}

    return {"mlpipe": ours, "tokenizers": library, "tokenizers again": library}


def consumed() -> float:
    """tok/s per core of the fastest training that `benchmarks.overhead` has measured."""
    rows = json.loads((measure.RESULTS / "overhead.json").read_text())["figures"]
    return max(row["ours"] for row in rows if row["unit"] == "tok/s" and row["side"] == "mlpipe") / 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, little text: does it run?")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    num_rounds, steps, text, growth = arguments.rounds, 2000, 6_000_000, GROWTH
    if arguments.quick:
        num_rounds, steps, text, growth = 1, 50, 300_000, 2
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = token_folder(folder / "small", SMALL_TOKENS)
        large = token_folder(folder / "large", SMALL_TOKENS * growth)
        loaded = [(load(small, steps), load(large, steps)) for _ in range(num_rounds)]
        sides = corpus_sides(folder, text)
        for side in sides.values():
            side()
        found = measure.rounds(sides, num_rounds)
    step = consumed()
    rows = [
        measure.alone("data loading", "speed of a core", "tok/s", [big["speed"] for _, big in loaded],
                      goal=TIMES_THE_STEP * step, higher_is_better=True),
        measure.alone("data loading", f"memory added, {growth} x the corpus", "MiB",
                      [big["mib"] for _, big in loaded],
                      goal=FLAT * statistics.median(one["mib"] for one, _ in loaded)),
        measure.figure("corpus preparation", "speed of a core", "MB/s", found, "speed", ours="mlpipe",
                       peer="tokenizers", goal=OF_THE_LIBRARY, higher_is_better=True),
        measure.figure("corpus preparation", "control: speed of a core", "MB/s", found, "speed",
                       ours="tokenizers again", peer="tokenizers", goal=None, higher_is_better=True),
    ]  # fmt: skip
    body = measure.document(
        rows, rounds=num_rounds, consumed_tokens_per_second_and_core=step, text_bytes=text,
        load_before=load_before, versions={"tokenizers": measure.version("tokenizers")},
    )  # fmt: skip
    measure.publish("data", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
