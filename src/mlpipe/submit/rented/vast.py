"""Vast.ai, by a client of our own: five requests.

Its SDK is no dependency: it pins a dozen packages exactly, and repeats the renting PUT after a lost answer,
which may rent twice. The stand-in of the tests is driven by the SDK, too (`tests/kit/vast.py`).
"""

from __future__ import annotations

import json
import math
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import quote_plus, urlsplit

from mlpipe._core.errors import ErrorKind, SubmitError
from mlpipe._core.retry import AwayError, Tries
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.offers import GIB, Offer
from mlpipe.submit.rented.vendor import LostError, Machine, Need, Order, State, TakenError

URL = "https://console.vast.ai"
PATIENCE_SECONDS = 60.0  # for an answer to what may be asked again
_ANSWER_SECONDS = 30.0
_RENT_SECONDS = 120.0  # for the one answer that nobody wants to lose
_PAGE, _MOST_OFFERS = 25, 400
_MIB = 2**20
_DECIMAL = 1e9
_BUSY = (429, 500, 502, 503, 504)
_TAKEN = ("no_such_ask", "ask_unavailable", "not available", "already rented", "no longer")
_BID = 1.2  # times the lowest that is taken now: it is paid, and outbid later
# The vendor's names of GPUs whose speeds are those of the catalogue's; of two by that name, by memory.
_GPUS = {
    "B200": ("B200",),
    "H200": ("H200",),
    "H100 SXM": ("H100-80GB",),
    "A100 SXM4": ("A100-80GB", "A100-40GB"),
    "A100 SXM": ("A100-80GB", "A100-40GB"),
    "A100 PCIE": ("A100-80GB", "A100-40GB"),
    "L40S": ("L40S",),
    "L4": ("L4",),
    "RTX 5090": ("RTX-5090",),
    "RTX 4090": ("RTX-4090",),
    "RTX 3090": ("RTX-3090",),
    "Tesla V100": ("V100",),
    "Tesla T4": ("T4",),
}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The account's key goes to the address that was given, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Vast:
    """An account there. `key` stays in this process."""

    name = "vast"

    def __init__(self, url: str, key: str, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._url, self._key, self._patience_seconds = url.rstrip("/"), key, patience_seconds
        self._opener = urllib.request.build_opener(_NoRedirect)

    @classmethod
    def from_environment(cls) -> Vast:
        """VAST_API_KEY, and VAST_URL as the vendor's own tools have it. Raises SubmitError (input)."""
        key, url = os.environ.get("VAST_API_KEY", "").strip(), os.environ.get("VAST_URL") or URL
        if not key:
            raise SubmitError(
                "VAST_API_KEY is not set",
                hint="export the key of an account of Vast.ai; it stays on this machine",
                kind="input",
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SubmitError(f"VAST_URL {url!r} is no address", hint=f"leave it out: {URL}", kind="input")
        return cls(url, key)

    def offers(self, need: Need) -> list[Offer]:
        """One search a price: on demand, and by bid."""
        kinds = ["on-demand", "bid"] if need.spot else ["on-demand"]
        found = []
        for kind in kinds:
            answer = self._ask("POST", "/api/v0/bundles/", search_body(need, kind))
            found += [offer for row in answer.get("offers") or [] if (offer := offer_of(row, kind == "bid"))]
        return found

    def rent(self, offer: Offer, order: Order) -> str:
        path, tries = f"/api/v0/asks/{offer.id}/", Tries(self._patience_seconds)
        while True:
            try:
                answer = self._send("PUT", path, rent_body(offer, order), _RENT_SECONDS)
                break
            except AwayError as error:
                if error.applied:
                    raise LostError(f"no answer to the order: {error}", where=self._url) from None
                if not tries.again(error):  # which has certainly done nothing
                    raise SubmitError(
                        f"takes no orders: {error} {tries}", where=self._url, kind="infrastructure"
                    ) from None
            except _RefusedError as refused:
                if refused.status in (404, 410) or any(word in refused.words for word in _TAKEN):
                    raise TakenError(refused.words) from None
                raise self._error(path, refused) from None
        machine = answer.get("new_contract")
        if answer.get("success") is not True:
            raise TakenError(str(answer.get("msg") or answer.get("error") or answer)[:200])
        if not isinstance(machine, int):
            raise LostError("the answer to the order names no machine", where=self._url)
        return str(machine)

    def machines(self) -> list[Machine]:
        found, query = [], {"select_filters": "{}", "order_by": _ORDER, "limit": str(_PAGE)}
        while True:
            page = self._ask("GET", f"/api/v1/instances/?{_query(query)}")
            found += [machine_of(row) for row in page.get("instances") or []]
            token = page.get("next_token")
            if not token:
                return found
            query["after_token"] = token if isinstance(token, str) else json.dumps(token)

    def destroy(self, machine_id: str) -> None:
        try:
            answer = self._ask("DELETE", f"/api/v0/instances/{machine_id}/", {})
        except _GoneError:
            return
        if answer.get("success") is not True:
            words = str(answer.get("msg") or answer)[:200]
            raise SubmitError(f"the machine was not returned: {words}", where=f"{self._url} {machine_id}")

    def give_back(self) -> str:
        """The vendor sets both variables in the container; python3 or curl, whichever the image has."""
        url = f"{self._url}/api/v0/instances/$CONTAINER_ID/"
        python = (
            "import os,urllib.request as r;"
            "r.urlopen(r.Request(os.path.expandvars(os.environ['GIVE_BACK']),method='DELETE',data=b'{}',"
            "headers={'Authorization':'Bearer '+os.environ['CONTAINER_API_KEY'],"
            "'Content-Type':'application/json'}),timeout=60)"
        )
        curl = (
            'curl -fsS -m 60 -X DELETE -H "Authorization: Bearer $CONTAINER_API_KEY" '
            f"-H 'Content-Type: application/json' -d '{{}}' \"{url}\""
        )
        return f"GIVE_BACK='{url}' python3 -c \"{python}\" || {curl}"

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Of what may be asked again. Raises SubmitError."""
        tries = Tries(self._patience_seconds)
        while True:
            try:
                return self._send(method, path, body, _ANSWER_SECONDS)
            except AwayError as error:
                if not tries.again(error):
                    raise SubmitError(
                        f"cannot be reached: {error} {tries}", where=self._url, kind="infrastructure"
                    ) from None
            except _RefusedError as refused:
                raise self._error(path, refused) from None

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """One request. Raises AwayError, _RefusedError."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, headers, method=method)
        try:
            with self._opener.open(request, timeout=seconds) as reply:
                answer = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                words = error.read(2000).decode(errors="replace")
            if error.code in _BUSY:  # 429 is said before anything is done
                pause = error.headers.get("Retry-After", "")
                raise AwayError(
                    f"HTTP {error.code}",
                    applied=error.code != 429,
                    retry_after_seconds=float(pause) if pause.isdigit() else 0.0,
                ) from None
            raise _RefusedError(error.code, words) from None
        except urllib.error.URLError as error:
            unsent = isinstance(error.reason, ConnectionRefusedError | socket.gaierror)
            raise AwayError(str(error.reason), applied=not unsent) from None
        except (OSError, HTTPException, ValueError) as error:  # half an answer, or none
            raise AwayError(str(error) or type(error).__name__, applied=True) from None
        if not isinstance(answer, dict):
            raise AwayError("the answer is no document", applied=True)
        return answer

    def _error(self, path: str, refused: _RefusedError) -> SubmitError:
        where = f"{self._url}{path.partition('?')[0]}"
        if refused.status == 404:
            return _GoneError("there is no such thing", where=where)
        if refused.status in (401, 403):
            hint = "check VAST_API_KEY, and that the key may search, rent and destroy"
            return SubmitError(f"the key is refused ({refused.status})", where=where, hint=hint, kind="input")
        kind: ErrorKind = "input" if refused.status < 500 else "infrastructure"
        return SubmitError(f"answered {refused.status}: {refused.words[:300]}", where=where, kind=kind)


class _RefusedError(Exception):
    """An answer that says no; nothing was done."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


class _GoneError(SubmitError):
    """What is asked about is not there."""


_ORDER = '[{"col": "id", "dir": "asc"}]'


def _query(asked: Mapping[str, str]) -> str:
    return "&".join(f"{name}={quote_plus(value)}" for name, value in asked.items())


def search_body(need: Need, kind: str) -> dict[str, Any]:
    """As the SDK's `search_offers` sends it. `kind`: on-demand or bid."""
    asked: dict[str, Any] = {
        "verified": {"eq": True},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "rented": {"eq": False},
        "reliability": {"gte": need.min_reliability},
        "disk_space": {"gte": _gigabytes(need.disk_bytes)},
    }
    if need.num_gpus:
        asked["num_gpus"] = {"eq": need.num_gpus}
    more = {"order": [["dph_total", "asc"]], "type": kind, "limit": _MOST_OFFERS}
    return {**asked, **more, "allocated_storage": float(_gigabytes(need.disk_bytes))}


def rent_body(offer: Offer, order: Order) -> dict[str, Any]:
    """As the SDK's `create_instance` sends it for an entry point and its arguments."""
    return {
        "client_id": "me",
        "image": order.image,
        "env": dict(order.env),
        "price": offer.bid_usd_per_hour,
        "disk": _gigabytes(order.disk_bytes),
        "label": order.label,
        "extra": None,
        "onstart": "sh",
        "image_login": None,
        "python_utf8": False,
        "lang_utf8": False,
        "use_jupyter_lab": False,
        "jupyter_dir": None,
        "force": False,
        "cancel_unavail": True,  # rather than a machine that waits, and costs
        "template_hash_id": None,
        "user": None,
        "runtype": "args",
        "args": ["-c", order.script],
    }


def _gigabytes(num_bytes: int) -> int:
    return max(8, math.ceil(num_bytes / GIB))


def offer_of(row: Mapping[str, Any], is_bid: bool) -> Offer | None:
    """None for one that lacks what is needed to compute with it."""
    try:
        gpu_memory = int(float(row["gpu_ram"]) * _MIB)
        bid = math.ceil(float(row["min_bid"]) * _BID * 1e4) / 1e4 if is_bid else None
        price = float(row["dph_total"]) if bid is None else bid + float(row.get("storage_total_cost") or 0.0)
        link = row.get("bw_nvlink") or row.get("pcie_bw")
        offer = Offer(
            id=str(int(row["id"])),
            machine=str(row["machine_id"]),
            gpu=_catalogued(str(row["gpu_name"]), gpu_memory),
            gpu_name=str(row["gpu_name"]),
            num_gpus=int(row["num_gpus"]),
            gpu_memory_bytes=gpu_memory,
            cpus=float(row.get("cpu_cores_effective") or 0),
            memory_bytes=int(float(row.get("cpu_ram") or 0) * _MIB),
            disk_bytes=int(float(row.get("disk_space") or 0) * GIB),
            usd_per_hour=price,
            download_bytes_per_second=float(row["inet_down"]) * 1e6 / 8,
            upload_bytes_per_second=float(row["inet_up"]) * 1e6 / 8,
            disk_bytes_per_second=float(row.get("disk_bw") or 100.0) * 1e6,
            link_bytes_per_second=float(link) * 1e9 if link else None,
            usd_per_byte_down=float(row.get("inet_down_cost") or 0.0) / _DECIMAL,
            usd_per_byte_up=float(row.get("inet_up_cost") or 0.0) / _DECIMAL,
            reliability=float(row.get("reliability") or row.get("reliability2") or 0.0),
            region=str(row.get("geolocation") or ""),
            bid_usd_per_hour=bid,
            lasts_seconds=float(row.get("duration") or math.inf),
        )
    except (KeyError, TypeError, ValueError):
        return None
    speeds = offer.download_bytes_per_second, offer.upload_bytes_per_second, offer.disk_bytes_per_second
    figures = (*speeds, offer.usd_per_hour, offer.reliability)
    sound = all(math.isfinite(figure) and figure > 0 for figure in figures)
    sound &= min(offer.usd_per_byte_down, offer.usd_per_byte_up, offer.num_gpus) >= 0
    return offer if sound else None


def _catalogued(name: str, memory_bytes: int) -> str | None:
    known: Iterator[str] = iter(_GPUS.get(name, ()))
    return min(known, key=lambda one: abs(GPUS[one].memory_bytes - memory_bytes), default=None)


def machine_of(row: Mapping[str, Any]) -> Machine:
    """By what the container does (`actual_status`) and whether the vendor still grants the machine
    (`cur_state`): one that was outbid is stopped though it is meant to run."""
    actual, granted = row.get("actual_status"), row.get("cur_state")
    state: State = "starts"
    if actual in ("exited", "stopped", "offline") or (actual is not None and granted == "stopped"):
        state = "gone"
    elif actual == "running":
        state = "runs"
    says = " ".join(str(row.get("status_msg") or "").split())[:200]
    return Machine(
        str(row["id"]), str(row.get("label") or ""), state, f"{actual or 'ordered'} {says}".strip()
    )
