"""`python -I -S child.py PARENT_PID SIGNAL ARGV...`: becomes ARGV, and dies by SIGNAL when its parent dies.

A program of its own because the alternative, `preexec_fn`, runs Python between fork and exec of a process
with threads, which may deadlock. The setting survives exec; a child that was orphaned before it could ask
for it leaves at once.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1

parent_pid, death_signal, *argv = sys.argv[1:]
ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal))
if os.getppid() != int(parent_pid):
    os._exit(1)
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
    os._exit(126)
