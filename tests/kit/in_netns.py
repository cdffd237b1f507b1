"""`python -m kit.in_netns NAME MODULE ...`: as `ip netns exec NAME python -m MODULE ...`, in a fork too."""

from __future__ import annotations

import ctypes
import os
import runpy
import sys

_CLONE_NEWNET = 0x40000000


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/run/netns/{sys.argv[1]}", os.O_RDONLY), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {sys.argv[1]}")
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
