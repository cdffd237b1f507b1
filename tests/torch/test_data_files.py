"""Parquet files and tars as they are: every sample once an epoch, on any number of ranks and processes, in a
bucket as in a folder; and a run that goes on at the sample where it stopped."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kit import plans, sample_files
from PIL import Image

from mlpipe._core.errors import StoreError, TrainError
from mlpipe.plan.data import DataPlan, FilesPlan, SourcePlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.store.open import open_store
from mlpipe.train.data import files as data_files
from mlpipe.train.data import parquet, shard_cache, tar_index, tars
from mlpipe.train.data.datasets import fingerprint, open_dataset
from mlpipe.train.data.fields import Fields
from mlpipe.train.data.files import base_of, matches
from mlpipe.train.data.loader import MicrobatchLoader, ReadAhead
from mlpipe.train.data.microbatch import collate
from mlpipe.train.data.tokenizer import train_tokenizer
from mlpipe.train.prepare import check_files
from mlpipe.train.steps_ahead import steps_ahead
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
NUM = sum(sample_files.SIZES)
COLUMNS = {"parquet": {"x": "x", "index": "index"}, "tars": {"x": "x.npy", "index": "cls"}}
FORMATS = ["parquet", "tars"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Both kinds, with eight held out."""
    made = tmp_path_factory.mktemp("files")
    for name, sizes, first in (("train", sample_files.SIZES, 0), ("validation", [4, 4], 500)):
        sample_files.write_parquet(made / "parquet", sizes, name=name, first=first)
        sample_files.write_tars(made / "tars", sizes, name=name, first=first)
    return made


def files_of(kind: str, base: Path | str, **changes: object) -> FilesPlan:
    suffix = {"parquet": "parquet", "tars": "tar"}[kind]
    paths = (f"{base}/{kind}/{split}-*.{suffix}" for split in ("train", "validation"))
    return FilesPlan(kind, *paths, COLUMNS[kind], None)._replace(**changes)  # type: ignore[arg-type]


def data_of(files: FilesPlan, **changes: object) -> DataPlan:
    return DataPlan(None, None, None, files=files, cache_bytes=10**6)._replace(**changes)


def loader(dataset, rank: int, ranks: int, batch: int = 5) -> MicrobatchLoader:
    world = World(Mesh(dp_replicate=ranks), rank, torch.device("cpu"))
    return MicrobatchLoader(dataset, world, seed=3, global_batch=batch, micro_batch=2, seq_len=1)


def taken(dataset, position: int, ranks: int) -> list[tuple[int, float]]:
    found = []
    for rank in range(ranks):
        for one in loader(dataset, rank, ranks).step(position):
            if one.counts:
                found += zip(one.batch["index"].tolist(), one.batch["x"][:, 1].tolist(), strict=True)
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_each_sample_comes_once_an_epoch_on_any_number_of_ranks(folder, kind):
    dataset = open_dataset(data_of(files_of(kind, folder)), split="train", seq_len=1)
    assert len(dataset) == NUM
    steps = [taken(dataset, 5 * step, 1) for step in range(2 * NUM // 5 + 1)]
    seen = [index for step in steps for index, _ in step]
    assert sorted(seen[:NUM]) == sorted(seen[NUM : 2 * NUM]) == list(range(NUM))
    assert seen[:NUM] != seen[NUM : 2 * NUM] != sorted(seen[:NUM])
    assert all(half == index + 0.5 for step in steps for index, half in step)
    assert [taken(dataset, 5 * step, 1 + step % 4) for step in range(len(steps))] == steps
    held_out = open_dataset(data_of(files_of(kind, folder)), split="validation", seq_len=1)
    assert [held_out[i]["index"].item() for i in range(8)] == list(range(500, 508))
    sample = dataset[NUM - 1]
    assert {key: (value.dtype, value.shape) for key, value in sample.items()} == {
        "x": (torch.float32, (3,)),
        "index": (torch.int64, ()),
    }


@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(
    kind=st.sampled_from(FORMATS),
    attempts=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 1, 3])), min_size=2, max_size=3),
    ranks=st.integers(1, 2),
)
def test_data_workers_read_the_same_and_none_is_lost(folder, kind, attempts, ranks):
    """What a process opened before it was forked, several read side by side."""
    dataset = open_dataset(data_of(files_of(kind, folder)), split="train", seq_len=1)
    expected = {step: taken(dataset, 5 * step, ranks) for step in range(12)}
    done = 0
    for steps, workers in attempts:
        found: dict[int, list] = {step: [] for step in range(done, done + steps)}
        for rank in range(ranks):
            source = loader(dataset, rank, ranks)
            made = plans.train_plan("store", plans.write_tokens(folder / "tokens"), steps=100).work
            work = made._replace(data=data_of(files_of(kind, folder), workers=workers))
            ahead = steps_ahead(source, work, 1, lambda: None) if workers else None
            reader = ReadAhead(source, ahead)
            for step in range(done, done + steps):
                for one in reader.take(step + 1, 5 * step):
                    if one.counts:
                        rows = one.batch["index"].tolist(), one.batch["x"][:, 1].tolist()
                        found[step] += zip(*rows, strict=True)
            if ahead is not None:
                ahead.workers.close()
        assert all(found[step] == expected[step] for step in found)
        done += steps


@pytest.fixture
def bucket(folder, tmp_path, monkeypatch):
    """The same files behind a URL; what was asked for is counted."""
    asked: list[tuple[str, int]] = []

    def opened(url: str):
        store = open_store(url.replace("s3://bucket", str(folder)))
        get, get_into = store.get, store.get_into

        def counted(key, *, start=0, length=None):
            found = get(key, start=start, length=length)
            asked.append((key, len(found)))
            return found

        def counted_into(key, buffer, *, start=0):
            asked.append((key, len(buffer)))
            get_into(key, buffer, start=start)

        store.get, store.get_into = counted, counted_into  # type: ignore[method-assign]
        return store

    for module in (data_files, shard_cache, tars, tar_index):
        monkeypatch.setattr(module, "open_store", opened)
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    return asked


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bucket_gives_the_same_and_each_byte_is_fetched_once_for_a_node(folder, bucket, kind):
    if kind == "tars":
        with pytest.raises(TrainError, match=r"there is no index.json") as caught:
            open_dataset(data_of(files_of(kind, "s3://bucket")), split="train", seq_len=1)
        assert "mlpipe-index s3://bucket/tars" in (caught.value.hint or "")
        assert tar_index.main(["s3://bucket/tars"]) == 0
    local = open_dataset(data_of(files_of(kind, folder)), split="train", seq_len=1)
    remote = [open_dataset(data_of(files_of(kind, "s3://bucket")), split="train", seq_len=1) for _ in "ab"]
    assert fingerprint(remote[0]) == fingerprint(local)
    bucket.clear()
    for step in range(2 * NUM // 5):
        expected = taken(local, 5 * step, 1)
        assert [taken(one, 5 * step, 1) for one in remote] == [expected, expected]
    sizes = {path.name: path.stat().st_size for path in (folder / kind).iterdir()}
    fetched = {name: sum(size for key, size in bucket if key == name) for name in sizes}
    assert all(fetched[name] <= sizes[name] for name in sizes), fetched
    assert sum(fetched.values()) > 0
    (folder / "tars/index.json").unlink(missing_ok=True)


def test_a_bucket_whose_files_do_not_fit_into_the_cache_is_refused(bucket):
    with pytest.raises(TrainError, match="two windows of 8 files are") as caught:
        open_dataset(data_of(files_of("parquet", "s3://bucket"), cache_bytes=100), split="train", seq_len=1)
    assert "smaller row groups" in (caught.value.hint or "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([], 257).save(str(made / "tokenizer.json"))
    return made


@pytest.mark.parametrize(("kind", "column"), [("parquet", "text"), ("tars", "txt")])
def test_text_is_tokens_to_go_on_with_or_to_look_at(folder, tokenizer, kind, column):
    files = files_of(kind, folder, columns={"inputs": column}, tokenizer=str(tokenizer))
    sample = open_dataset(data_of(files), split="train", seq_len=12)[3]
    assert sample["inputs"].tolist() == [*_ids(tokenizer, "number 3"), 0, 0, 0, 0]
    assert sample["targets"].tolist() == [*_ids(tokenizer, "umber 3"), 0, -100, -100, -100, -100]
    short = open_dataset(data_of(files), split="train", seq_len=4)[3]
    assert (short["inputs"].tolist(), short["targets"].tolist()) == (
        _ids(tokenizer, "numb"),
        _ids(tokenizer, "umbe"),
    )
    classed = files._replace(columns={"inputs": column, "targets": COLUMNS[kind]["index"]})
    sample = open_dataset(data_of(classed), split="train", seq_len=10)[3]
    assert sample["inputs"].tolist() == [*_ids(tokenizer, "number 3"), 0, 0]
    assert sample["targets"].tolist() == 3


def _ids(tokenizer: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids


def test_pictures_numbers_and_documents_are_decoded_by_their_extension(tmp_path):
    def picture(mode: str, kind: str) -> bytes:
        written = io.BytesIO()
        Image.new(mode, (4, 2), 255 if mode == "L" else (255, 0, 51)).save(written, kind)
        return written.getvalue()

    samples = {
        "a/1": {"png": picture("L", "png"), "json": b"[1, 2]", "cls": b"7\n"},
        "a/2": {"png": picture("RGB", "png"), "json": b'{"k": 1}', "cls": b"8"},
        "b/2": {"jpg": picture("RGB", "jpeg"), "cls": b"9"},
    }
    sample_files.write_tar(tmp_path / "some.tar", samples)
    plan = FilesPlan("tars", str(tmp_path), None, {}, None)
    dataset = open_dataset(data_of(plan, collate="kit.own_data:unchanged"), split="train", seq_len=1).samples
    assert dataset[0]["png"].tolist() == torch.ones(1, 2, 4).tolist()
    assert dataset[0]["json"].tolist() == [1, 2]
    assert dataset[0]["cls"].item() == 7
    assert dataset[1]["png"][:, 0, 0].tolist() == pytest.approx([1.0, 0.0, 0.2])
    assert dataset[1]["json"] == {"k": 1}
    assert dataset[2]["jpg"].shape == (3, 2, 4)


def test_what_cannot_be_is_told_with_its_file_and_sample(folder, tmp_path):
    def refused(data: DataPlan, words: str, where: str, hint: str = "", index: int = 0) -> None:
        with pytest.raises(TrainError, match=words) as caught:
            open_dataset(data, split="train", seq_len=1)[index]
        assert caught.value.where == where, caught.value.where
        assert hint in (caught.value.hint or "")
        assert caught.value.kind == "input"

    rows = files_of("parquet", folder)
    first = f"{folder}/parquet/train-0.parquet"
    refused(data_of(rows._replace(columns={"y": "z"})), "no column 'z'", first, "it has x, index, text")
    refused(data_of(rows._replace(columns={})), "'text' is text", first, "data.tokenizer")
    refused(data_of(rows._replace(path=f"{folder}/nowhere")), "no .parquet files", f"{folder}/nowhere")
    table = pa.table({"x": [1.0, None], "list": [[1], [1, 2]], "when": [{"a": 1}, {"a": 2}]})
    pq.write_table(table, tmp_path / "odd.parquet")
    odd = FilesPlan("parquet", str(tmp_path / "odd.parquet"), None, {"x": "x"}, None)
    refused(data_of(odd), "row 1 of row group 0: 'x' is null", odd.path, index=1)
    refused(data_of(odd._replace(columns={"w": "when"})), "'w' is dict", odd.path, "data.collate")
    (tmp_path / "none.parquet").write_bytes(b"PAR1 and no more")
    refused(
        data_of(odd._replace(path=str(tmp_path / "none.parquet"))), "no Parquet", f"{tmp_path}/none.parquet"
    )
    with pytest.raises(TrainError, match="no files to validate with"):
        open_dataset(data_of(odd), split="validation", seq_len=1)

    def packed(name: str, *samples: dict[str, bytes]) -> DataPlan:
        path = sample_files.write_tar(tmp_path / name, {f"s{i}": one for i, one in enumerate(samples)})
        return data_of(FilesPlan("tars", str(path), None, {"c": "cls"}, None))

    good = {"cls": b"1"}
    for name, sample, words in (
        ("a.tar", {"cls": b"one"}, r"sample 's1': \.cls: invalid literal"),
        ("b.tar", {"txt": b"1"}, "sample 's1': has no 'cls'"),
    ):
        refused(packed(name, good, sample), words, f"{tmp_path}/{name}", index=1)
    unknown = packed("c.tar", {"mp4": b"1"})
    wanted = unknown.files._replace(columns={"c": "mp4"})
    refused(
        unknown._replace(files=wanted), "'s0': .mp4: is not decoded here, only txt, json", f"{tmp_path}/c.tar"
    )
    data = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "d.tar").write_bytes(data[:512] + b"1" * 2048)
    refused(
        unknown._replace(files=wanted._replace(path=f"{tmp_path}/d.tar")),
        "this is no tar: damaged",
        f"{tmp_path}/d.tar",
    )
    (tmp_path / "e.tar").write_bytes(b"\x1f\x8b" + b"1" * 2048)
    refused(
        unknown._replace(files=wanted._replace(path=f"{tmp_path}/e.tar")),
        "this is no tar",
        f"{tmp_path}/e.tar",
        "gunzip",
    )
    one = packed("indexed/a.tar", good)
    tar_index.write_index(f"{tmp_path}/indexed")
    index = json.loads((tmp_path / "indexed/index.json").read_text())
    index["tars"][0]["num_samples"] = 5
    (tmp_path / "indexed/index.json").write_text(json.dumps(index))
    refused(one, "1 samples, and index.json says 5", f"{tmp_path}/indexed/a.tar", "mlpipe-index")


@pytest.mark.parametrize(
    ("path", "base", "pattern"),
    [
        ("/data/a-*.tar", "/data", "a-*.tar"),
        ("data/*/a.tar", "data", "*/a.tar"),
        ("*.tar", ".", "*.tar"),
        ("/*.tar", "/", "*.tar"),
        ("s3://b/x.y/**/a-[0-9].tar", "s3://b/x.y", "**/a-[0-9].tar"),
        ("s3://b/x/a.tar", "s3://b/x", "a.tar"),
        ("s3://b/x/", "s3://b/x", None),
        ("/nowhere/a.tar", "/nowhere", "a.tar"),
    ],
)
def test_paths_are_a_folder_and_a_pattern(path, base, pattern):
    assert base_of(path) == (base, pattern)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("a/b.tar", None, True),
        ("a/b.txt", None, False),
        ("b.tar", "*.tar", True),
        ("a/b.tar", "*.tar", False),
        ("a/b.tar", "**/*.tar", True),
        ("b.tar", "**/*.tar", True),
        ("a/c/b.tar", "a/*/b.tar", True),
    ],
)
def test_a_star_stays_in_its_folder(name, pattern, expected):
    assert matches(name, pattern, ".tar") is expected


def test_a_sample_whose_bytes_are_not_there_as_they_are_is_refused(tmp_path):
    """A hard link would be a sample lost, a sparse file the bytes of others; a size below 0 has no end."""

    def refused(words: str, *infos: tarfile.TarInfo) -> None:
        written = b"".join(info.tobuf(tarfile.GNU_FORMAT) for info in infos)
        with pytest.raises(TrainError, match=words) as caught:
            tars.members_of(io.BytesIO(written + bytes(1024)), "a.tar")
        assert (caught.value.where, caught.value.kind) == ("a.tar", "input")

    def info(name: str, **changes: object) -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        for key, value in changes.items():
            setattr(made, key, value)
        return made

    refused(
        "'1.cls' is a link to '0.cls'", info("0.cls"), info("1.cls", type=tarfile.LNKTYPE, linkname="0.cls")
    )
    refused("'1.cls' is a link to 'x'", info("1.cls", type=tarfile.SYMTYPE, linkname="x"))
    refused("'1.cls' is packed sparse", info("1.cls", type=tarfile.GNUTYPE_SPARSE))
    refused("this is no tar: damaged at byte 0", info("1", size=-512))
    refused("this is no tar: ", info("1.cls", size=2**63))
    refused("this is no tar: ", info("1", type=tarfile.XHDTYPE, size=2**63))


def test_pictures_keep_their_range_and_broken_ones_are_named(tmp_path):
    def png(image: Image.Image) -> bytes:
        written = io.BytesIO()
        image.save(written, "png")
        return written.getvalue()

    deep = np.array([[0, 13107, 65535]], dtype=np.uint16)
    assert tars.decoded("png", png(Image.fromarray(deep))).tolist() == pytest.approx(
        np.array([[[0.0, 0.2, 1.0]]])
    )
    for mode in ("1", "LA"):
        assert tars.decoded("png", png(Image.new(mode, (2, 2)))).shape == (1, 2, 2)
    whole = png(Image.effect_noise((64, 64), 50))
    broken = {"cut": whole[: len(whole) // 2], "else": b"no picture"}
    path = sample_files.write_tar(tmp_path / "a.tar", {name: {"png": one} for name, one in broken.items()})
    made = tars.TarSamples(
        plan := FilesPlan("tars", str(path), None, {}, None), str(path), Fields(plan, 1), 0
    )
    for index, words in enumerate((r"sample 'cut': \.png: .*truncated", r"sample 'else': \.png: this is no")):
        with pytest.raises(TrainError, match=words) as caught:
            made[index]
        assert caught.value.where == str(path)


def test_an_index_that_is_not_of_these_tars_is_refused(tmp_path):
    for number in range(2):
        sample_files.write_tar(tmp_path / f"{number}.tar", {"a": {"cls": b"1"}})
    assert tar_index.write_index(str(tmp_path)) == 2
    assert [one.num_samples for one in tars.find_tars(str(tmp_path))] == [1, 1]
    sample_files.write_tar(tmp_path / "1.tar", {"a": {"npy": bytes(20_000)}})
    with pytest.raises(TrainError, match=r"bytes, and index.json says") as caught:
        tars.find_tars(str(tmp_path))
    assert caught.value.where == f"{tmp_path}/1.tar"
    (tmp_path / "1.tar").unlink()
    with pytest.raises(TrainError, match="it is not there") as caught:
        tars.find_tars(str(tmp_path))
    assert f"mlpipe-index {tmp_path}" in (caught.value.hint or "")
    index = json.loads((tmp_path / "index.json").read_text())
    twice = json.dumps(index | {"tars": index["tars"] * 2}).encode()
    with pytest.raises(TrainError, match="stands there twice"):
        tars.read_index(twice, "here")


def test_bytes_that_a_bucket_does_not_give_are_not_read_over(bucket, folder, monkeypatch):
    """pyarrow copies what it gets, however much."""
    (file,) = data_files.find_files("s3://bucket/parquet/train-0.parquet", ".parquet")[1]
    opened = data_files.RangeFile("s3://bucket/parquet", file)
    monkeypatch.setattr(opened.store, "get", lambda key, start, length: bytes(length + 1))
    with pytest.raises(StoreError, match=r"9 bytes came of 8 from byte 0 on"):
        opened.read(8)


def test_what_cannot_be_stacked_is_told_with_its_sample_and_file(tmp_path):
    samples = {"a": {"json": b"1"}, "b": {"json": b'"x"'}, "c": {"json": b"[9223372036854775808]"}}
    path = str(sample_files.write_tar(tmp_path / "a.tar", samples))
    dataset = tars.TarSamples(plan := FilesPlan("tars", path, None, {}, None), path, Fields(plan, 1), 0)
    for indices, words in (
        ([0, 1], r"samples 0 and 1 .*: json \(\) and json str"),
        ([1], "at 1 gives json str, not a dict"),
        ([2], "sample 'c': .json: 9223372036854775808 does not fit"),
    ):
        with pytest.raises(TrainError, match=words) as caught:
            collate(dataset, np.array(indices))
        assert caught.value.where == path


def test_columns_may_have_dots_in_their_names(tmp_path):
    table = pa.table({"a.b": [1], "a": [2], "a.c": [3], "n": [{"x": 4, "y": 5}]})
    pq.write_table(table, tmp_path / "a.parquet")
    group = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    columns = [group.column(i) for i in range(5)]
    sizes = [column.total_compressed_size for column in columns]
    assert parquet._span(group, {"a.b"}) == (4, sizes[0])
    assert parquet._span(group, {"a"})[1] >= sizes[1]
    assert parquet._span(group, {"n"})[1] == sum(sizes[3:])


def test_a_mixture_may_have_them(folder):
    tars_too = SourcePlan(1.0, None, None, None, None, files_of("tars", folder))
    mix = (SourcePlan(2.0, None, None, None, None, files_of("parquet", folder)), tars_too)
    own = SourcePlan(1.0, None, Entry("kit.own_data:numbers", {"size": 5, "base": 900}), None)
    dataset = open_dataset(DataPlan(None, None, None, mix=(*mix, own)), split="train", seq_len=1)
    found = [index for step in range(16) for index, _ in taken(dataset, 5 * step, 2)]
    assert sum(index >= 900 for index in found) == 20
    assert {index for index in found if index < 900} == set(range(NUM))
    assert "16 samples in 7 pieces" in (fingerprint(dataset) or "")
    assert "16 samples in 4 pieces" in (fingerprint(dataset) or "")


def test_other_files_than_those_of_the_checkpoint_are_refused(folder, tmp_path):
    plan = plans.train_plan("store", plans.write_tokens(tmp_path), steps=1).work
    plan = plan._replace(data=data_of(files_of("parquet", folder)))
    dataset = open_dataset(plan.data, split="train", seq_len=1)
    check_files({}, dataset, plan, "run")
    check_files({"data_files": fingerprint(dataset)}, dataset, plan, "run")
    sample_files.write_parquet(tmp_path / "parquet", [5, 1, 8, 2])
    other = open_dataset(data_of(files_of("parquet", tmp_path)), split="train", seq_len=1)
    with pytest.raises(
        TrainError, match=r"16 samples in 7 pieces .* at the checkpoint, and are 16"
    ) as caught:
        check_files({"data_files": fingerprint(other)}, dataset, plan, "run")
    assert "--from-step 0" in (caught.value.hint or "")
    own = DataPlan(None, Entry("kit.own_data:numbers", {"size": 5, "base": 900}), None)
    few, plan = open_dataset(own, split="train", seq_len=1), plan._replace(data=own)
    check_files({"data_files": fingerprint(few)}, few, plan, "run")
    with pytest.raises(TrainError, match="were 6 samples at the checkpoint, and are 5 samples"):
        check_files({"data_files": fingerprint([*range(6)])}, few, plan, "run")
    longer = {"data_files": fingerprint([*range(6)]), "meaning": {"seed": 0, "data.args.size": 6}}
    check_files(longer, few, plan._replace(meaning={"seed": 1, "data.args.size": 5}), "run")  # --allow-change
    with pytest.raises(TrainError, match="were 6 samples at the checkpoint"):
        check_files(longer, few, plan._replace(meaning={"seed": 1, "data.args.size": 6}), "run")


def test_a_mixture_is_held_to_what_its_checkpoint_tells_of_it(folder, tmp_path):
    plan = plans.train_plan("store", plans.write_tokens(tmp_path), steps=1).work
    parquet = SourcePlan(1.0, None, None, None, None, files_of("parquet", folder))
    own = SourcePlan(1.0, None, Entry("kit.own_data:numbers", {"size": 5, "base": 900}), None)
    plan = plan._replace(data=DataPlan(None, None, None, mix=(parquet, own)))
    mixed = open_dataset(plan.data, split="train", seq_len=1)
    words = fingerprint(mixed) or ""
    assert words.endswith("), 5 samples")
    check_files({"data_files": words.removesuffix(", 5 samples")}, mixed, plan, "run")  # of an older mlpipe
    with pytest.raises(TrainError, match=r", 6 samples at the checkpoint, and are .*, 5 samples"):
        check_files({"data_files": words.replace("), 5", "), 6")}, mixed, plan, "run")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_at_its_sample_under_another_strategy(folder, tmp_path, kind):
    """Interrupted in the middle of an epoch; with other ranks and processes that read."""
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=3_000)

    def training(run_id: str, steps: int, *, ranks: int, workers: int = 0, attempt: int = 1):
        strategy = "single" if ranks == 1 else "fsdp" if kind == "parquet" else "ddp"
        made = plans.train_plan(
            tmp_path / "store", tokens, run_id=run_id, steps=steps, every=4, attempt=attempt,
            world_size=ranks, strategy=strategy,
        )  # fmt: skip
        model = ModelPlan(Entry("kit.own:stateless", {}), None, 1, ())
        data = data_of(files_of(kind, folder), workers=workers)
        return replace(made, work=made.work._replace(model=model, data=data))

    plans.run_together([training("whole", 8, ranks=1), training("cut", 4, ranks=1)], tmp_path / "one")
    plans.run_together([training("cut", 8, ranks=2, workers=3, attempt=2)], tmp_path / "two")
    whole = plans.losses(tmp_path / "store", training("whole", 8, ranks=1))
    first = plans.losses(tmp_path / "store", training("cut", 4, ranks=1))
    second = plans.losses(tmp_path / "store", training("cut", 8, ranks=2, attempt=2))
    assert first == whole[:4]
    assert second == pytest.approx(whole[4:], rel=1e-5)
    assert len(set(whole)) == 8


def test_an_index_is_refused_that_names_files_elsewhere(tmp_path):
    for one in (
        {"file": "../a.tar"}, {"file": "/a.tar"}, {"file": "a\0"}, {"sha256": "x"}, {"num_samples": "many"},
        {"num_samples": -1}, {"num_samples": 2**70}, {"size_bytes": -1}, {"size_bytes": float("inf")},
    ):  # fmt: skip
        entry = {"file": "a.tar", "size_bytes": 1, "sha256": "0" * 64, "num_samples": 1, **one}
        with pytest.raises(TrainError, match="this is no index of tars"):
            tars.read_index(json.dumps({"format": 1, "tars": [entry]}).encode(), "here")
    assert np.array(sample_files.SIZES).sum() == NUM
