"""Who makes a run: the address of the build, as boards and pages link to it, and the user."""

import os

import pytest

from mlpipe._core.files import user_name
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


def test_a_user_whom_no_passwd_file_knows_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert user_name() == str(os.getuid())
