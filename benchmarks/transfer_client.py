"""One client of `benchmarks.transfer`, a process of its own in its peer's environment: it reads commands
("upload", "download", "clean") from standard input and answers each with JSON: wall and CPU seconds.

`python transfer_client.py CLIENT MIB`, with the usual AWS variables and BUCKET. Imports nothing of mlpipe but
for mlpipe's own side. All sides: parts of 16 MiB, four at a time, unless their name says otherwise.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import numpy

PART_BYTES = 16 * 2**20
NUM_THREADS = 4
ENDPOINT = os.environ["AWS_ENDPOINT_URL_S3"]
BUCKET = os.environ["BUCKET"]
REGION = os.environ["AWS_REGION"]
KEYS = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])


def summed(part) -> int:
    """CRC32C by the fastest checksum there is for Python, without a copy of what a client gave."""
    if not isinstance(part, bytes):
        view = numpy.frombuffer(part, numpy.uint8)
        part = (ctypes.c_char * len(view)).from_address(view.ctypes.data)
    return google_crc32c.value(part)


def verify(found: list[int], sums: list[int]) -> None:
    if found != sums:
        raise SystemExit("what came back is not what was sent")


def ranges(size_bytes: int) -> list[tuple[int, int]]:
    return [(start, min(start + PART_BYTES, size_bytes)) for start in range(0, size_bytes, PART_BYTES)]


class Mlpipe:
    """`write_blob` and `read_blob`: objects of 64 MiB, blocks of 16 MiB with a CRC32C each."""

    def __init__(self, data: bytes) -> None:
        from mlpipe.store.open import open_store

        self.store = open_store(f"s3://{BUCKET}/mlpipe")
        self.data = bytearray(data)  # as a checkpoint's buffer is: it may be written to
        self.target = bytearray(len(data))

    def upload(self) -> None:
        from mlpipe.store.blobs import write_blob

        view = memoryview(self.data)
        self.blob = write_blob(self.store, "blob", (view[a:b] for a, b in ranges(len(view))))

    def download(self) -> None:
        from mlpipe.store.blobs import read_blob

        read_blob(self.store, self.blob, 0, self.target)

    def clean(self) -> None:
        self.store.delete([info.key for info in self.store.list("")])


class Peer:
    """`get` returns the bytes from start to end of the object."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.sums = [summed(data[a:b]) for a, b in ranges(len(data))]

    def get(self, start: int, end: int) -> bytes:
        raise NotImplementedError

    def download(self) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            found = list(pool.map(self.get_summed, ranges(self.size_bytes)))  # it is all there in the end
        verify([one for _, one in found], self.sums)

    def get_summed(self, one: tuple[int, int]) -> tuple[object, int]:
        part = self.get(*one)
        return part, summed(part)


class Obstore(Peer):
    """SHA-256 of every part, checked by the server as part of the signature."""

    unsigned = False

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        import obstore
        from obstore.store import S3Store

        self.obstore = obstore
        options = {"aws_unsigned_payload": "true"} if self.unsigned else {}
        self.store = S3Store(
            BUCKET, endpoint=ENDPOINT, region=REGION, access_key_id=KEYS[0], secret_access_key=KEYS[1],
            virtual_hosted_style_request=False, client_options={"allow_http": True}, config=options,
        )  # fmt: skip

    def upload(self) -> None:
        self.obstore.put(
            self.store, "object", self.data, use_multipart=True, chunk_size=PART_BYTES,
            max_concurrency=NUM_THREADS,
        )  # fmt: skip

    def get(self, start: int, end: int) -> bytes:
        return self.obstore.get_range(self.store, "object", start=start, end=end)

    def clean(self) -> None:
        self.obstore.delete(self.store, "object")


class ObstoreUnsigned(Obstore):
    """Nothing verifies an upload: shown for its cost, not a peer of what is verified."""

    unsigned = True


class Boto3(Peer):
    """At its defaults for integrity: CRC32 of every part, checked by the server."""

    parts = PART_BYTES
    threads = NUM_THREADS

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.client = boto3.client(
            "s3", endpoint_url=ENDPOINT, region_name=REGION, aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1], config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip
        self.settings = TransferConfig(
            multipart_chunksize=self.parts, multipart_threshold=self.parts, max_concurrency=self.threads
        )

    def upload(self) -> None:
        self.client.upload_fileobj(io.BytesIO(self.data), BUCKET, "boto3", Config=self.settings)

    def get(self, start: int, end: int) -> bytes:
        reply = self.client.get_object(Bucket=BUCKET, Key="boto3", Range=f"bytes={start}-{end - 1}")
        return reply["Body"].read()

    def clean(self) -> None:
        self.client.delete_object(Bucket=BUCKET, Key="boto3")


class Boto3Default(Boto3):
    """Its own sizes: parts of 8 MiB, ten at a time."""

    parts = 8 * 2**20
    threads = 10


class MinioPy(Peer):
    """SHA-256 of every part over HTTP, checked by the server as part of the signature."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        from minio import Minio

        host = ENDPOINT.removeprefix("http://")
        self.client = Minio(host, access_key=KEYS[0], secret_key=KEYS[1], region=REGION, secure=False)

    def upload(self) -> None:
        self.client.put_object(
            BUCKET, "minio", io.BytesIO(self.data), len(self.data), part_size=PART_BYTES,
            num_parallel_uploads=NUM_THREADS,
        )  # fmt: skip

    def get(self, start: int, end: int) -> bytes:
        reply = self.client.get_object(BUCKET, "minio", offset=start, length=end - start)
        try:
            return reply.read()
        finally:
            reply.close()
            reply.release_conn()

    def clean(self) -> None:
        self.client.remove_object(BUCKET, "minio")


class S3TorchConnector(Peer):
    """CRC32C of every part, checked by the server; its runtime chooses how many at a time."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        from s3torchconnector._s3client import S3Client, S3ClientConfig

        settings = S3ClientConfig(part_size=PART_BYTES, force_path_style=True)
        self.client = S3Client(REGION, endpoint=ENDPOINT, s3client_config=settings)

    def upload(self) -> None:
        with self.client.put_object(BUCKET, "connector") as writer:
            writer.write(self.data)

    def download(self) -> None:
        data = self.client.get_object(BUCKET, "connector").read()
        view = memoryview(data)
        verify([summed(view[a:b]) for a, b in ranges(len(view))], self.sums)

    def clean(self) -> None:
        self.client.delete_object(BUCKET, "connector")


CLIENTS: dict[str, Callable] = {
    "mlpipe": Mlpipe,
    "obstore": Obstore,
    "obstore again": Obstore,
    "obstore, unverified": ObstoreUnsigned,
    "s3torchconnector": S3TorchConnector,
    "boto3": Boto3,
    "boto3 default": Boto3Default,
    "minio-py": MinioPy,
}


def main() -> None:
    size_bytes = int(sys.argv[2]) * 2**20
    client = CLIENTS[sys.argv[1]](os.urandom(size_bytes))
    print("ready", flush=True)
    for line in sys.stdin:
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        getattr(client, line.strip())()
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu}), flush=True)


if __name__ == "__main__":
    main()
