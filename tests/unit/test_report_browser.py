"""A real browser opens the report: every plot is drawn, at any width, in light and dark, without a network.

Set REPORT_SCREENSHOTS to a folder to keep what it saw.
"""

import base64
import contextlib
import itertools
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.analysis.report.plots import PHASES
from megatron_dppo.analysis.report.report import compare
from megatron_dppo.analysis.report.sections import TRAINING
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.runtime.files import write_jsonl

NUM_SECTIONS = len(TRAINING) + 9  # reward, evaluation, sources, drift, staleness, time (2), shadows (2)


def _write_run(path: Path, seed: int, *, routed: bool) -> Path:
    """A run with every metric that the report draws, or with all except the routing metrics."""
    noise = random.Random(seed)
    config = {"run": {"seed": seed}, "rollout": {"routing_replay": "replay" if routed else "off"}}
    names = {name for section in TRAINING for name in section.metrics} | {"reward/mean"}
    names |= {f"time/{phase}_s" for phase in PHASES}
    if routed:
        names |= {f"routing/agreement_layer_{n}" for n in range(48)} | {"mismatch_live/num_tokens"}
        names |= {f"mismatch_age_{age}/kl_k3" for age in range(3)}
    else:
        names = {name for name in names if not name.startswith(("routing/", "mismatch_"))}
    names.discard("routing/agreement_layer_<n>")
    with RunFolder.open(path, config, resume=False) as folder:
        for rollout in range(80):
            for step in range(4 * rollout, 4 * rollout + 4):
                values = {f"drift/{name}": noise.random() for name in ("kl_k3", "tv_p999")}
                folder.write_step(rollout, step, values | {"shadow/grpo/masked_fraction": noise.random()})
            row = {name: noise.uniform(0.001, 1) for name in sorted(names)}
            folder.write_rollout(rollout, row, num_rollouts=80)
        folder.write_evaluation(80, {"eval/held_out/avg_at_8": noise.random()})
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on three runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        _write_run(folder / "replay", 1, routed=True),
        _write_run(folder / "a_run_with_a_rather_long_name_as_people_like_to_give", 2, routed=True),
        _write_run(folder / "off", 3, routed=False),
    ]
    _list_masked_tokens(runs[0])
    compare(runs, folder / "report.html")
    return folder / "report.html"


def _list_masked_tokens(run: Path) -> None:
    """As if the run's first rollout had listed what it masked."""
    means = {f"mean_{name}": 0.25 for name in ("mu", "pi", "entropy", "tv")}
    token = {"preset": "active", "sign": "-", "token": " wait<b>", "token_id": 7, "count": 1200, "share": 0.5}
    write_jsonl(run / "clipped_tokens" / "rollout_000000.jsonl", [token | means])
    place = {"sign": "-", "rollout": 0, "sample": "a", "position": 3, "before": "so\n", "after": ", <i>"}
    numbers = {"mu": 0.9, "pi": 0.1, "divergence": 0.8, "advantage": -1.0}
    write_jsonl(run / "masked_tokens" / "step_000000.jsonl", [place | {"token": " wait"} | numbers])


def _figures(report: Path) -> dict[str, Any]:
    found = re.search(r'id="figures">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


class Chromium:
    """A headless browser over --remote-debugging-pipe: no port, no package."""

    FLAGS = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    )
    EXEC = (  # the browser reads commands from descriptor 3 and replies on 4
        "import os, sys; r, w = (os.dup(os.dup(int(a))) for a in sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4);"
        "os.execv(sys.argv[3], sys.argv[3:])"
    )

    def __init__(self, profile: Path) -> None:
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        if binary is None:
            pytest.fail("chromium is not installed: run `make chromium` or `apt-get install -y chromium`")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [sys.executable, "-c", self.EXEC, str(to_browser), str(from_browser), binary, *self.FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its reply; earlier events are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], 120)
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "chromium did not reply within 120 s"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load a page at a width, in a colour scheme, and wait until it is drawn."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 120
        while (
            self.evaluate("document.readyState") != "complete"
            or self.evaluate("location.href") != page.as_uri()
        ):
            assert time.monotonic() < deadline, "the page did not load within 120 s"
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> dict[str, Any]:
        """Press a key and return the focused element: tag, text, class, top edge, and outline style."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])
        return self.evaluate(FOCUSED)

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(image["data"]))

    def close(self) -> None:
        """End the browser that this object started."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        os.close(self._write)
        os.close(self._read)
        self._process.wait(timeout=120)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests of this file."""
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


FOCUSED = """(() => {
    const on = document.activeElement;
    return {tag: on.tagName, text: on.textContent.trim(), class: on.className,
        top: on.getBoundingClientRect().top, outline: getComputedStyle(on).outlineStyle};
})()"""
BOXES = """[...document.querySelectorAll("main table")].map(table => table.closest(".scroll")).filter(
    box => box.checkVisibility()).map(box => ({
        section: box.closest("section").id, right: box.getBoundingClientRect().right,
        fits: box.scrollWidth <= box.clientWidth + 1, scrolls: getComputedStyle(box).overflowX === "auto"}))"""
COLLIDING = """[...document.querySelectorAll(".plot")].flatMap(plot => {
    const places = [...plot.querySelectorAll(".xtick text")];
    const ticks = places.map(e => [e.getBoundingClientRect(), e.textContent]);
    const meet = (a, b) => Math.abs(a.top - b.top) < 5 && a.right > b.left + 1 && b.right > a.left + 1;
    return ticks.flatMap(([a, text], i) => ticks.slice(i + 1).filter(([b]) => meet(a, b)).map(
        ([, other]) => [text, other]));
})"""
DRAWN = """new Promise((done, fail) => {
    const end = Date.now() + 20000;
    (function look() {
        if ([...document.querySelectorAll(".plot")].every(p => p.querySelector(".main-svg"))) done();
        else if (Date.now() > end) fail("not every plot was drawn"); else {
            [...document.querySelectorAll(".plot")].find(p => !p.querySelector(".main-svg")).scrollIntoView();
            setTimeout(look, 30); }
    })();
})"""
PLOTS = """[...document.querySelectorAll("[data-figure]")].map(plot => ({
    id: plot.dataset.figure,
    width: plot.querySelector("svg.main-svg")?.getBoundingClientRect().width ?? 0,
    room: plot.getBoundingClientRect().width,
    folded: Boolean(plot.closest("details:not([open])")),
    traces: [...plot.querySelectorAll(".scatterlayer .trace, .barlayer .trace")].filter(
        t => t.getBoundingClientRect().width > 0).length,
}))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_every_plot(browser: Chromium, report: Path, width: int, scheme: str) -> None:
    """No error, no request beyond the file, each plot with all its lines, nothing wider than the window."""
    browser.open(report, width, scheme)
    folded = [plot for plot in browser.evaluate(PLOTS) if plot["folded"]]
    assert {(plot["id"], plot["traces"]) for plot in folded} == {("shadow", 0), ("shadow-mini-steps", 0)}
    browser.evaluate("document.querySelectorAll('details:has(.plot)').forEach(folded => folded.open = true)")
    browser.evaluate(DRAWN)
    plots = browser.evaluate(PLOTS)
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        browser.screenshot(Path(folder) / f"report-{width}-{scheme}.png")
    figures = _figures(report)
    assert len(figures) == NUM_SECTIONS
    assert {plot["id"]: plot["traces"] for plot in plots} == {
        name: len(figure["data"]) for name, figure in figures.items()
    }
    assert all(0 < plot["width"] <= plot["room"] + 1 for plot in plots)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(BOXES)
    assert boxes and all(box["right"] <= width and (box["fits"] or box["scrolls"]) for box in boxes)
    assert all(
        box["fits"] for box in boxes if box["section"] in ("summary", "mismatch-table") and width == 1280
    )
    assert browser.evaluate(COLLIDING) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (lightness > 200) == (scheme == "light")

    methods = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    assert [event for event in browser.events if event.get("method") in methods] == []
    requests = [
        e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"
    ]
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


TEXTS = """[...document.querySelectorAll("svg")].flatMap(svg => {
    const boxes = [...svg.querySelectorAll("text")].map(e => [e.getBoundingClientRect(), e.textContent]);
    const across = (a, b) => a.right > b.left + 1 && b.right > a.left + 1;
    const meet = (a, b) => across(a, b) && a.bottom > b.top + 4 && b.bottom > a.top + 4;
    return boxes.flatMap(([a, text], i) => boxes.slice(i + 1).filter(([b]) => meet(a, b)).map(
        ([, other]) => [text, other]));
})"""


def test_a_run_is_toggled_in_every_plot(browser: Chromium, report: Path) -> None:
    """One press hides the run's lines everywhere, the next brings them back."""
    browser.open(report, 1280, "light")
    browser.evaluate("document.querySelectorAll('details:has(.plot)').forEach(folded => folded.open = true)")
    browser.evaluate(DRAWN)
    before = browser.evaluate(PLOTS)
    browser.evaluate("document.querySelector(\"[data-run='1']\").click()")
    hidden = browser.evaluate(PLOTS)
    browser.evaluate("document.querySelector(\"[data-run='1']\").click()")
    figures = _figures(report)
    for was, now in zip(before, hidden, strict=True):
        of_run = sum(trace["meta"] == 1 for trace in figures[was["id"]]["data"])
        assert now["traces"] == was["traces"] - of_run
    assert browser.evaluate(PLOTS) == before


def test_everything_is_reached_by_keyboard(browser: Chromium, report: Path) -> None:
    """Skip link, contents, toggles, tables and details: in the page's order, visible when focused."""
    browser.open(report, 390, "dark")
    skip = browser.press("Tab")
    assert (skip["class"], skip["outline"]) == ("skip", "solid") and skip["top"] >= 0
    stops = [skip]
    while (focused := browser.press("Tab"))["tag"] != "BODY" and len(stops) < 100:
        stops.append(focused)
    assert all(stop["outline"] == "solid" for stop in stops)
    tags = [stop["tag"] for stop in stops]
    titles = browser.evaluate('[...document.querySelectorAll("main section h2")].map(h => h.textContent)')
    assert [stop["text"] for stop in stops[1:] if stop["tag"] == "A"] == titles
    assert [tag for tag, _ in itertools.groupby(tags)][:3] == ["A", "BUTTON", "DIV"]
    scrolling = browser.evaluate(
        """[...document.querySelectorAll(".scroll, ol[tabindex], pre")].filter(e => e.checkVisibility())
            .map(e => e.tabIndex === 0 && (e.tagName === "PRE" || Boolean(e.getAttribute("aria-label"))))"""
    )
    assert len(scrolling) >= 3 and all(scrolling) and tags.count("DIV") >= len(scrolling)
    assert tags.count("SELECT") == 1 and tags.count("SUMMARY") == 7
    levels = browser.evaluate('[...document.querySelectorAll("h1, h2, h3")].map(h => Number(h.tagName[1]))')
    assert levels[0] == levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390


def test_keys_press_toggles_and_open_what_was_masked(browser: Chromium, report: Path) -> None:
    browser.open(report, 1280, "light")
    browser.evaluate("document.querySelector('.legend button').focus()")
    browser.press(" ")
    pressed = "document.querySelector('.legend button').getAttribute('aria-pressed')"
    assert browser.evaluate(pressed) == "false"
    browser.press("Enter")
    assert browser.evaluate(pressed) == "true"
    cells = "[...document.querySelectorAll('[data-sign=negative] tbody tr > *')].map(e => e.textContent)"
    assert browser.evaluate(cells) == ["␣wait<b>", "7", "1\u202f200", "50.0 %", "0.25", "0.25", "0.25", "0.25"]
    browser.evaluate("document.querySelector('.contexts summary').focus()")
    browser.press("Enter")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    context = "document.querySelector('.context').innerHTML"
    assert browser.evaluate(context) == 'so↵\n<mark class="negative">␣wait</mark>, &lt;i&gt;'
    if folder := os.environ.get("REPORT_SCREENSHOTS"):
        browser.screenshot(Path(folder) / "report-masked-tokens.png")


def test_many_runs_are_folded_by_setting_and_drawn_when_seen(browser: Chromium, tmp_path: Path) -> None:
    runs: list[Path] = []
    for setting, seed in itertools.product(range(8), range(3)):
        config = {"run": {"seed": seed}, "algorithm": {"delta_low": 0.1 * setting}}
        with RunFolder.open(tmp_path / f"delta_{setting}" / f"seed_{seed}", config, resume=False) as folder:
            values = {name: 0.1 * seed + 0.01 for section in TRAINING for name in section.metrics}
            values |= {f"routing/agreement_layer_{n}": 0.9 for n in range(2)} | {"reward/mean": 0.5}
            folder.write_rollout(0, values, num_rollouts=1)
            folder.write_rollout(1, values, num_rollouts=1)
        runs.append(tmp_path / f"delta_{setting}" / f"seed_{seed}")
    compare(runs, tmp_path / "report.html")
    browser.open(tmp_path / "report.html", 390, "light")
    drawn = "[...document.querySelectorAll('.plot')].map(p => Boolean(p.querySelector('.main-svg')))"
    assert browser.evaluate(drawn).count(False) > 0
    labels = browser.evaluate("[...document.querySelectorAll('[data-run]')].map(b => b.textContent.trim())")
    assert labels == [f"delta_low {0.1 * setting:g} ×3" for setting in range(8)]
    browser.evaluate("document.querySelector('[data-run=\"3 4 5\"]').click()")
    browser.evaluate("document.querySelector('#reward').scrollIntoView()")
    browser.evaluate("new Promise(done => setTimeout(done, 400))")
    plot = next(plot for plot in browser.evaluate(PLOTS) if plot["id"] == "reward")
    assert plot["traces"] == 7 * (3 + 2), "three seeds, their mean and its interval"
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    methods = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    assert [event for event in browser.events if event.get("method") in methods] == []


def test_watched_page_reloads_at_the_same_position(browser: Chromium, tmp_path: Path) -> None:
    """What was hidden stays hidden, what was scrolled to stays in view; the last page reloads no more."""
    runs = [_write_run(tmp_path / name, seed, routed=False) for seed, name in enumerate(("a", "b"))]
    compare(runs, tmp_path / "report.html", refresh_s=1)
    browser.open(tmp_path / "report.html", 1280, "light")
    browser.evaluate("document.querySelector(\"[data-run='1']\").click(); scrollTo(0, 900)")
    compare(runs, tmp_path / "report.html")
    deadline, is_last = time.monotonic() + 120, False
    while not is_last:
        assert time.monotonic() < deadline, "the page did not reload within 120 s"
        time.sleep(0.1)
        with contextlib.suppress(AssertionError):  # asked in the midst of the reload
            is_last = browser.evaluate(
                "document.querySelector('[data-refresh]') === null && document.readyState === 'complete'"
            )
    assert browser.evaluate("new Promise(done => setTimeout(() => done(scrollY), 100))") == 900
    pressed = "document.querySelector(\"[data-run='1']\").getAttribute('aria-pressed')"
    assert browser.evaluate(pressed) == "false"
