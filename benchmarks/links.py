"""`python -m benchmarks.links` (as root): what compressed gradients and DiLoCo are worth over slow links.

Two network namespaces, a pair of veth between them, and a token bucket (tbf) on each end, made and removed
here. Each has one rank of the real trainer. A byte-level Llama of 0.8 million parameters learns Python's
standard library.

- Bytes are those that leave the first rank's interface, headers, start and validation included.
- Losses are of held-out text after equal steps, over the unshaped link, since they do not depend on its
  speed. `--seeds` judges; what was to be chosen (the outer momentum) was chosen with `--tune`, which has a
  seed of its own.
- Seconds a step are the median of a short run at each rate. They mean something on two idle cores only.
- `loss after equal time`: of the training at the step that is reached in the time that ddp needs for a
  quarter of its steps, by the curve of the long run and the seconds of the short one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks import measure
from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Launch, Plan
from mlpipe.plan.updates import CompressPlan, IslandsPlan, OptimizerPlan
from mlpipe.plan.validation import MetricPlan, ValidatePlan
from mlpipe.plan.work import CheckpointPlan, TrainPlan

_LONGEST_SECONDS = 4 * 3600.0  # of all trainings of a seed
RATES = (20, 100, 1000)  # Mbit/s
SEQ_LEN, BATCH = 128, 16
HELD_OUT_TOKENS = 65_536
CONFIG = LlamaConfig(
    vocab_size=256,
    dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    ffn_dim=352,
    max_seq_len=SEQ_LEN,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=True,
)
COMPRESSED: dict[str, CompressPlan | None] = {
    "ddp": None,
    "fp16": CompressPlan("fp16"),
    "int8": CompressPlan("int8"),
    "int4": CompressPlan("int4"),
    "powersgd 16": CompressPlan("powersgd", {"rank": 16}),
    "powersgd 8": CompressPlan("powersgd", {"rank": 8}),
    "topk 5 %": CompressPlan("topk", {"ratio": 0.05}),
}
BEST = "powersgd 16"  # of these the one that is to reach the goals
MOMENTUM = 0.5  # by --tune
ISLANDS = {
    "local_sgd 20": IslandsPlan(20),
    "diloco 20, fp16": IslandsPlan(20, 0.7, MOMENTUM, "fp16"),
    "diloco 50, int8, 4 fragments": IslandsPlan(50, 0.7, MOMENTUM, "int8", 4),
}


@dataclass(frozen=True, eq=False)
class Work:
    """One training. `world_size`: 2, or of the worker that is alone 1, with half the batch."""

    name: str
    steps: int
    seed: int
    compress: CompressPlan | None = None
    islands: IslandsPlan | None = None
    world_size: int = 2

    @property
    def run_id(self) -> str:
        words = "".join(letter if letter.isalnum() else "-" for letter in self.name)
        return f"{words}-{self.steps}-{self.seed}"


@dataclass(frozen=True)
class Found:
    """Of a training: bytes that rank 0 sent, seconds and loss of each step, loss on held-out text."""

    sent_bytes: int
    seconds: list[float]
    losses: list[float]
    held_out: float


def write_tokens(folder: Path, most: int) -> Path:
    """Bytes of the standard library: of each 32 files one is held out."""
    folder.mkdir(parents=True)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    splits = {}
    for name, some in (
        ("train", [file for number, file in enumerate(files) if number % 32]),
        ("validation", files[::32]),
    ):
        data = array("H", list(b"\n".join(file.read_bytes() for file in some)[:most])).tobytes()
        (folder / f"{name}.bin").write_bytes(data)
        splits[name] = {
            "file": f"{name}.bin",
            "num_tokens": len(data) // 2,
            "num_bytes": len(data) // 2,
            "sha256": sha256(data).hexdigest(),
        }
    about = {"format": 1, "dtype": "uint16", "vocab_size": 256, "tokenizer": None, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(about))
    return folder


def plan_of(work: Work, folder: Path, held_out_tokens: int) -> Plan:
    batch = BATCH * work.world_size // 2
    train = TrainPlan(
        model=ModelPlan(Entry("mlpipe.train.models.llama:build_model", asdict(CONFIG)), "links", SEQ_LEN, ()),
        data=DataPlan(str(folder / "tokens"), None, None),
        optimizer=OptimizerPlan(
            name="adamw",
            entry=None,
            args={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            state_bytes_per_parameter=8,
            lr=2e-3,
            grad_clip=1.0,
            schedule="cosine",
            warmup_steps=min(20, work.steps),
            decay_steps=0,
            min_lr_ratio=0.1,
        ),
        checkpoint=CheckpointPlan(every_steps=10**9, every_seconds=None, keep=1, asynchronous=True),
        steps=work.steps,
        global_batch=batch,
        micro_batch=BATCH // 2,
        accumulation=1,
        strategy="ddp" if work.world_size > 1 else "single",
        mesh=Mesh(dp_replicate=work.world_size),
        reason="to be measured",
        precision="fp32",
        activation_checkpointing="none",
        compile="off",
        deterministic=False,
        seed=work.seed,
        hang_timeout_seconds=1800.0,
        num_flops_per_token=1e7,
        peak_flops=1e11,
        peak_name="no matter",
        resume=False,
        compress=work.compress,
        islands=work.islands,
        validate=ValidatePlan(every_steps=10**9, max_tokens=held_out_tokens, metrics=(MetricPlan("loss"),)),
    )
    return Plan(
        schema_version=1,
        run_id=work.run_id,
        pipeline="links",
        stage="train",
        attempt=1,
        store_url=str(folder / "store"),
        spec_digest="0" * 64,
        code_digest="0" * 64,
        launch=Launch(2, 1, 0, "cpu", (), {}, None, 60.0, None),
        work=train,
    )


def _call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Link:
    """Two namespaces, and an interface in each."""

    namespaces: tuple[str, str]
    interfaces: tuple[str, str]

    def shape(self, mbit: int) -> None:
        """From now on each end sends so much a second at most."""
        burst = max(131_072, mbit * 1_000_000 // 8 // 100)
        for namespace, interface in zip(self.namespaces, self.interfaces, strict=True):
            tbf = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst), "latency", "400ms")
            _call("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", interface, *tbf)


@contextmanager
def link() -> Iterator[Link]:
    """Removed at the end, whatever happens."""
    number = os.getpid()
    made = Link((f"links-{number}-0", f"links-{number}-1"), (f"lk{number}a", f"lk{number}b"))
    with ExitStack() as stack:
        for namespace in made.namespaces:
            _call("ip", "netns", "add", namespace)
            stack.callback(_call, "ip", "netns", "delete", namespace)
        first, second = made.interfaces
        _call("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for end, (namespace, interface) in enumerate(zip(made.namespaces, made.interfaces, strict=True)):
            _call("ip", "link", "set", interface, "netns", namespace)
            _call("ip", "-n", namespace, "address", "add", f"10.213.77.{end + 1}/24", "dev", interface)
            _call("ip", "-n", namespace, "link", "set", interface, "up")
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
        yield made


def trained(works: Sequence[Work], over: Link, folder: Path, held_out_tokens: int) -> dict[Work, Found]:
    """One after the other, by a pair of processes that live in the namespaces."""
    sizes = {work.world_size for work in works}
    if len(sizes) > 1:
        parts = [
            trained([one for one in works if one.world_size == size], over, folder, held_out_tokens)
            for size in sizes
        ]
        return {work: found for part in parts for work, found in part.items()}
    run = Path(tempfile.mkdtemp(dir=folder))
    entries, plans = (
        [],
        [replace(plan_of(work, folder, held_out_tokens), store_url=str(run / "store")) for work in works],
    )
    for number, plan in enumerate(plans):
        path = run / f"plan-{number}.json"
        path.write_text(plan.to_json())
        entries.append([str(path), str(run / f"scratch-{number}"), 29_500 + number])
    (run / "list.json").write_text(json.dumps(entries))
    (world_size,) = sizes
    with ExitStack() as stack:
        processes, logs = [], []
        for rank in range(world_size):
            logs.append(stack.enter_context((run / f"rank-{rank}.log").open("w+")))
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": "1",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "MASTER_ADDR": "10.213.77.1",
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": over.interfaces[rank],
                "OMP_NUM_THREADS": "1",
            }
            argv = ["ip", "netns", "exec", over.namespaces[rank], sys.executable]
            argv += ["-m", "benchmarks.links_worker", str(run / "list.json"), over.interfaces[rank]]
            out: Any = subprocess.PIPE if rank == 0 else logs[rank]
            process = subprocess.Popen(argv, env=environment, stdout=out, stderr=logs[rank], text=True)
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            processes.append(process)
        told, _ = processes[0].communicate(timeout=_LONGEST_SECONDS)
        codes = [process.wait(timeout=120) for process in processes]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}: {(run / 'rank-0.log').read_text()[-3000:]}")
    sent = [json.loads(line) for line in told.splitlines() if line.strip().isdigit()]
    return {work: _read(plan, number, run) for work, plan, number in zip(works, plans, sent, strict=True)}


def _read(plan: Plan, sent_bytes: int, run: Path) -> Found:
    path = run / "store" / plan.attempt_key / "records" / "rank-0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [one for one in records if one["kind"] == "step"]
    held_out = [one for one in records if one["kind"] == "validation"][-1]["metrics"]["loss"]
    return Found(sent_bytes, [one["seconds"] for one in steps], [one["loss"] for one in steps], held_out)


def works_of(steps: int, long_steps: int, seed: int, only: Sequence[str]) -> list[Work]:
    """Compressions over `steps`; islands, with ddp and a worker that is alone, over `long_steps`. `only`:
    some names, beside ddp."""
    found = [Work(name, steps, seed, one) for name, one in COMPRESSED.items() if name in ("ddp", *only)]
    islands = [Work(name, long_steps, seed, islands=one) for name, one in ISLANDS.items() if name in only]
    if islands:
        found += [*islands, Work("ddp", long_steps, seed), Work("alone", long_steps, seed, world_size=1)]
    return list({work.run_id: work for work in found}.values())


def rows_of(
    found: Mapping[Work, Found], seconds: Mapping[tuple[str, int], float], steps: int, long_steps: int
) -> list[dict[str, Any]]:
    """`found`: of several seeds; `seconds`: of a step by name and rate."""
    rows = []
    seeds = sorted({work.seed for work in found})

    def values(name: str, number: int) -> list[Found]:
        named = {work.seed: one for work, one in found.items() if (work.name, work.steps) == (name, number)}
        return [named[seed] for seed in seeds]

    there = {(work.name, work.steps) for work in found if work.name in {*COMPRESSED, *ISLANDS}}
    for name, number in sorted(there, key=lambda one: (one[1], [*COMPRESSED, *ISLANDS].index(one[0]))):
        ours, plain = values(name, number), values("ddp", number)
        pairs = list(zip(ours, plain, strict=True))
        goals: dict[str, float] = {}
        if name == BEST:
            goals = {"bytes": 9.0, "loss": 0.03, "steps": 4.0}
        elif name.startswith("diloco 20"):
            goals = {"bytes": 20.0, "loss": 0.05, "gap": 0.6}
        elif name.startswith("diloco 50"):
            goals = {"bytes": 50.0}
        work = f"{name}, {number} steps"
        if name != "ddp":
            fewer = [b.sent_bytes / a.sent_bytes for a, b in pairs]
            more = [a.held_out - b.held_out for a, b in pairs]
            rows.append(
                measure.alone(
                    work, "times fewer bytes", "x", fewer, goal=goals.get("bytes"), higher_is_better=True
                )
            )
            # of the means over the seeds, of which each alone is noise
            row = measure.alone(
                work, "loss above ddp's", "nats", [statistics.mean(more)], goal=goals.get("loss")
            )
            rows.append({**row, "by_seed": more})
        else:
            rows.append(measure.alone(work, "held-out loss", "nats", [one.held_out for one in plain]))
        if name in ISLANDS:
            alone = values("alone", number)
            means = [statistics.mean(one.held_out for one in some) for some in (alone, ours, plain)]
            closed = (means[0] - means[1]) / (means[0] - means[2])
            rows.append(
                measure.alone(
                    work,
                    "gap to one worker closed",
                    "ratio",
                    [closed],
                    goal=goals.get("gap"),
                    higher_is_better=True,
                )
            )
        for rate in sorted({rate for _, rate in seconds}):
            own, theirs = seconds[name, rate], seconds["ddp", rate]
            words = f"at {rate} Mbit/s"
            rows.append(measure.alone(work, f"tokens a second {words}", "1/s", [BATCH * SEQ_LEN / own]))
            faster = [theirs / own]
            goal = goals.get("steps") if rate == RATES[0] else None
            rows.append(
                measure.alone(work, f"times faster {words}", "x", faster, goal=goal, higher_is_better=True)
            )
            reached = min(number, max(1, int(number / 4 * theirs / own)))
            losses = [statistics.mean(one.losses[max(0, reached - 20) : reached]) for one in ours]
            rows.append(measure.alone(work, f"loss after equal time {words}", "nats", losses))
    return rows


def tuned(over: Link, folder: Path, steps: int) -> list[tuple[float, float]]:
    """Held-out loss by outer momentum, with a seed that does not judge."""
    works = {
        m: Work(f"momentum {m}", steps, 0, islands=IslandsPlan(20, 0.7, m)) for m in (0.0, 0.3, 0.5, 0.7, 0.9)
    }
    found = trained(list(works.values()), over, folder, HELD_OUT_TOKENS)
    return [(momentum, found[work].held_out) for momentum, work in works.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of each: does it run?")
    parser.add_argument("--tune", action="store_true", help="only try outer momenta, on a seed of their own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=400, help="of the compressions")
    parser.add_argument("--long-steps", type=int, default=1000, help="of the islands")
    parser.add_argument("--timed-steps", type=int, default=20, help="at each rate")
    parser.add_argument("--only", nargs="+", default=[*COMPRESSED, *ISLANDS], help="some of them, beside ddp")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    steps, long_steps, timed = arguments.steps, arguments.long_steps, arguments.timed_steps
    seeds, rates, only, held_out_tokens = arguments.seeds, RATES, arguments.only, HELD_OUT_TOKENS
    if arguments.quick:
        steps, long_steps, timed, seeds, rates, held_out_tokens = 2, 3, 2, seeds[:1], RATES[-1:], 1024
        only = [BEST]
    if os.geteuid():
        parser.error("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    load_before = os.getloadavg()[0]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name, link() as over:
        folder = Path(name)
        write_tokens(folder / "tokens", 200_000 if arguments.quick else 4_000_000)
        if arguments.tune:
            for momentum, loss in tuned(over, folder, long_steps):
                print(f"outer momentum {momentum}: {loss:.4f}")
            return 0
        found: dict[Work, Found] = {}
        for seed in seeds:
            found |= trained(works_of(steps, long_steps, seed, only), over, folder, held_out_tokens)
        seconds: dict[tuple[str, int], float] = {}
        short = [one for one in works_of(timed, timed, seeds[0], only) if one.world_size > 1]
        for rate in rates:
            over.shape(rate)
            for work, one in trained(short, over, folder, 1024).items():
                # a mean for islands, of which few steps send
                middle = statistics.mean if work.islands is not None else statistics.median
                seconds[work.name, rate] = middle(one.seconds[1:])
    rows = rows_of(found, seconds, steps, long_steps)
    body = measure.document(
        rows, steps=steps, long_steps=long_steps, seeds=seeds, load_before=load_before,
        minutes=round((time.monotonic() - began) / 60, 1),
    )  # fmt: skip
    measure.publish("links", body, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
