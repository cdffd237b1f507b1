"""Token files: windows are what lies in the file; a folder that does not fit its manifest is refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe._core.errors import TrainError
from mlpipe.train.data.tokens import TokenDataset, open_folder, verify

pytestmark = pytest.mark.unit


def write_folder(path, tokens, dtype="uint16", **changes):
    path.mkdir(exist_ok=True)
    data = np.asarray(tokens, dtype=dtype).tobytes()
    (path / "train.bin").write_bytes(data)
    split = {"file": "train.bin", "num_tokens": len(tokens), "num_bytes": 3 * len(tokens)}
    split["sha256"] = hashlib.sha256(data).hexdigest()
    manifest = {"format": 1, "dtype": dtype, "vocab_size": 70_000, "tokenizer": None}
    manifest |= {"splits": {"train": split}, **changes}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(("num_tokens", "seq_len", "num_samples"), [(101, 10, 10), (100, 10, 9), (11, 10, 1)])
def test_windows_tile_the_file_and_overlap_by_the_last_target(
    tmp_path, dtype, num_tokens, seq_len, num_samples
):
    tokens = np.arange(num_tokens) * 601 % 60_000
    dataset = TokenDataset(open_folder(write_folder(tmp_path, tokens, dtype)), "train", seq_len)
    assert len(dataset) == num_samples
    windows = dataset.windows(np.arange(num_samples))
    assert windows.dtype == np.int64
    assert windows.shape == (num_samples, seq_len + 1)
    assert np.array_equal(windows[:, :-1].ravel(), tokens[: num_samples * seq_len])
    assert np.array_equal(windows[:, 1:].ravel(), tokens[1 : num_samples * seq_len + 1])


@settings(deadline=None)
@given(data=st.data())
def test_any_samples_in_any_order(tmp_path_factory, data):
    tokens = data.draw(st.lists(st.integers(0, 65_535), min_size=9, max_size=60))
    folder = write_folder(tmp_path_factory.mktemp("tokens"), tokens)
    dataset = TokenDataset(open_folder(folder), "train", 4)
    indices = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9))
    expected = [tokens[i * 4 : i * 4 + 5] for i in indices]
    assert dataset.windows(np.array(indices)).tolist() == expected


def test_a_sound_folder_verifies_and_a_flipped_bit_does_not(tmp_path):
    folder = open_folder(write_folder(tmp_path, range(50)))
    verify(folder)
    data = bytearray((tmp_path / "train.bin").read_bytes())
    data[33] ^= 4
    (tmp_path / "train.bin").write_bytes(data)
    with pytest.raises(TrainError, match="not those of the manifest") as caught:
        verify(open_folder(tmp_path))
    assert caught.value.kind == "input"
    assert caught.value.where.endswith("train.bin")


def test_the_digest_of_the_data_follows_the_data(tmp_path):
    one = open_folder(write_folder(tmp_path / "a", range(50)))
    same = open_folder(write_folder(tmp_path / "b", range(50)))
    other = open_folder(write_folder(tmp_path / "c", range(1, 51)))
    assert one.digest == same.digest != other.digest


def test_a_truncated_file_is_seen_when_the_folder_is_opened(tmp_path):
    write_folder(tmp_path, range(50))
    (tmp_path / "train.bin").write_bytes(b"\0" * 98)
    with pytest.raises(TrainError, match="98 bytes, the manifest says 100"):
        open_folder(tmp_path)
    (tmp_path / "train.bin").unlink()
    with pytest.raises(TrainError, match="is missing"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"splits": None}, "no manifest"),
        ({"splits": {"train": {"file": "train.bin"}}}, "no manifest"),
        ({"tokenizer": "../secret.json"}, "not the name of a file"),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path, change, message):
    with pytest.raises(TrainError, match=message) as caught:
        open_folder(write_folder(tmp_path, range(50), **change))
    assert caught.value.kind == "input"


def test_no_folder_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(TrainError) as caught:
        open_folder(tmp_path / "absent")
    assert "mlpipe-corpus" in caught.value.hint


def test_an_unknown_split_and_too_long_a_sequence(tmp_path):
    folder = open_folder(write_folder(tmp_path, range(50)))
    with pytest.raises(TrainError, match="there are train"):
        TokenDataset(folder, "validation", 4)
    with pytest.raises(TrainError, match="not one sample"):
        TokenDataset(folder, "train", 50)
