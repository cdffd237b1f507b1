"""`torchrun -m kit.many LIST`: runs the stages of several plans one after the other in one set of workers.

Importing torch costs seconds a process; the tests that compare many strategies pay it once. LIST is a
JSON file: [[path of plan.json, scratch folder], ...]. Failures are written where the launcher's workers
write them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist

from mlpipe.plan.plan import Plan
from mlpipe.train import outcome
from mlpipe.train.session import Session
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import Watchdog
from mlpipe.train.worker import Place


def main() -> int:
    place = Place.from_environment()
    first_port = int(os.environ["MASTER_PORT"])
    failed = False
    for number, (path, folder) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        # a store of its own for every plan, as in separate runs
        os.environ["MASTER_PORT"] = str(first_port + number)
        scratch = Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        stop = Stop(
            scratch,
            rank=place.rank,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            restart=0,
        )
        plan = Plan.from_json(Path(path).read_bytes())
        watchdog = Watchdog(scratch, rank=place.rank, timeout_seconds=600)
        progress = [0]
        try:
            session = Session(plan, place, stop, watchdog, time.time())
            outcome.write(scratch, session.run(progress))
            session.close()
        except Exception as error:
            traceback.print_exc()
            outcome.write(scratch, outcome.failed(error, rank=place.rank, step=progress[0]))
            failed = True
        dist.barrier()
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
