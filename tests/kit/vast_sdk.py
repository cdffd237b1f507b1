"""The vendor's own SDK against the stand-in: the oracle of what requests and answers look like.

    pip download --no-deps --dest /tmp/vast vastai==1.9.1 && unzip -d /tmp/vast/sdk /tmp/vast/*.whl
    PYTHONPATH=tests:/tmp/vast/sdk python -m kit.vast_sdk >tests/golden/vast-sdk.json

It writes the requests of one cycle of search, rental and return as the SDK sent them, and what it made of the
answers. `tests/unit/submit/test_rented_vast.py` compares ours. The SDK is no dependency of the tests: it pins
packages exactly. Only its modules of the API are imported, which need `requests` alone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from typing import Any

from kit.vast import KEY, offer_row, vast

LABEL, SCRIPT = "mlpipe/0/r/train/1/0", "echo $A"


def main() -> None:
    found = importlib.util.find_spec("vastai")
    assert found is not None
    assert found.submodule_search_locations is not None
    package = types.ModuleType("vastai")  # its own imports the whole of its command line
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["vastai"] = package
    from vastai.api import instances, offers  # type: ignore[import-not-found]
    from vastai.api.client import VastClient  # type: ignore[import-not-found]
    from vastai.data.instance import CreateInstanceResponse  # type: ignore[import-not-found]
    from vastai.data.offer import Offer  # type: ignore[import-not-found]

    with vast([offer_row(11), offer_row(12, num_gpus=2)], runs=False) as account:
        client = VastClient(api_key=KEY, server_url=account.url)
        asked = {"reliability": {"gte": 0.95}, "disk_space": {"gte": 40}, "num_gpus": {"eq": 1}}
        rows = offers.search_offers(
            client, asked, offer_type="on-demand", order=[["dph_total", "asc"]], limit=400, storage=40.0
        )
        offer = Offer.from_dict(rows[0])
        made = CreateInstanceResponse.from_dict(
            instances.create_instance(
                client,
                offer.id,
                image="registry.example.com/mlpipe:1",
                disk=40,
                env={"A": "b"},
                label=LABEL,
                onstart_cmd="sh",
                args=["-c", SCRIPT],
                runtype="args",
                cancel_unavail=True,
            )
        )
        listed = instances.show_instances(client)
        shown = instances.show_instance(client, made.new_contract)
        ended = instances.destroy_instance(client, made.new_contract)
        left = instances.show_instances(client)
        requests = [[method, path, body] for method, path, body in account.requests]
    understood: dict[str, Any] = {
        "offers": [[Offer.from_dict(row).id, Offer.from_dict(row).dph_total] for row in rows],
        "made": [made.success, made.new_contract],
        "listed": [[row["id"], row["label"], row["actual_status"], row["extra_env"]] for row in listed],
        "shown": [shown["id"], shown["label"]],
        "ended": ended,
        "left": left,
    }
    document = {"sdk": "vastai 1.9.1", "requests": requests, "understood": understood}
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
