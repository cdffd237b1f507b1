"""`python -m benchmarks.gpu`: mlpipe on one GPU against a raw PyTorch loop, the plan and published figures.

GPT-2 124M, 350M and 1.5B at 1,024 tokens and Llama 1B at 4,096, bf16: speed, MFU, peak memory; LoRA beside
weights of 32, 8 and 4 bits, packed samples, compile, attention back ends, checkpointing, losses and float8 as
variants. Each case runs in a process of its own with
a deadline, the most important first, within an overall budget; results are written after each. It needs
PyTorch and NumPy and, from a checkout, PYTHONPATH=src. Without a GPU `--device cpu --tiny` shows in a minute
that it runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.gpu import rows, work
from benchmarks.gpu.work import Case, Model
from mlpipe.train.stop import any_alive

ROOT = Path(__file__).parents[2]
_LEAST_SECONDS = 20.0  # a case that has less cannot end
_PROBE = """
import importlib.metadata, importlib.util, json, torch
found = {"torch": torch.__version__, "torchao": importlib.util.find_spec("torchao") is not None}
found["scaled_mm"] = hasattr(torch, "_scaled_mm")
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    found |= {"name": device.name, "memory_bytes": device.total_memory, "sms": device.multi_processor_count}
    found |= {"capability": [device.major, device.minor], "cuda": torch.version.cuda}
    found["cudnn"] = torch.backends.cudnn.version()
    if importlib.util.find_spec("triton"):
        found["triton"] = importlib.metadata.version("triton")
print(json.dumps(found))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of thousands of parameters: does it run?")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds in all (460)")
    parser.add_argument("--only", action="append", help="cases by name; * for anything; repeatable")
    parser.add_argument("--list", action="store_true", help="the cases in their order, and nothing else")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    cases: list[Case] = list(work.TINY_CASES if arguments.tiny else work.CASES)
    if arguments.only:
        cases = [case for case in cases if any(fnmatchcase(case.name, one) for one in arguments.only)]
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has this name")
        return 0 if cases else 2
    deadline = time.monotonic() + arguments.budget
    machine = probe()
    if arguments.device == "cuda" and "name" not in machine:
        print("no GPU that torch can use; --device cpu --tiny shows that the suite runs", file=sys.stderr)
        return 2
    load_before = os.getloadavg()[0]
    suite = Suite(arguments.device, work.TINY if arguments.tiny else work.MODELS, machine)
    settings = {"budget_seconds": arguments.budget, "tiny": arguments.tiny, "load_before": load_before}
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases:
            found = suite.run(case, Path(name), deadline)
            print(rows.table(found), flush=True)
            path = measure.add("gpu", suite.document(found, **settings), arguments.results)
            figures += found
    # beside what an earlier command left of the model, too
    there = json.loads(path.read_text())["figures"]
    compared = rows.variants(there, cases, suite.models)
    print(rows.table(compared))
    measure.add("gpu", suite.document(compared, **settings), arguments.results, by=("work", "figure"))
    print(f"merged into {path}")
    return 0 if any(row["ours"] is not None for row in figures) else 1


class Suite:
    def __init__(self, device: str, models: dict[str, Model], machine: dict[str, Any]) -> None:
        self.device, self.models, self.machine = device, models, machine
        known = work.gpu_of(machine.get("name", ""))
        self.peak = known[1].bf16 if known and device == "cuda" else None
        self.peak_name = (
            f"{known[0]} datasheet, dense bf16" if self.peak and known else "measured matmul peak"
        )
        self.memory_bytes = machine.get("memory_bytes", 2**30) if device == "cuda" else 2**30

    def run(self, case: Case, folder: Path, deadline: float) -> list[dict[str, Any]]:
        """The rows of `case`; the first has how it was run."""
        model = self.models[case.model]
        began = time.monotonic()
        seconds = min(case.seconds, deadline - began)
        predicted, details = None, None
        if seconds < _LEAST_SECONDS:
            answer: dict[str, Any] = {"error": "the budget was spent before it"}
        elif case.float8 and (reason := self.no_float8()):
            answer = {"error": reason}
        else:
            plan = work.plan_of(
                case,
                model,
                folder,
                device=self.device,
                memory_bytes=self.memory_bytes,
                peak=self.peak,
                peak_name=self.peak_name,
            )
            training = plan.work.training
            if training.predicted is not None:
                predicted = training.predicted.memory_bytes
            answer = measured(case, model, plan, folder, seconds)
            details = {
                "num_params": model.num_params(),
                "num_flops_per_token": training.num_flops_per_token,
                "micro_batch": training.micro_batch,
                "batch": model.batch,
                "seq_len": model.seq_len,
                "seconds": time.monotonic() - began,
                **{key: value for key, value in answer.items() if key != "rounds"},
            }
        first, *others = rows.rows_of(case, model, answer, predicted)
        return [first | ({"case": details} if details else {}), *others]

    def no_float8(self) -> str | None:
        """Why not: the kernel needs Ada, Hopper or later; a CPU has a slow one."""
        if not self.machine.get("scaled_mm"):
            return "this torch has no _scaled_mm"
        if self.device == "cuda" and tuple(self.machine["capability"]) < (8, 9):
            return "this GPU has no float8"
        return None

    def document(self, figures: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        body = measure.document(
            figures,
            device=self.device,
            mfu=rows.FORMULA,
            peak_flops=self.peak,
            peak_name=self.peak_name,
            **settings,
        )
        body["machine"] |= {"accelerator": self.machine.get("name"), "gpu": self.machine}
        return body


def measured(case: Case, model: Model, plan: Any, folder: Path, seconds: float) -> dict[str, Any]:
    """What the worker of `plan` left, under mlpipe's launcher, which is killed after `seconds`."""
    place = folder / plan.run_id
    place.mkdir()
    asked = {
        "answer": str(place / "answer.json"),
        "attention": case.attention,
        "loss": case.loss,
        "rounds": case.rounds,
        "control": not case.variant,
        "steps": model.steps,
    }
    env = {"BENCHMARK": json.dumps(asked), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    env["TRITON_CACHE_DIR"] = str(folder / "triton")
    (place / "plan.json").write_text(replace(plan, launch=plan.launch._replace(env=env)).to_json())
    argv = [sys.executable, "-m", "mlpipe.train.launcher", "--plan", str(place / "plan.json")]
    argv += ["--scratch", str(place / "scratch")]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    own = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited.get("PYTHONPATH"), own]))
    late = False
    with (place / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            argv, env=inherited, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)  # torchrun and the worker die with it
            process.wait(10)
            gone = time.monotonic() + 10
            while any_alive(place / "scratch") and time.monotonic() < gone:  # it holds the device's memory
                time.sleep(0.1)
    path = place / "answer.json"
    answer: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if late and not answer.get("complete"):
        answer.setdefault("error", f"cut off after {seconds:.0f} s")
    if not answer.get("rounds"):
        log_text = (place / "launcher.log").read_text(errors="replace").strip()
        words = log_text.splitlines()[-1][:300] if log_text else "no output"
        answer.setdefault("error", f"exit code {process.returncode}: {words}")
    return answer


def probe() -> dict[str, Any]:
    """In a process of its own: a context of ours would take memory from what is measured."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"torch does not run here: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    try:
        query = "--query-gpu=driver_version,power.limit,clocks.max.sm"
        smi = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
        found["driver, power limit, highest clock"] = smi.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        found["driver, power limit, highest clock"] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
