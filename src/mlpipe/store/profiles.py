"""Profiles of a training, and how one is asked for while it runs.

<attempt>/profiles/wanted.json              a ProfileRequest, put by `mlpipe profile`; the launcher of the
                                            first node takes it up, and deletes it
<attempt>/profiles/step-<n>/profile.json    Profile: what was asked for; put when it begins
<attempt>/profiles/step-<n>/rank-<r>.json.gz        the trace, as Perfetto and chrome://tracing read it
<attempt>/profiles/step-<n>/rank-<r>.summary.json   what was found in it; put last
<attempt>/profiles/step-<n>/rank-<r>.memory.pickle  of a GPU with `memory`: torch's snapshot
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe._core.serial import from_json, to_json
from mlpipe.store.base import Store

T = TypeVar("T")
_MOST_RANKS = 8
MOST_STEPS = 100  # a trace of more is larger than any viewer likes
MOST_NAMED_RANKS = 64  # a request travels between ranks in one short message


@dataclass(frozen=True)
class ProfileRequest:
    """The next so many steps of these ranks; none named: of the first 8. `memory`: of tensors, too."""

    id: str
    steps: int
    ranks: tuple[int, ...] = ()
    memory: bool = False

    def ranks_of(self, world_size: int) -> list[int]:
        """Those that there are."""
        asked = self.ranks or range(_MOST_RANKS)
        return [rank for rank in asked if 0 <= rank < world_size]


@dataclass(frozen=True)
class Profile:
    """One that was begun. `ranks`: that are traced."""

    id: str
    first_step: int
    steps: int
    ranks: tuple[int, ...]
    memory: bool
    time: float


def ask(store: Store, attempt_key: str, request: ProfileRequest) -> bool:
    """False: somebody asked before, which nobody has taken up yet."""
    return store.put_if_absent(_wanted_key(attempt_key), to_json(request).encode())


def take(store: Store, attempt_key: str) -> ProfileRequest | None:
    """What is asked for, which nobody else finds any more."""
    key = _wanted_key(attempt_key)
    if not store.exists(key):
        return None
    data = store.get(key)
    store.delete([key])
    try:
        request = from_json(ProfileRequest, data)
    except ValueError:  # of another version
        return None
    return request if 0 < request.steps <= MOST_STEPS and len(request.ranks) <= MOST_NAMED_RANKS else None


def is_asked(store: Store, attempt_key: str) -> bool:
    """Whether nobody has taken it up."""
    return store.exists(_wanted_key(attempt_key))


def withdraw(store: Store, attempt_key: str, request_id: str) -> None:
    """Leaves what somebody else asked for since. No error where it was taken up."""
    key = _wanted_key(attempt_key)
    try:
        is_mine = from_json(ProfileRequest, store.get(key)).id == request_id
    except (StoreError, ValueError):  # taken up, or of another version
        return
    if is_mine:
        store.delete([key])


def folder_of(attempt_key: str, first_step: int) -> str:
    """Of the profile that begins there."""
    return f"{attempt_key}/profiles/step-{first_step:06d}"


def write_profile(store: Store, attempt_key: str, profile: Profile) -> None:
    """Which begins now."""
    folder = folder_of(attempt_key, profile.first_step)
    store.put(f"{folder}/profile.json", to_json(profile).encode())


def list_profiles(store: Store, attempt_key: str) -> list[Profile]:
    """Those that were begun, in the order of their steps. Raises StoreError; DamagedError for what no rank
    has written."""
    keys = [one.key for one in store.list(f"{attempt_key}/profiles") if one.key.endswith("/profile.json")]
    return sorted((read(store, key, Profile) for key in keys), key=lambda one: one.first_step)


def read(store: Store, key: str, kind: type[T]) -> T:
    """One of the documents of a profile. Raises as `list_profiles`."""
    try:
        return from_json(kind, store.get(key))
    except ValueError as error:
        raise DamagedError(
            f"not of a profile: {error}", where=f"{store.url}/{key}", hint="delete its folder"
        ) from error


def trace_key(attempt_key: str, first_step: int, rank: int) -> str:
    return f"{folder_of(attempt_key, first_step)}/rank-{rank}.json.gz"


def memory_key(attempt_key: str, first_step: int, rank: int) -> str:
    return f"{folder_of(attempt_key, first_step)}/rank-{rank}.memory.pickle"


def summary_key(attempt_key: str, first_step: int, rank: int) -> str:
    return f"{folder_of(attempt_key, first_step)}/rank-{rank}.summary.json"


def finished_ranks(store: Store, attempt_key: str, profile: Profile) -> list[int]:
    """Whose summary is there."""
    folder = folder_of(attempt_key, profile.first_step)
    there = {one.key for one in store.list(folder)}
    return [rank for rank in profile.ranks if f"{folder}/rank-{rank}.summary.json" in there]


def _wanted_key(attempt_key: str) -> str:
    return f"{attempt_key}/profiles/wanted.json"
