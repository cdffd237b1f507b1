"""The page about a run: whole, safe, small and quick, also of runs that went wrong."""

from __future__ import annotations

import html.parser
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from kit.synthetic_run import (
    BEGIN,
    Life,
    commit_checkpoint,
    life_records,
    stage_plan,
    stage_state,
    train_plan,
    write_quickstart,
    write_records,
    write_run,
    write_train_stage,
)

from mlpipe._core.errors import StoreError
from mlpipe._core.records import Fallback
from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.observe.report import build_markdown, build_report, write_report
from mlpipe.observe.runview import MOST_RANKS, view_run
from mlpipe.plan.data import ChatPlan, DataPlan
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.open import open_store
from mlpipe.store.preflight import Checked, write_checked, write_slow
from mlpipe.store.runs import StageState, append_event

pytestmark = pytest.mark.unit

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADS = {"src", "href", "xlink:href", "data", "action", "poster", "srcset"}
HOSTILE = "</title><script>alert(1)</script>\"'<img src=x onerror=alert(1)>&lt;"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


class Page(html.parser.HTMLParser):
    """Fails on tags that do not nest, on scripts and handlers, and on whatever would load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert tag not in ("script", "iframe", "object", "embed", "link", "img", "base", "form")
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} is a handler"
            assert name not in LOADS or tag == "a", f"{tag} {name}={value} would load something"
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
        elif data.strip():
            self.text.append(data)


def read(page: str) -> str:
    """Checks the page and returns its text."""
    assert len(page) < 2_000_000
    assert "://" not in page
    parsed = Page(page)
    for svg in page.split("<svg")[1:]:
        ET.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")
    return " ".join(parsed.text)


def test_a_run_that_went_well(store):
    write_quickstart(store, "quickstart-1")
    page = build_report(store, "quickstart-1")
    text = read(page)
    for expected in (
        "quickstart-1", "400 / 400", "fsdp", "ddp", "the model and its optimizer state fit twice",
        "6 N + 12 L H Q T a token (torchtitan)", "1,836,160", "measured matmul peak", "since step 300",
        "103 steps were lost to restarts and done again.",
        "Attempts and restarts (3)", "Checkpoints (4)", "kept",
        "pruned", "val_bits_per_byte < 2.6: passed", "def __init__(self, name, value=None):", "self.value",
        "rank 1 was killed by signal 9", "build-17", "torch 2.15.0+cpu", "mlpipe-corpus --out",
    ):  # fmt: skip
        assert expected in text, expected
    for chart in ("Loss", "Throughput", "MFU", "Time of a step", "Memory", "Gradient norm"):
        assert f"<h3>{chart}" in page
    assert "attempt 2, restart 0: from step 300, ddp on 4" in page
    assert "triangle: checkpoint committed" in text
    assert "Stage " not in text.partition("Stages")[0], "no trouble, no box"


def test_the_mfu_equation_on_the_page_is_true(store):
    write_quickstart(store, "quickstart-1")
    (line,) = [part for part in Page(build_report(store, "quickstart-1")).text if "tok/s x" in part]
    left, _, right = line.partition(" = ")
    numbers = [float(word.rstrip("k").lstrip("(")) for word in left.split() if word.lstrip("(")[0].isdigit()]
    rate, flops, world, peak = numbers
    computed = rate * 1e3 * flops * 1e6 / (world * peak * 1e9)
    assert 100 * computed == pytest.approx(float(right.rstrip(" %")), rel=0.01)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_hardly_any_steps(store, num_steps):
    write_train_stage(store, "short-1", [Life(1, 0, 0, num_steps)], steps=400)
    write_run(store, "short-1", {"train": stage_state("failed")}, state="failed")
    text = read(build_report(store, "short-1"))
    assert ("No step was finished." in text) == (num_steps == 0)
    assert "no message was left" in text


def test_a_run_that_has_not_begun(store):
    write_run(
        store, "new-1", {"corpus": stage_state("pending"), "train": stage_state("pending")}, state="running"
    )
    assert "pending" in read(build_report(store, "new-1"))
    assert "pending" in build_markdown(store, "new-1")


def test_a_failed_run_says_what_where_and_how_to_go_on(store):
    outcome = {
        "outcome": "failed", "kind": "failed", "message": "the loss is not finite",
        "where": "rank 0, step 150", "hint": "lower optimizer.lr", "step": 150, "restarts": 0, "exit_code": 3,
    }  # fmt: skip
    lost = {step: {"loss": None} for step in (149, 150)}
    write_train_stage(store, "nan-1", [Life(1, 0, 0, 150)], steps=400, overrides=lost, outcome=outcome)
    commit_checkpoint(store, "runs/nan-1/stages/train/checkpoints/step-000000100/1-ab", step=100, attempt=1)
    write_run(store, "nan-1", {"train": stage_state("failed")}, state="failed")
    page = build_report(store, "nan-1")
    text = read(page)
    assert text.index("the loss is not finite") < text.index("Stages"), "the trouble comes first"
    for expected in (
        "rank 0, step 150",
        "lower optimizer.lr",
        "step 100",
        "mlpipe resume nan-1",
        "not finite",
    ):
        assert expected in text
    assert "step 149: the loss is not finite" in page
    markdown = build_markdown(store, "nan-1")
    assert "**train failed**: the loss is not finite (lower optimizer.lr)" in markdown


def test_a_save_that_failed_is_an_event_and_no_checkpoint(store):
    records = life_records(Life(1, 0, 0, 30), 0, steps=30, every=10)
    (failed,) = [r for r in records if r["kind"] == "checkpoint" and r["step"] == 20]
    failed["error"] = "no space left on the device"
    write_records(store, "runs/full-1/stages/train/attempt-1", 0, records)
    plan = stage_plan("full-1", "train", work=train_plan(30))
    store.put("runs/full-1/stages/train/attempt-1/plan.json", plan.to_json().encode())
    write_run(store, "full-1", {"train": stage_state()})
    text = read(build_report(store, "full-1"))
    assert "Checkpoints (2)" in text
    assert "error no space left on the device" in text


def test_a_fallback_behind_a_damaged_checkpoint_is_part_of_the_history(store):
    note = "went back to the checkpoint of step 10: that of step 20 is damaged (torn)"
    records = life_records(Life(1, 0, 0, 25), 0, steps=30, every=10)
    again = life_records(Life(1, 1, 10, 30), 0, steps=30, every=10)
    again[0]["notes"] = [note]
    write_records(store, "runs/back-1/stages/train/attempt-1", 0, [*records, *again])
    plan = stage_plan("back-1", "train", work=train_plan(30))
    store.put("runs/back-1/stages/train/attempt-1/plan.json", plan.to_json().encode())
    append_event(
        store, "runs/back-1/stages/train/attempt-1", Fallback(step=10, given_up=["step-20"], why=["torn"])
    )
    write_run(store, "back-1", {"train": stage_state()})
    page = build_report(store, "back-1")
    text = read(page)
    assert f"Attempt 1, restart 1: {note}." in text
    assert "went back to the checkpoint of step 10; damaged and given up: step-20: torn" in text
    assert page.count(f"UTC; {note}</title>") == 6, "a mark on every chart says so"
    assert note in build_markdown(store, "back-1")


def test_jinja2_is_imported_when_a_page_is_written_and_not_before(store):
    write_quickstart(store, "quickstart-1")
    script = (
        "import sys\nfrom mlpipe.observe.report import build_report\n"
        "from mlpipe.store.open import open_store\n"
        f"before = 'jinja2' in sys.modules\nbuild_report(open_store({store.url!r}), 'quickstart-1')\n"
        "print(before, 'jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False True\n", done.stderr


def test_a_peak_that_the_worker_measured_stands_in_the_equation(store):
    records = life_records(Life(1, 0, 0, 5), 0, steps=5)
    records[0]["peak_flops"] = None
    for record in records[1:]:
        record["peak_flops"] = 5e10
    write_records(store, "runs/cpu-1/stages/train/attempt-1", 0, records)
    plan = stage_plan("cpu-1", "train", work=train_plan(5))
    store.put("runs/cpu-1/stages/train/attempt-1/plan.json", plan.to_json().encode())
    write_run(store, "cpu-1", {"train": stage_state()})
    assert "(2 x 50 GFLOP/s)" in read(build_report(store, "cpu-1"))


def test_every_value_not_finite(store):
    nothing = dict.fromkeys(
        ("loss", "grad_norm", "seconds", "tokens_per_second", "mfu_ratio", "memory_bytes")
    )
    lost = dict.fromkeys(range(1, 31), nothing)
    write_train_stage(store, "nan-2", [Life(1, 0, 0, 30)], steps=30, overrides=lost)
    write_run(store, "nan-2", {"train": stage_state()})
    assert "not finite" in read(build_report(store, "nan-2"))


def test_a_pipeline_of_commands(store):
    plan = stage_plan("cmd-1", "hello", work=CommandPlan(("echo", "a b", "$HOME;rm")))
    store.put("runs/cmd-1/stages/hello/attempt-1/plan.json", plan.to_json().encode())
    write_run(store, "cmd-1", {"hello": stage_state()})
    assert "echo 'a b' '$HOME;rm'" in read(build_report(store, "cmd-1"))


def test_hostile_text_stays_text(store):
    outcome = {"outcome": "failed", "message": HOSTILE, "where": HOSTILE, "hint": HOSTILE}
    write_train_stage(
        store, "evil-1", [Life(1, 0, 0, 30), Life(1, 1, 20, 40, strategy="fsdp")], steps=40, outcome=outcome,
        reason=HOSTILE, peak_name=HOSTILE,
    )  # fmt: skip
    log = store.open_log("runs/evil-1/stages/train/attempt-1/events.jsonl")
    event = {"kind": HOSTILE, "time": BEGIN, "message": HOSTILE, HOSTILE: HOSTILE}
    log.write(json.dumps(event).encode() + b"\n")
    log.close()
    log = store.open_log("runs/evil-1/stages/train/attempt-1/records/rank-0.jsonl")
    at = {"time": BEGIN + 9000, "notes": [HOSTILE]}
    start = {
        "kind": "start",
        **at,
        "strategy": HOSTILE,
        "device": HOSTILE,
        "host": HOSTILE,
        "peak_name": HOSTILE,
    }
    sample = {"kind": "evaluate", "time": BEGIN, "sample": HOSTILE, "gate": HOSTILE}
    log.write(
        json.dumps({**start, "start_step": 40, "peak_flops": 1e9, "num_flops_per_token": 1.0}).encode()
        + b"\n"
    )
    log.write(json.dumps(sample).encode() + b"\n")
    log.close()
    write_run(
        store, "evil-1", {"train": stage_state("failed")}, state="failed", message=HOSTILE, pipeline=HOSTILE,
        meta={HOSTILE: HOSTILE},
    )  # fmt: skip
    page = build_report(store, "evil-1")
    assert "alert(1)" in read(page)
    assert "<script" not in page
    assert "<img" not in page
    markdown = build_markdown(store, "evil-1")
    assert "<script" not in markdown
    assert "<img" not in markdown


def test_many_steps_make_a_small_page(store):
    write_train_stage(store, "long-1", [Life(1, 0, 0, 20_000, num_ranks=1)], steps=20_000, every=500)
    write_run(store, "long-1", {"train": stage_state(seconds=36_000)})
    page = build_report(store, "long-1")
    read(page)
    assert len(page) < 500_000
    assert "steps 19801 to 20000, mean" in page


def test_more_ranks_than_are_drawn(store):
    write_train_stage(store, "wide-1", [Life(1, 0, 0, 20, num_ranks=MOST_RANKS + 8)], steps=20)
    write_run(store, "wide-1", {"train": stage_state()})
    assert f"The first {MOST_RANKS} of {MOST_RANKS + 8} ranks." in read(build_report(store, "wide-1"))


def test_what_is_broken_in_the_store_is_said_and_the_rest_is_shown(store):
    write_quickstart(store, "quickstart-1")
    key = "runs/quickstart-1/stages/train/attempt-2"
    store.put(f"{key}/plan.json", b'{"schema_version": 99}')
    store.put(f"{key}/outcome.json", b"[]")
    text = read(build_report(store, "quickstart-1"))
    assert "What this report could not read" in text
    assert "attempt-2/plan.json cannot be read" in text
    assert "attempt-2/outcome.json cannot be read: not a JSON object" in text
    assert "400 / 400" in text


def test_no_such_run(store):
    with pytest.raises(StoreError, match="there is no run nope"):
        build_report(store, "nope")


def test_it_is_written_where_asked(store, tmp_path):
    write_quickstart(store, "quickstart-1")
    out = tmp_path / "new" / "report.html"
    assert write_report(store, view_run(store, "quickstart-1"), out) == str(out)
    assert out.read_text().startswith("<!DOCTYPE html>")
    where = write_report(store, view_run(store, "quickstart-1"))
    assert where == str(store.local_path("runs/quickstart-1/report.html"))
    assert store.get("runs/quickstart-1/report.html").startswith(b"<!DOCTYPE html>")


@pytest.mark.parametrize("url", ["https://ci.example.com/job/train/17/", "javascript:alert(1)"])
def test_the_page_links_to_the_build_that_made_the_run(store, url):
    write_run(store, "built-1", {"corpus": stage_state()}, meta={"pipeline": "built", "jenkins_url": url})
    page = build_report(store, "built-1")
    Page(page)
    assert url in page
    assert ("href" in page) == url.startswith("https:")


def test_markdown(store):
    write_quickstart(store, "quickstart-1")
    assert build_markdown(store, "quickstart-1").splitlines() == [
        "### quickstart-1: done, took 3m13s",
        "",
        "| Stage | Kind | State | Attempts | Took |",
        "|---|---|---|---:|---:|",
        "| corpus | command | done | 1 | 21s |",
        "| train | train | done | 2 | 2m43s |",
        "| evaluate | evaluate | done | 1 | 9.0s |",
        "",
        "- **train**: step 400 of 400, loss 2.543, ddp on 4 x cpu, 11.1k tok/s, MFU 31.0 %"
        " (of measured matmul peak), 2 restarts, 103 steps done again, goodput 14.2 %",
        "- **evaluate**: validation loss 2.513, perplexity 12.340, bits per byte 1.420,"
        r" gate val\_bits\_per\_byte &lt; 2.6 passed",
    ]  # fmt: skip


def test_stages_come_in_the_order_of_the_pipeline(store):
    states = {"gamma": StageState(), "alpha": stage_state(begin=50), "beta": stage_state(begin=0)}
    write_run(store, "order-1", states)
    view = view_run(store, "order-1")
    assert [stage.name for stage in view.stages] == ["gamma", "alpha", "beta"]
    assert view.seconds == pytest.approx(110)
    assert view.stages[2].state.started == BEGIN


def test_the_mesh_the_pipeline_and_the_experts_load_are_shown(store):
    records = life_records(Life(1, 0, 0, 3), 0, steps=3)
    records[0]["mesh"] = {"pp": 2, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "tp": 1, "ep": 2}
    for load, record in zip((3.0, 2.0, 1.0), [one for one in records if one["kind"] == "step"], strict=True):
        record["expert_max_load_ratio"] = {"0": load, "1": 1.5}
        record["expert_max_average_load_ratio"] = {"0": load / 2, "1": 1.25}
        record["experts_by_load_ratio"] = {"1.0": 5, "2.0": 0, "inf": 3}
    write_records(store, "runs/moe-1/stages/train/attempt-1", 0, records)
    work = train_plan(3, mesh=Mesh(pp=2, dp_shard=4, ep=2), pipeline=PipelinePlan("1f1b", (5, 3)))
    store.put(
        "runs/moe-1/stages/train/attempt-1/plan.json",
        stage_plan("moe-1", "train", work=work).to_json().encode(),
    )
    write_run(store, "moe-1", {"train": stage_state()})
    text = read(build_report(store, "moe-1"))
    for expected in (
        "(pp 2 x dp_shard 4, ep 2)", "fsdp (pp 2, ep 2) 2 cpu", "1f1b, stages of 5, 3 blocks",
        "Mean of steps 1 to 3 Of tokens of about 20 0 3.00 2.00 0.50 1 1.50 1.50 1.25",
        "in step 3, by the same ratio: 5 up to 1.0, 3 above.",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_rank_that_was_slow_while_load_moved_is_named(store):
    """How slow at worst, and what it had to do at the end; who has no straggler says nothing."""
    for rank in (0, 1):
        records = life_records(Life(1, 0, 0, 3), rank, steps=3)
        steps = [record for record in records if record["kind"] == "step"]
        for record, ratio in zip(steps, (None, 2.5, 2.0), strict=True):
            record["share_ratio"] = 1.5 - rank
            if rank == 0 and ratio is not None:
                record["stragglers"] = {"1": ratio}
        write_records(store, "runs/slow-1/stages/train/attempt-1", rank, records)
    store.put(
        "runs/slow-1/stages/train/attempt-1/plan.json",
        stage_plan("slow-1", "train", work=train_plan(2)).to_json().encode(),
    )
    write_run(store, "slow-1", {"train": stage_state()})
    text = read(build_report(store, "slow-1"))
    assert "Rank 1 was 2.5 times slower than the others and had 0.50 of an even share at the end." in text


def test_padding_targets_and_waits_of_samples_of_different_lengths_are_shown(store):
    """Of each rank what is expected beside what was measured."""
    for rank in (0, 1):
        records = life_records(Life(1, 0, 0, 2), rank, steps=2)
        records[0]["sample_lengths"] = {"16": 7, "64": 2}
        for record in records:
            if record["kind"] == "step":
                expected = {"padding_tokens": 25, "idle_predicted_ratio": 0.1 * rank}
                record |= {
                    "tokens": 100,
                    "target_tokens": 50,
                    "seconds": 0.5,
                    "collective_seconds": 0.1,
                    **expected,
                }
        write_records(store, "runs/chat-1/stages/train/attempt-1", rank, records)
    chat = ChatPlan("data.jsonl", None, "model", packing="balanced")
    work = train_plan(2)._replace(data=DataPlan(None, None, None, chat=chat))
    plan = stage_plan("chat-1", "train", work=work)
    store.put("runs/chat-1/stages/train/attempt-1/plan.json", plan.to_json().encode())
    write_run(store, "chat-1", {"train": stage_state()})
    text = read(build_report(store, "chat-1"))
    for expected in (
        "packed (balanced) into rows of up to",
        "7 up to 16, 2 up to 64", "25.0 % of the tokens computed", "200 a second, over all ranks",
        "0 0.0 % 20.0 % 1 10.0 % 20.0 %",
    ):  # fmt: skip
        assert expected in text


def test_machines_that_were_checked_stand_with_what_they_can_do_and_the_slowest_in_bold(store):
    plan = stage_plan("checked-1", "train", work=train_plan(2))
    plan = replace(plan, launch=plan.launch._replace(preflight=PreflightPlan(0.5, 1.0, 1, 1.0)))
    store.put(f"{plan.attempt_key}/plan.json", plan.to_json().encode())
    rates = {"n1": 80e9, HOSTILE: 20e9}
    checked = Checked(
        {node: {"flops": rate, "peer_bytes_per_second": rate * 5} for node, rate in rates.items()},
        {HOSTILE: ["matmul 20 GFLOP/s, where the others have 80"]},
        seconds=7.0,
        busy={"n1": ["store 3 MB/s, while others used 60 % of the CPUs"]},
        unread={HOSTILE: ["GPU 0 (T4) does not tell ecc: N/A"]},
    )
    write_checked(store, plan.attempt_key, checked)
    write_slow(store, plan.attempt_key, json.dumps({"n1": 2.34}).encode())
    write_run(store, "checked-1", {"train": stage_state("failed")})
    page = build_report(store, "checked-1")
    text = read(page)
    assert "Preflight of attempt 1: 2 machines, not all passed" in text
    assert "matmul 20 GFLOP/s, where the others have 80" in text
    assert "Not blamed, since others took its CPUs: n1: store 3 MB/s" in text
    assert "GPU 0 (T4) does not tell ecc: N/A" in text
    assert "Slow while it trained: n1 took 2.3 times as long as the others." in text
    assert "Machine Matmul, GFLOP/s Between GPUs, GB/s n1 80 400" in text
    assert "<b>20</b>" in page
    assert "<b>80</b>" not in page
    for lies in (
        b'{"nodes": {"n1": {"flops": "<b>"}}, "faults": {}, "pairs": [], "seconds": 1}',
        b'{"nodes": 1}',
    ):
        store.put(f"{plan.attempt_key}/preflight.json", lies)
        assert "Preflight of" not in read(build_report(store, "checked-1"))
