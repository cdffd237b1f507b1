"""The report in a real Chromium: light and dark, wide and narrow, silent, alone, and within the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.browser import browser
from kit.servers import ServerMissingError
from kit.synthetic_run import Life, stage_state, write_quickstart, write_run, write_train_stage

from mlpipe.observe.report import build_report
from mlpipe.store.open import open_store

pytestmark = pytest.mark.services
LONG = "a_word_without_an_end_" * 12


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    """Of a pipeline that went well, and of a run that failed with long words."""
    folder = tmp_path_factory.mktemp("pages")
    store = open_store(str(folder / "store"))
    write_quickstart(store, "quickstart-1")
    outcome = {
        "outcome": "failed",
        "kind": "failed",
        "message": LONG,
        "where": LONG,
        "hint": LONG,
        "exit_code": 3,
    }
    write_train_stage(store, "bad-1", [Life(1, 0, 0, 40, num_ranks=8)], steps=100, outcome=outcome)
    meta = {"pipeline": "bad", "jenkins_url": f"https://ci.example.com/job/{LONG}/7/"}
    write_run(store, "bad-1", {"train": stage_state("failed")}, state="failed", message=LONG, meta=meta)
    paths = []
    for run in ("quickstart-1", "bad-1"):
        paths.append(folder / f"{run}.html")
        paths[-1].write_text(build_report(store, run))
    return paths


def test_the_page_is_silent_asks_for_nothing_and_fits(pages):
    try:
        with browser() as chromium:
            for page in pages:
                for width in (390, 1280):
                    light, dark = (chromium.look(page, width=width, dark=night) for night in (False, True))
                    for seen in (light, dark):
                        assert (seen.asked, seen.said) == ([], [])
                        assert seen.width == width, "nothing lies beside the window"
                        assert seen.png.startswith(b"\x89PNG")
                    assert light.background != dark.background
            noisy = pages[0].with_name("noisy.html")
            noisy.write_text(
                '<img src="missing.png"><script>console.log("x"); nothing()</script>'
                '<div style="width:2000px">x</div>'
            )
            seen = chromium.look(noisy, width=390)
    except ServerMissingError as error:
        pytest.skip(str(error))
    assert len(seen.asked) == 1
    assert len(seen.said) == 3
    assert seen.width >= 2000
