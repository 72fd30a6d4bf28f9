"""The page of a served run in a real browser: its form asks its own server, and hostile names are text."""

import json
import os
import threading
import time

import pytest
from chromiumpages import AXE, BROWSER, HOSTILE, TINY, hostile_table
from chromiumtab import Tab

from posterity.cli.frame.folders import find_run
from posterity.cli.main import main
from posterity.cli.serving.app import Limits, make_app
from posterity.cli.serving.guard import Access
from posterity.cli.serving.server import listen
from posterity.cli.verbs.serve import LOOPBACK

uvicorn = pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH"),
]


@pytest.fixture(scope="module", params=["hostile numbers", "hostile classes"])
def site(request, tmp_path_factory):
    """The address of a server of a run, and whether it predicts classes."""
    folder = tmp_path_factory.mktemp("served")
    path, target = hostile_table(folder / "table.csv", request.param.endswith("numbers"))
    run = folder / "run"
    assert main(["fit", str(path), "--target", target, "--method", "map", "--out", str(run), *TINY]) == 0
    app = make_app(run, find_run(run), Access(LOOPBACK), Limits(), quiet=True)
    place = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, args=([place],))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{place.getsockname()[1]}/", request.param.endswith("classes")
    server.should_exit = True
    thread.join(30)


SUBMIT = """(async () => {
    document.activeElement.form.requestSubmit();
    while (!document.querySelector("#answer > *")) await new Promise(later => setTimeout(later, 20));
    return document.getElementById("answer").innerText;
})()"""


def test_the_form_asks_its_own_server(site, tmp_path):
    address, classifies = site
    with Tab(tmp_path) as tab:
        tab.open(address)
        columns = tab.evaluate('Array.from(document.querySelectorAll("[data-column]"), field => field.dataset.column)')
        assert columns == ["a", HOSTILE, "kind"]
        labels = (
            'Array.from(document.querySelectorAll("#ask :is(input, select)"), field => field.labels[0].textContent)'
        )
        assert tab.evaluate(labels) == [*columns, *([] if classifies else ["Level of the interval"])]

        tab.evaluate('document.querySelector("[data-column=a]").focus()')
        told = tab.evaluate(SUBMIT)
        asked = "Array.from(document.querySelectorAll('[data-column]'), f => [f.dataset.column, f.value])"
        row = {name: float(value) if name != "kind" else value for name, value in tab.evaluate(asked)}
        script = f"""fetch("predict", {{method: "POST", headers: {{"Content-Type": "application/json"}},
            body: {json.dumps(json.dumps([row]))}}}).then(reply => reply.json())"""
        (wanted,) = tab.evaluate(script)["predictions"]
        if classifies:
            assert f"{wanted['prediction']}, with probability" in told
        else:
            rounded = float(f"{wanted['mean']:.6g}")
            assert f"mean\t{rounded:,}" in told
            assert "with probability 95 %" in told

        outside = tab.evaluate(
            "document.querySelector('[data-column=a]').value = '1e5';"
            "document.getElementById('answer').replaceChildren();" + SUBMIT
        )
        assert "outside the training rows: its a is unlike theirs" in outside
        wrong = tab.evaluate(
            "document.querySelector('[data-column=a]').value = 'wide';"
            "document.getElementById('answer').replaceChildren();" + SUBMIT
        )
        assert "'wide' is not a number" in wrong
        assert tab.evaluate("document.title") != "broken"
        assert tab.evaluate("document.querySelectorAll('img[src=x], main script').length") == 0
        assert {request.removeprefix(address) for request in tab.requests} <= {"", "predict", "favicon.ico"}
        assert [
            entry for entry in tab.said if "422" not in json.dumps(entry) and "favicon" not in json.dumps(entry)
        ] == []
        blocked = tab.evaluate(
            "fetch('http://127.0.0.1:9/').then(() => 'sent', error => error.name).catch(error => error.name)"
        )
        assert blocked == "TypeError"
        assert any("Content Security Policy" in json.dumps(entry) for entry in tab.said)


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1400, False)])
def test_it_is_no_wider_than_the_screen_and_can_be_read_aloud(site, tmp_path, width, dark):
    with Tab(tmp_path, width, dark=dark) as tab:
        tab.open(site[0])
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        if not AXE.is_file():
            if "POSTERITY_AXE" in os.environ:
                pytest.fail(f"no axe-core at {AXE}")
            return
        tab.evaluate(AXE.read_text(encoding="utf-8") + "; null")
        found = tab.evaluate(
            "axe.run().then(told => told.violations.map(each => [each.impact, each.id, each.nodes[0].html]))"
        )
        assert [each for each in found if each[0] in ("serious", "critical")] == []
