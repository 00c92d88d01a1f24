"""The web page in a real Chromium: what people see, in light and dark, narrow and wide, and what it does not do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlfleet.web.server import WebServer
from tests.cli.fleets import Objects, large, recorded
from tests.web.apiserver import Apiserver
from tests.web.browser import Browser

NAMESPACE = "t-8dbb0a5ba5"
TEXT = "document.getElementById('fleet').innerText"


async def show(browser: Browser, page: WebServer, token: str = "all", namespace: str = "") -> None:
    """Open the page and give it a token."""
    await browser.go(f"http://127.0.0.1:{page.port}/")
    await give(browser, token, namespace)


async def give(browser: Browser, token: str, namespace: str = "") -> None:
    await browser.ask(
        f"document.getElementById('token').value = {token!r};"
        f"document.getElementById('namespace').value = {namespace!r};"
        "document.getElementById('who').requestSubmit()"
    )


def pictures(tmp_path: Path) -> Path:
    """Where pictures go: RLFLEET_PICTURES keeps them."""
    folder = Path(os.environ.get("RLFLEET_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


FLEETS: dict[str, Objects] = {
    "empty": {"rlpipelines": [], "enginepools": [], "syncrounds": []},
    "failed": recorded("failed"),
    "large": large(200),
    "sixty-four": large(64),
    "running": recorded("staging"),
}


@pytest.mark.parametrize("name", list(FLEETS))
async def test_it_fits_is_readable_and_breaks_no_policy(
    browser: Browser, page: WebServer, apiserver: Apiserver, tmp_path: Path, name: str
) -> None:
    apiserver.objects = FLEETS[name]
    await browser.dress(width=1280)
    await show(browser, page)
    await browser.until("document.getElementById('live').dataset.state === 'on'")
    seen: dict[str, Any] = {}
    for width in (360, 1280):
        for scheme in ("light", "dark"):
            await browser.dress(width=width, scheme=scheme)
            # Nothing is cut off at the right: what is wider scrolls inside of its card.
            assert await browser.ask("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
            shot = await browser.picture(pictures(tmp_path) / f"{name}-{width}-{scheme}.png")
            seen[f"{width}-{scheme}"] = (
                await browser.ask("getComputedStyle(document.body).backgroundColor"),
                len(shot),
            )
    assert seen["1280-light"][0] != seen["1280-dark"][0]
    assert browser.complaints == []


async def test_a_failed_round_its_reason_and_the_lag_are_on_the_page(browser: Browser, page: WebServer) -> None:
    await show(browser, page)
    text = await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))
    assert f"{NAMESPACE}/p" in text
    assert "1 behind sender v2" in text
    assert "Staging: StagingDeadline: 4 of 4 gates did not receive the weights" in text
    assert "GatesUnreachable" in text
    assert "e-0-35c8a" in text
    parts = await browser.ask(
        "[...document.querySelectorAll('[data-round=p-v1-0028ca96bc] .time span')].map(e => e.className)"
    )
    assert parts == ["plan", "stage", "quiesce", "transfer", "verify", "publish", "reopen"]


async def test_all_of_200_engines_are_drawn_although_the_status_lists_exceptions(
    browser: Browser, page: WebServer, apiserver: Apiserver
) -> None:
    apiserver.objects = large(200)
    await show(browser, page)
    await browser.until("document.querySelectorAll('[data-pool=e] .cells li').length", lambda n: n == 200)
    labels = await browser.ask("[...document.querySelectorAll('[data-pool=e] .cells li')].map(e => e.title)")
    assert labels[0] == "e-0-35c8a: Active, v1, GatesUnreachable: the gate does not answer; last known state"
    assert labels[199] == "e-199: Active, v1"


async def test_it_follows_what_changes_and_keeps_what_somebody_types(
    browser: Browser, page: WebServer, apiserver: Apiserver
) -> None:
    apiserver.objects = recorded("staging")
    await show(browser, page)
    await browser.until(TEXT, lambda t: "Refresh p-v2-4afbc6dae8" in (t or ""))
    assert await browser.ask("document.querySelectorAll('.time .now').length") == 1
    await browser.ask(
        "document.querySelectorAll('summary').forEach(s => { s.parentElement.open = true });"
        "const i = document.querySelector('input[data-key]'); i.focus(); i.value = '42';"
        "i.dispatchEvent(new Event('input'))"
    )
    apiserver.objects = recorded("failed")
    await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))
    assert await browser.ask("document.activeElement.value") == "42"
    assert await browser.ask("document.querySelectorAll('.time .now').length") == 0


async def test_text_from_objects_is_never_taken_for_markup(
    browser: Browser, page: WebServer, apiserver: Apiserver
) -> None:
    objects = recorded("failed")
    evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    objects["rlpipelines"][0]["status"]["conditions"][-1]["message"] = evil
    objects["enginepools"][0]["status"]["engines"][0]["failure"] = evil
    apiserver.objects = objects
    await show(browser, page)
    await browser.until(TEXT, lambda t: "<img src=x" in (t or ""))
    assert await browser.ask("document.title") == "rlfleet"
    assert await browser.ask("document.querySelectorAll('#fleet img, #fleet script').length") == 0
    assert browser.complaints == []


async def test_a_refused_token_shows_why_and_nothing_else(browser: Browser, page: WebServer) -> None:
    await show(browser, page, "all")
    await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))
    await give(browser, "forged")
    error = "document.getElementById('error').innerText"
    await browser.until(error, lambda t: "does not accept this token" in (t or ""))
    assert await browser.ask(TEXT) == ""
    await give(browser, "one")
    await browser.until(error, lambda t: "Name a namespace that this token may read" in (t or ""))
    await give(browser, "one", NAMESPACE)
    await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))


async def test_the_token_is_kept_nowhere(browser: Browser, page: WebServer) -> None:
    await show(browser, page, "all")
    await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))
    kept = "JSON.stringify([localStorage, sessionStorage]) + document.cookie + location.href"
    assert "all" not in (await browser.ask(kept)).replace("fall", "")
    assert await browser.ask("document.getElementById('token').value") == ""
    await browser.go(f"http://127.0.0.1:{page.port}/?again")
    assert await browser.ask("document.getElementById('live').innerText") == "not connected"


async def test_a_dry_run_is_asked_of_the_operator_and_its_answer_shown(browser: Browser, page: WebServer) -> None:
    await show(browser, page)
    await browser.until(TEXT, lambda t: "StagingDeadline" in (t or ""))
    await browser.ask(
        "document.querySelectorAll('summary').forEach(s => { s.parentElement.open = true });"
        "const i = document.querySelector('input[data-key]'); i.value = '2'; i.dispatchEvent(new Event('input'));"
        "i.form.requestSubmit()"
    )
    text = await browser.until("document.querySelector('[data-guess]').innerText", lambda t: "Would" in (t or ""))
    assert "WouldRun Planned: 1 engines would take version 2" in text
    assert "pause them (Retract), verified" in text
    assert "stays out" in text
    assert "a person keeps it out of service" in text
    assert browser.complaints == []
