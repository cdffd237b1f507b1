"""`python -m benchmarks.peers.chats PART`: targets a second of mlpipe, TRL's SFTTrainer and torchtune's
recipe, which tune the same small Llama on the same conversations; 2 ranks on gloo.

As `rates`: all sides are started once and take turns of a few steps while the other sleeps in a read. Model,
tokenizer, template and conversations are made here, with a fixed seed. A target is a token that the assistant
says. Parts: `same`, packed rows of as many tokens, fp32, DDP; `newcomer`, what each gives without settings.

That the targets are the same shows in the held-out conversations: as many, and with the same loss before the
first step; else the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import launch, measure
from benchmarks.peers import rates, results, sides
from benchmarks.peers.work import Work
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.store.folder import FolderStore
from mlpipe.submit.starting import find
from mlpipe.train.data.chat.template import CHATML

LLAMA = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that what a token looks at shows in the loss of a random model
}  # fmt: skip
QUICK = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SEQ_LEN = 1024
PEERS = {"TRL SFTTrainer": "trl_sft", "torchtune": "torchtune_sft"}
PEER, CONTROL = "TRL SFTTrainer", "TRL SFTTrainer again"
LOSSES_DIFFER = {"same": 1e-4, "newcomer": 1e-2}  # relative, before the first step; in bf16 the latter
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il")]


def conversation(draw: random.Random) -> dict[str, Any]:
    """One to three questions and answers, of words as short as tokens; all of it between about 20 and 1,000
    tokens, 170 in the median."""
    num_words = min(900, max(12, round(draw.lognormvariate(math.log(150), 0.8))))
    num_turns = draw.randint(1, 3)
    messages = []
    for turn in range(num_turns):
        share = num_words // num_turns
        asked = max(2, round(share * draw.uniform(0.2, 0.5)))
        for role, count in (("user", asked), ("assistant", max(2, share - asked))):
            words = " ".join(draw.choice(SYLLABLES) for _ in range(count))
            messages.append({"role": role, "content": f"{turn} {words}"})
    return {"messages": messages}


def make(folder: Path, shape: dict[str, int], num_samples: int) -> list[int]:
    """The folder of a random Llama with its tokenizer, and two files of conversations; tokens of each."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    draw = random.Random(0)
    made = [conversation(draw) for _ in range(num_samples)]
    held_out = max(8, num_samples // 50)
    for name, part in (("held-out", made[:held_out]), ("train", made[held_out:])):
        lines = [json.dumps(one) + "\n" for one in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train(
        [str(folder / "train.jsonl")],
        trainers.BpeTrainer(
            vocab_size=LLAMA["vocab_size"], special_tokens=special, show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "base")
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**shape, **ids, tie_word_embeddings=False)).save_pretrained(folder / "base")
    rendered = [tokenizer.apply_chat_template(one["messages"], tokenize=False) for one in made]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]
    if max(lengths) > SEQ_LEN:
        raise RuntimeError(f"a conversation of {max(lengths)} tokens would be cut")
    return lengths


def plan_of(part: str, base: Work, folder: Path, batch: int) -> Plan:
    """What a user writes; no save by itself. `batch`: conversations of a step."""
    data: dict[str, Any] = {
        "chat": str(folder / "train.jsonl"), "validation": str(folder / "held-out.jsonl"), "batch_size": batch
    }  # fmt: skip
    mine: dict[str, Any] = {"precision": "auto"}
    if part == "same":
        mine = {"strategy": "ddp"}
        data |= {"packing": "balanced", "micro_batch": 1}
    settings = {
        "model": json.dumps({"pretrained": str(folder / "base"), "seq_len": SEQ_LEN}),
        "data": json.dumps(data),
        "validate": json.dumps({"every": "1000000 steps", "max_tokens": 100_000_000}),
        "optimizer__lr": base.lr,
        "optimizer__warmup_steps": 0,
        "optimizer__weight_decay": 0,
        "optimizer__grad_clip": base.grad_clip,
        "hang_timeout": "2 h",
        "seed": base.seed,
        **mine,
    }
    plan = launch.train_plan(folder, folder, "mlpipe", **settings)
    training = plan.part(TrainPlan)
    assert training is not None
    assert training.init_from is not None
    found = find(FolderStore(folder / "store"), "", training.init_from, str(folder))
    return replace(plan, work=training._replace(init_from=training.init_from._replace(found=found)))


def block(side: rates.Side, steps: int) -> measure.Figures:
    side.ask(do="steps", count=rates.WAKE_STEPS)
    cpu, wall = rates.cpu_seconds(rates.descendants(side.process.pid)), time.perf_counter()
    targets = sum(answer["targets"] for answer in side.ask(do="steps", count=steps))
    wall = time.perf_counter() - wall
    cpu = rates.cpu_seconds(rates.descendants(side.process.pid)) - cpu
    return {"rate": targets / wall, "cpu_rate": targets / max(cpu, 0.01)}


def rows_of(part: str, base: Work, folder: Path, lengths: list[int], arguments: Any) -> list[dict[str, Any]]:
    if part == "same":  # as many tokens a step as there are in the rows of TRL, which are nearly full
        batch = 2 * round(base.batch * SEQ_LEN / statistics.mean(lengths))
    else:
        batch = 2 * 8
    plan = plan_of(part, base, folder, batch)
    base = replace(base, settings="same" if part == "same" else "default")

    def command(script: str, work: Work, mine: Path) -> list[str]:
        if script == "mlpipe":
            return sides.launcher(plan, mine, "benchmarks.peers.mlpipe_chats")
        return sides.torchrun(script)

    chosen = {name: PEERS[name] for name in PEERS if PEERS[name] in arguments.peers}
    scripts = {results.OURS: "mlpipe", **chosen}
    if PEER in chosen and not arguments.quick:
        scripts[CONTROL] = PEERS[PEER]
    works = {name: (script, replace(base, side=name)) for name, script in scripts.items()}
    with rates.started(folder, works, command, 2) as found:
        losses = {name: [side.loss()] for name, side in found.items()}
        counts = {
            name: max(answer["held_out"] for answer in side.ask(do="steps", count=arguments.warm_up))
            for name, side in found.items()
        }
        check(part, losses, counts)
        blocks = measure.rounds(
            {name: lambda side=side: block(side, arguments.steps) for name, side in found.items()},
            arguments.rounds,
        )
        for name, side in found.items():
            losses[name].append(side.loss())
    print(f"{part}: held-out loss of {counts} targets at the start and the end: {losses}", flush=True)
    work = f"conversations, {part}"

    def row(label: str, key: str, side: str, peer: str, goal: float | None) -> dict[str, Any]:
        return measure.figure(
            work, label, "targets/s", blocks, key, ours=side, peer=peer, goal=goal, higher_is_better=True
        )

    rows = []
    for peer in chosen:
        rows.append(row(f"targets a second, against {peer}", "rate", results.OURS, peer, 1.0))
        rows.append(row(f"targets a CPU second, against {peer}", "cpu_rate", results.OURS, peer, None))
    if CONTROL in found:
        rows.append(row("control: targets a second", "rate", CONTROL, PEER, None))
    assert plan.part(TrainPlan) is not None
    more = {"losses": losses, "held_out_targets": counts, "precision": plan.work.training.precision}
    return [{**rows[0], **more, "batch": batch}, *rows[1:]]


def check(part: str, losses: dict[str, list[float]], counts: dict[str, int]) -> None:
    """Raises RuntimeError where the sides do not learn the same targets with the same model."""
    ours = losses[results.OURS][0]
    differ = max(abs(theirs[0] - ours) for theirs in losses.values())
    if len(set(counts.values())) > 1 or differ > LOSSES_DIFFER[part] * ours:
        raise RuntimeError(f"{part}: the sides do not compute the same: {losses} of {counts} targets")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("same", "newcomer"))
    parser.add_argument("--quick", action="store_true", help="one short round of a tiny model: does it run?")
    scripts = list(PEERS.values())
    parser.add_argument("--peers", nargs="+", default=scripts, choices=scripts)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps in a block")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2, help="of a rank and step, in `same`")
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.warm_up = 2, 1, 1
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))  # and so ends what it started
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = make(folder, QUICK if arguments.quick else LLAMA, 200 if arguments.quick else 2500)
        base = Work(
            side="", settings="", precision="fp32", model={"seq_len": SEQ_LEN}, tokens=str(folder),
            batch=arguments.rows, seed=0, lr=1e-4, grad_clip=1.0, socket=str(folder / "socket"),
        )  # fmt: skip
        rows = rows_of(arguments.part, base, folder, lengths, arguments)
    cuts = statistics.quantiles(lengths, n=20)
    measure.tell(
        "peers", rows, arguments.results, rounds=arguments.rounds, steps_per_block=arguments.steps,
        tokens_of_conversations={"p5": cuts[0], "p50": cuts[9], "p95": cuts[18], "max": max(lengths)},
        load_before=load_before,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
