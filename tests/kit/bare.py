"""`kit.bare MODULE ...`, a fork of `kit/warm.py`: as `python -m MODULE ...` where torch and NumPy are, but
nothing else that mlpipe depends on. mlpipe is imported anew; a launcher that it starts begins as its fork."""

from __future__ import annotations

import runpy
import subprocess
import sys
from typing import Any

from kit.warm import Inside, call_of, has_one_thread

ABSENT = (
    "pydantic", "pydantic_core", "minio", "prometheus_client", "click", "yaml", "kubernetes", "tokenizers",
    "safetensors", "urllib3",
)  # fmt: skip


class Absent:
    """Of sys.meta_path."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Begins(Inside):
    """What a subprocess.Popen is there."""

    def _execute_child(self, *given: Any) -> None:
        call = call_of(self, *given)
        if call["args"][1:3] == ["-m", "mlpipe.train.launcher"] and has_one_thread():
            self._fork(call)
        else:
            super()._execute_child(*given)


def main() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] in (*ABSENT, "mlpipe"):
            del sys.modules[name]
    sys.meta_path.insert(0, Absent())
    subprocess.Popen = Begins  # type: ignore[misc]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
