"""What replicas send each other goes in pieces, since a bucket may be one tensor of any size and an operation
that takes too long has lost somebody. A second member that has the same to tell answers here."""

from __future__ import annotations

import pytest
import torch

from mlpipe.train.replicas import exchange
from mlpipe.train.replicas.exchange import Exchange, _Ranks

pytestmark = pytest.mark.unit


@pytest.fixture
def sent(monkeypatch):
    monkeypatch.setattr(exchange, "_PIECE_BYTES", 16)
    monkeypatch.setattr(exchange, "_BUCKET_BYTES", 32)
    return []


def test_codes_go_in_pieces(sent):
    def do(what, received, own, *_):
        sent.append(own.nbytes)
        received.copy_(torch.cat([own if what == "_allgather_base" else own[1:]] * 2))

    ranks = _Ranks(1, 2, None, lambda function: function, do)
    rows = torch.arange(22, dtype=torch.uint8).view(2, 11).repeat_interleave(4, dim=1)
    assert torch.equal(ranks.all_to_all(rows), torch.stack([rows[1], rows[1]]))
    assert sent == [32, 32, 24]  # two rows of at most 16
    part = torch.arange(27, dtype=torch.float32).view(3, 9)
    assert torch.equal(ranks.all_gather(part), torch.cat([part, part]))
    assert max(sent[3:]) == 16
    assert sum(sent[3:]) == part.nbytes


def test_states_and_sums_go_in_pieces(sent):
    tensors = [torch.arange(30, dtype=torch.float32), torch.arange(7, dtype=torch.int16)]
    member = object.__new__(Exchange)
    member._group, member._do = object(), lambda what, one, *_: sent.append((what, one[0].clone()))
    member.send(tensors, 1)
    assert max(one.nbytes for _, one in sent) == 16
    pieces = iter([one for _, one in sent])
    member._do = lambda what, one, *_: one[0].copy_(next(pieces))
    healed = [torch.zeros_like(tensor) for tensor in tensors]
    member.receive(healed, 0)
    assert all(map(torch.equal, healed, tensors))
    sent.clear()
    member._do = lambda what, one: sent.append(one[0].mul_(2).nbytes)
    member.sum_([healed[0]])
    assert torch.equal(healed[0], 2 * tensors[0])
    assert sent == [32, 32, 32, 24]
