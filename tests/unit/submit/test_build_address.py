"""The address of the build that makes a run, as boards and pages link to it."""

import pytest

from mlpipe.submit.adopt import build_address

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("https://ci.example.com/job/team/job/train/17/", "https://ci.example.com/job/team/job/train/17/"),
        ("http://anna:secret@ci:8080/job/train/17/?token=x#y", "http://ci:8080/job/train/17/"),
        ("https://[::1", None),
        ("https://ci:port/", None),
        ("javascript:alert(1)", None),
        ("", None),
    ],
)
def test_an_address_carries_no_secret(said, kept):
    assert build_address(said) == kept
