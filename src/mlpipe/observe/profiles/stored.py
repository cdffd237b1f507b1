"""Profiles out of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlpipe.observe.profiles.measure import RankProfile
from mlpipe.observe.records import list_attempts
from mlpipe.store import profiles
from mlpipe.store.base import Store
from mlpipe.store.profiles import Profile


@dataclass(frozen=True)
class StoredProfile:
    """`ranks`: those whose summary is there. `expected`: by cause of a finding, what the planner says of its
    remedy, if it was asked."""

    attempt_key: str
    profile: Profile
    ranks: tuple[RankProfile, ...]
    expected: Mapping[str, str] | None = None

    def trace_keys(self) -> list[str]:
        """In the order of `ranks`."""
        first = self.profile.first_step
        return [profiles.trace_key(self.attempt_key, first, one.rank) for one in self.ranks]


def read_profile(store: Store, attempt_key: str, profile: Profile) -> StoredProfile:
    """What there is of it. Raises StoreError."""
    ranks = []
    for rank in profiles.finished_ranks(store, attempt_key, profile):
        key = profiles.summary_key(attempt_key, profile.first_step, rank)
        ranks.append(profiles.read(store, key, RankProfile))
    return StoredProfile(attempt_key, profile, tuple(ranks))


def profiles_of_stage(store: Store, stage_key: str) -> list[StoredProfile]:
    """Of all attempts, each with at least one rank, in the order in which they were made."""
    stored = [
        read_profile(store, attempt_key, profile)
        for number in list_attempts(store, stage_key)
        for attempt_key in [f"{stage_key}/attempt-{number}"]
        for profile in profiles.list_profiles(store, attempt_key)
    ]
    return [one for one in stored if one.ranks]
