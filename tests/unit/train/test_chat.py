"""Conversations as tokens and what of them is learnt; what is no conversation; made once and kept."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import ChatPlan
from mlpipe.train.data.chat import jsonl, tokenised
from mlpipe.train.data.chat.encode import Encoder
from mlpipe.train.data.chat.jsonl import BadLine
from mlpipe.train.data.chat.template import CHATML, Template
from mlpipe.train.data.chat.tokenised import tokenise
from mlpipe.train.data.tokenizer import MIN_VOCAB_SIZE, train_tokenizer

pytestmark = pytest.mark.unit
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# as Qwen's: of answers that are not the last it leaves the reasoning away
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
REWRITING = "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def says(*pairs: str) -> list[dict[str, str]]:
    """Alternating, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(pairs)]


TALK = says("hello?", "grüß dich 😀", "again", "no")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tokenizer"
    made.mkdir()
    train_tokenizer([], MIN_VOCAB_SIZE).save(str(made / "tokenizer.json"))
    return made


def plan_of(folder: Path, lines: list[object] | bytes, template: str | None = "chatml") -> ChatPlan:
    path = folder / "data.jsonl"
    text = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(text)
    return ChatPlan(str(path), None, str(folder), template)


def learnt_text(plan: ChatPlan, line: dict[str, object]) -> list[str]:
    """What of it is learnt, piece by piece."""
    encoder = Encoder(plan)
    [sample] = encoder.encode([encoder.spoken(line)])
    assert not isinstance(sample, BadLine), sample
    edges = np.flatnonzero(np.diff(sample.learnt.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [
        encoder.tokenizer.decode(sample.ids[begin:end].tolist(), skip_special_tokens=False)
        for begin, end in edges.tolist()
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["grüß dich 😀<|im_end|>", "no<|im_end|>"]),
        (UNMARKED, ["grüß dich 😀<|im_end|>\n", "no<|im_end|>\n"]),
        (FORGETFUL, ["grüß dich 😀</>", "<think></think>no</>"]),
    ],
)
def test_what_the_assistant_says_is_learnt_and_nothing_else(folder, template, expected):
    (folder / "chat_template.jinja").write_text(template)
    plan = plan_of(folder, [], template=None)
    assert learnt_text(plan, {"messages": TALK}) == expected
    of_completion = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert learnt_text(plan, of_completion) == expected[1:]
    assert learnt_text(plan, {"prompt": "a 😀", "completion": "😀 b"}) == ["😀 b<|endoftext|>"]
    assert learnt_text(plan, {"text": "é"}) == ["é<|endoftext|>"]


def test_a_template_gets_what_transformers_gives_it_and_reaches_nothing_else(folder):
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%d %b %Y') }}{{ tools[0].name }}"
    )
    text, _ = Template(source, {"bos_token": "<s>"}, "x").render(
        [{"role": "system", "content": ""}, {"role": "user", "content": "<é>"}], [{"name": "look"}]
    )
    assert text == '<s>{"role": "user", "content": "<é>"}26 Jul 2024look'
    for hostile in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no!') }}"):
        with pytest.raises(BadLine, match="refuses it"):
            Template(hostile, {}, "x").render([])
    with pytest.raises(BadLine, match="refuses it: TemplateError"):
        Template("{{ raise_exception('') }}", {}, "x").render([])
    nested = "{% for i in [1] %}" * 25 + "{% endfor %}" * 25  # more than Python compiles
    for source in ("{% for %}", nested):
        with pytest.raises(TrainError, match=r"no chat template: .+"):
            Template(source, {}, "x")


def test_what_a_template_writes_at_the_end_of_a_prompt_moves_no_mark(folder):
    """As templates that end each text with a sign."""
    (folder / "chat_template.jinja").write_text(CHATML + "{{ '<|the end|>' * 9 }}")
    plan = plan_of(folder, [], template=None)
    line = {"prompt": says("a", "b", "c"), "completion": [{"role": "assistant", "content": "d"}]}
    assert learnt_text(plan, line) == ["d<|im_end|>"]


def test_the_folder_of_a_model_says_template_and_special_tokens(folder):
    config = {
        "chat_template": [{"name": "default", "template": "{{ eos_token }}"}],
        "eos_token": {"content": "!"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    encoder = Encoder(plan_of(folder, [], template=None))
    assert encoder.template is not None
    assert encoder.template.render([])[0] == "!"
    (folder / "tokenizer_config.json").write_text("[" * 10_000)
    with pytest.raises(TrainError, match="no configuration"):
        Encoder(plan_of(folder, [], template=None))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TrainError, match="no chat template"):
        tokenise(plan := plan_of(folder, [{"messages": TALK}], template=None), plan.path)


BAD = {
    b'{"messages": [}': "no JSON: Expecting value at column 15",
    b"[" * 100_000: "nested too deep",
    b'{"text": NaN}': "NaN is no JSON",
    b'{"text": "\xff"}': "byte 11 is not UTF-8",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": ' + b"9" * 5000 + b"}": "no JSON that can be read",
    b"[]": "expected an object with 'messages', got a list",
    b'{"txt": 1}': "expected 'messages', 'prompt' and 'completion', or 'text', got 'txt'",
    b'{"text": 1}': "'text' is a number, not text",
    b'{"text": ""}': "nothing in it is learnt",  # but its end, and there is nothing before it
    b'{"messages": []}': "'messages' is empty",
    b'{"messages": {}}': "'messages' is an object, not a list of messages",
    b'{"messages": ["a"]}': "message 1 of 'messages' is text",
    b'{"messages": [{"content": "a"}]}': "has no 'role'",
    b'{"messages": [{"role": "assistant"}]}': "is not there",
    b'{"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}': "is a list, not text",
    b'{"messages": [{"role": "user", "content": "a"}]}': "there is no message of the assistant",
    b'{"prompt": "a", "completion": null}': "'completion' is null, not text",
    b"x": "longer than",
}


def test_every_bad_line_is_told_by_its_number_and_no_sample_is_kept(folder, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 150_000)
    lines = [*list(BAD)[:-1], b"x" * 400_000]
    good = json.dumps({"messages": TALK}).encode()
    plan = plan_of(folder, b"\n".join([good, b"", *lines, good]))
    with pytest.raises(TrainError) as caught:
        tokenise(plan, plan.path)
    told = str(caught.value)
    assert f"{len(BAD)} lines give no sample" in told
    for number, why in enumerate(BAD.values(), start=3):
        assert f"data.jsonl:{number}: " in told
        assert why in told
    assert not list((folder.parent / "cache").rglob("*.bin"))


def test_a_file_that_has_no_lines_is_not_read_to_its_end(folder, monkeypatch):
    """Of ten gigabytes, a gap in the file, the first pieces; not in memory, and not hashed."""
    plan = plan_of(folder, b"{}\n\n")
    os.truncate(plan.path, 10 * 2**30)
    read = []
    with pytest.raises(TrainError, match=r"data.jsonl:3: the line is longer than 16 MiB"):
        tokenise(plan, plan.path, lambda: read.append(1))
    assert len(read) == 5


def test_thousands_of_bad_lines_are_one_bounded_message(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    line = {"messages": says("\x1b[2J" * 10_000, "a")}
    plan = plan_of(folder, json.dumps(line).encode() + b"\n" + b"[]\n" * 4999, template=None)
    with pytest.raises(TrainError) as caught:
        tokenise(plan, plan.path)
    told = str(caught.value)
    assert "5000 lines give no sample" in told
    assert "and lines 21, 22, " in told
    assert "1020 and 3980 others" in told
    assert len(told) < 10_000
    assert r"refuses it: \x1b[2J\x1b[2J" in told  # and no terminal obeys it
    assert "\x1b" not in told


def test_a_template_that_changes_what_was_said_is_refused(folder):
    (folder / "chat_template.jinja").write_text(REWRITING)
    plan = plan_of(folder, [{"messages": TALK}], template=None)
    with pytest.raises(TrainError, match="message 2 in another way when more follow"):
        tokenise(plan, plan.path)


def test_tokens_are_made_once_for_one_content_tokenizer_and_template(folder, monkeypatch):
    lines = [{"messages": TALK}, {"text": "abc"}]
    plan = plan_of(folder, lines)
    made = tokenise(plan, plan.path)
    assert made.numbers.num_samples == 2
    assert made.ends.tolist() == [len(made.tokens) - 4, len(made.tokens)]
    assert made.learnt.sum() == made.numbers.num_learnt
    assert made.num_cut(len(made.tokens)) == (0, 0)
    assert made.num_cut(10) == (1, 1)  # of the conversation, before anybody answers
    assert made.num_cut(len(made.tokens) - 6) == (1, 0)
    assert made.num_cut(1) == (2, 1)
    calls: list[object] = []
    make = tokenised._make
    monkeypatch.setattr(tokenised, "_make", lambda *given: (calls.append(given), make(*given)))
    assert tokenise(plan, plan.path).digest == made.digest
    assert not calls
    others = [
        tokenise(plan_of(folder, [*lines, {"text": "d"}]), plan.path),
        tokenise(ChatPlan(plan.path, None, plan.tokenizer, _written(folder, UNMARKED)), plan.path),
    ]
    assert len({made.digest, *(other.digest for other in others)}) == 3
    assert len(calls) == 2


def test_what_is_not_whole_in_the_cache_is_made_again(folder):
    plan = plan_of(folder, [{"text": "abc"}, {"text": "de"}])
    made = tokenise(plan, plan.path)
    expected = made.tokens.tolist(), made.learnt.tolist()
    kept = folder.parent / "cache" / "chat" / made.digest
    killed = kept.with_name(f".{kept.name}.partial")
    killed.mkdir()
    (killed / "tokens.bin").write_bytes(b"half")
    for name, left in (("tokens.bin", 4), ("ends.bin", 8), ("learnt.bin", 0), ("manifest.json", 9)):
        whole = (kept / name).read_bytes()
        (kept / name).unlink()
        (kept / name).write_bytes(whole[:left])
        again = tokenise(plan, plan.path)
        assert (again.tokens.tolist(), again.learnt.tolist()) == expected
    assert not killed.exists()


def test_ids_of_a_tokenizer_may_have_gaps(folder):
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    last = {**said["added_tokens"][0], "id": 70_000, "content": "<far>"}
    said["added_tokens"].append(last)
    said["model"]["vocab"]["<far>"] = 70_000
    path.write_text(json.dumps(said))
    plan = plan_of(folder, [{"text": "a<far>"}])
    made = tokenise(plan, plan.path)
    assert made.numbers.vocab_size == 70_001
    assert 70_000 in made.tokens.tolist()


def _written(folder: Path, template: str) -> str:
    (folder / "own.jinja").write_text(template)
    return str(folder / "own.jinja")
