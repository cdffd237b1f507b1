"""mlpipe-corpus: deterministic, lossless, train and validation apart, clear errors."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mlpipe._core.errors import TrainError
from mlpipe.train.data import corpus
from mlpipe.train.data.tokenizer import END_OF_TEXT, load_tokenizer
from mlpipe.train.data.tokens import TokenDataset, open_folder, verify

pytestmark = pytest.mark.unit


def text_of(out, split):
    folder = open_folder(out)
    ids = np.fromfile(out / folder.splits[split].file, dtype=folder.dtype)
    return load_tokenizer(folder.tokenizer_path).decode(ids.tolist(), skip_special_tokens=False)


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    for number in range(12):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"line {i} of file {number}: Grüße, 你好 🎉\n" for i in range(40)))
    return root


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_every_text_comes_back_and_is_in_one_split_only(tmp_path, source, kind):
    out = tmp_path / "out"
    splits = corpus.build_corpus(out, source=source, vocab_size=300, tokenizer_kind=kind)
    folder = open_folder(out)
    verify(folder)
    texts = {path.read_text() for path in source.rglob("*.txt")}
    found = {name: text_of(out, name).split(END_OF_TEXT) for name in splits}
    assert all(texts_of.pop() == "" for texts_of in found.values())
    assert set(found["train"]) | set(found["validation"]) == texts
    assert not set(found["train"]) & set(found["validation"])
    for name, split in splits.items():
        assert split.num_bytes == sum(len(text.encode()) for text in found[name])
        if kind == "bytes":
            assert split.num_tokens == split.num_bytes + len(found[name])
    assert folder.vocab_size == (257 if kind == "bytes" else 300)
    assert len(TokenDataset(folder, "train", 32)) > 0


def test_the_standard_library_gives_the_same_bytes_in_every_process(tmp_path):
    for number in range(2):
        env = {**os.environ, "PYTHONHASHSEED": str(number), "RAYON_NUM_THREADS": str(number + 1)}
        argv = ["-m", "mlpipe.train.data.corpus", "--out", tmp_path / str(number), "--max-bytes", "400 KB"]
        done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    names = ["manifest.json", "tokenizer.json", "train.bin", "validation.bin"]
    assert filecmp.cmpfiles(tmp_path / "0", tmp_path / "1", names, shallow=False)[0] == names
    total = sum(split.num_bytes for split in open_folder(tmp_path / "0").splits.values())
    assert 350_000 < total <= 400_000


def test_one_file_is_split_at_a_line(tmp_path):
    source = tmp_path / "input.txt"
    source.write_text("".join(f"{i:05d} a line\n" for i in range(1000)))
    splits = corpus.build_corpus(tmp_path / "out", source=source, vocab_size=300, validation_fraction=0.1)
    whole = text_of(tmp_path / "out", "train") + text_of(tmp_path / "out", "validation")
    assert whole.replace(END_OF_TEXT, "") == source.read_text()
    assert splits["validation"].num_bytes == 1300


def test_a_large_file_is_encoded_in_pieces_of_whole_lines(tmp_path, source, monkeypatch):
    corpus.build_corpus(tmp_path / "whole", source=source, tokenizer_kind="bytes")
    monkeypatch.setattr(corpus, "_BATCH_BYTES", 100)
    corpus.build_corpus(tmp_path / "pieces", source=source, tokenizer_kind="bytes")
    assert filecmp.cmp(tmp_path / "whole/train.bin", tmp_path / "pieces/train.bin", shallow=False)


def test_a_text_that_spells_the_end_token_does_not_end(tmp_path, source):
    for path in source.rglob("*.txt"):
        path.write_text(f"before {END_OF_TEXT} after\n")
    out = tmp_path / "out"
    corpus.build_corpus(out, source=source, vocab_size=300)
    end = load_tokenizer(out / "tokenizer.json").token_to_id(END_OF_TEXT)
    ids = np.fromfile(out / "train.bin", dtype=np.uint16)
    assert (ids == end).sum() == 11


def test_what_is_no_text_hidden_or_the_output_itself_is_left_out(tmp_path, source):
    corpus.build_corpus(tmp_path / "clean", source=source, vocab_size=300)
    (source / "image.png").write_bytes(b"\x89PNG\0\0")
    (source / "latin1.txt").write_bytes(b"gr\xfc\xdfe")
    (source / ".hidden").write_text("secret")
    (source / "empty.txt").write_text("")
    for _ in range(2):
        corpus.build_corpus(source / "out", source=source, vocab_size=300)
    assert filecmp.cmp(tmp_path / "clean/manifest.json", source / "out/manifest.json", shallow=False)


def test_the_seed_changes_what_is_held_out(tmp_path, source):
    found = set()
    for seed in range(6):
        corpus.build_corpus(tmp_path / str(seed), source=source, vocab_size=300, seed=seed)
        found.add(text_of(tmp_path / str(seed), "validation"))
    assert len(found) > 1


@pytest.mark.parametrize("shard_bytes", [None, 300])
def test_whoever_has_opened_a_file_that_is_written_anew_reads_on_in_it(tmp_path, source, shard_bytes):
    """A training that had mapped it was killed by SIGBUS, or went on with other tokens."""
    out = tmp_path / "out"
    corpus.build_corpus(out, source=source, vocab_size=300, shard_bytes=shard_bytes)
    tokens = np.memmap(next(out.glob("train*.bin")), dtype="uint16", mode="r")
    before = np.fromfile(tokens.filename, dtype="uint16")
    corpus.build_corpus(out, source=source, vocab_size=280, seed=1, shard_bytes=shard_bytes)
    assert np.array_equal(tokens, before)
    assert not np.array_equal(np.fromfile(tokens.filename, dtype="uint16"), before)
    if shard_bytes is None:
        verify(open_folder(out))


def test_two_do_not_write_into_one_folder_at_once(tmp_path, source, monkeypatch, capsys):
    """The one's tokens stood beside the other's tokenizer."""
    out, codes, real = tmp_path / "out", [], corpus._encode
    argv = ["--out", str(out), "--source", str(source), "--vocab-size", "300"]

    def encode(*args):
        codes.append(corpus.main([*argv, "--seed", "1"]))
        return real(*args)

    monkeypatch.setattr(corpus, "_encode", encode)
    assert corpus.main(argv) == 0
    assert codes == [2, 2]
    assert "another mlpipe-corpus is writing into this folder" in capsys.readouterr().err
    verify(open_folder(out))
    monkeypatch.setattr(corpus, "_encode", real)
    assert corpus.main([*argv, "--seed", "1"]) == 0


def test_an_interrupted_rewrite_leaves_no_manifest(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    corpus.build_corpus(out, source=source, vocab_size=300)
    monkeypatch.setattr(corpus, "_encode", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert corpus.main(["--out", str(out), "--source", str(source)]) == 4
    with pytest.raises(TrainError, match="no token files"):
        open_folder(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "absent"], "there is nothing here"),
        (["--vocab-size", "100"], "cannot hold the 256 bytes"),
        (["--validation-fraction", "1.5"], "not between 0 and 1"),
        (["--max-bytes", "3"], "not a size"),
        (["--max-bytes", "1 B"], "no text files"),
    ],
)
def test_bad_input_is_exit_2_and_says_what(tmp_path, capsys, options, message):
    assert corpus.main(["--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_is_exit_2(tmp_path):
    with pytest.raises(SystemExit) as caught:
        corpus.main(["--out", str(tmp_path), "--tokenizer", "words"])
    assert caught.value.code == 2


def test_a_folder_that_cannot_be_made_is_exit_4(tmp_path, source, capsys):
    (tmp_path / "file").write_text("")
    assert corpus.main(["--out", str(tmp_path / "file/out"), "--source", str(source)]) == 4
    assert "file/out" in capsys.readouterr().err


def test_the_manifest_is_the_documented_one(tmp_path, source):
    corpus.build_corpus(tmp_path / "out", source=source, vocab_size=300)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert set(manifest) == {"format", "dtype", "vocab_size", "tokenizer", "splits"}
    assert set(manifest["splits"]["train"]) == {"file", "num_tokens", "num_bytes", "sha256"}


@pytest.mark.parametrize("content", [None, b"{}", b"\xff\xfe"])
def test_a_tokenizer_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TrainError) as caught:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert caught.value.kind == "input"
