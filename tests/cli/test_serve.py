"""`posterity serve`: the same numbers as `posterity predict`, and who and what is refused."""

import asyncio
import csv
import io
import json
import math
import random
import re
import shlex
import shutil
import sys
from base64 import b64encode
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from servedruns import ask, predict, running

from benchmarks import serve as benchmark
from posterity.cli.frame.folders import find_run
from posterity.cli.frame.outside import reach
from posterity.cli.frame.sources import Source
from posterity.cli.main import main
from posterity.cli.serving.app import Limits, as_json, make_app
from posterity.cli.serving.batching import Model
from posterity.cli.serving.few import FewRows
from posterity.cli.serving.guard import Access
from posterity.cli.serving.page import docs_page, run_page
from posterity.cli.serving.rows import Reader, Refused
from posterity.cli.verbs.serve import LOOPBACK
from posterity.datasets import prepare, read_table
from posterity.datasets.columns import Column
from posterity.storage import Part

pytestmark = pytest.mark.cpu
TINY = ("--method", "ensemble", "--hidden", "4", "--steps", "40", "--prior-scale", "1", "--device", "cpu", "--quiet")
GOOD = {"area": 100.0, "rooms": 3, "garden": "yes", "zone": "A"}


def houses(path: Path) -> Path:
    draw = random.Random(0)
    rows = [[round(draw.uniform(40, 200), 1), draw.randint(1, 6), draw.choice(("yes", "no")), z] for z in "ABC" * 20]
    rows[3][0] = ""
    lines = ["area,rooms,garden,zone,price"]
    lines += [",".join(map(str, [*row, round(1000 * float(row[0] or 100) + 5000 * row[1], 1)])) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    data = houses(folder / "houses.csv")
    assert main(["fit", str(data), "--target", "price", "--out", str(folder / "run"), *TINY]) == 0
    return folder / "run"


def app_of(path, *, token=None, hosts=LOOPBACK, quiet=True, **limits):
    return make_app(path, find_run(path), Access(hosts, token), Limits(**limits), quiet=quiet)


def served(path, calls, **options):
    """The answers of a server of the run to `calls`, a function of the application."""

    async def all_of_it():
        async with running(app_of(path, **options)) as app:
            return await calls(app)

    return asyncio.run(all_of_it())


def test_predictions_are_those_of_the_command_line(run, table_run, tmp_path):
    rows = [GOOD, {"area": None, "rooms": 2, "garden": "no", "zone": "Q"}, {**GOOD, "area": 900.5, "zone": "C"}]
    text = "area,rooms,garden,zone\n100.0,3,yes,A\n,2,no,Q\n900.5,3,yes,C\n"
    (tmp_path / "new.csv").write_text(text)
    told = list(
        csv.DictReader(io.StringIO(run("predict", table_run, "--data", tmp_path / "new.csv", "--level", "0.8").out))
    )

    async def calls(app):
        return [
            await predict(app, {"rows": rows, "level": 0.8}),
            await predict(app, rows, query=b"level=0.8"),
            await predict(app, {"columns": {name: [row[name] for row in rows] for name in GOOD}, "level": 0.8}),
            await predict(app, text.encode(), {b"content-type": b"text/csv; charset=utf-8"}, b"level=0.8"),
        ]

    answers = served(table_run, calls)
    names = ["mean", "std", "lower", "upper", "aleatoric_std", "epistemic_std"]
    for answer in answers:
        assert answer.status == 200, answer.body
        document = answer.json()
        assert document["level"] == 0.8
        assert any("categories that no training row has ('Q')" in note for note in document["notes"])
        for given, wanted in zip(document["predictions"], told, strict=True):
            assert list(given) == [*names, "outside"]
            assert given["outside"] == wanted["outside"]
            for name in names:
                assert given[name] == pytest.approx(float(wanted[name]), rel=1e-5)
    assert [row["outside"] for row in told][1:] == ["zone", "area"]

    async def as_text(app):
        return await predict(app, rows, {b"accept": b"text/csv"})

    lines = list(csv.reader(io.StringIO(served(table_run, as_text).body.decode())))
    assert lines[0] == [*names, "outside"]
    assert len(lines) == 4


def test_classes_have_probabilities(run, fitted_once):
    rows = [{"x1": 0.5, "x2": 0.25}, {"x1": -1, "x2": "0.5"}]
    document = served(fitted_once, lambda app: predict(app, rows)).json()
    pred = find_run(fitted_once).posterior.predict(torch.tensor([[0.5, 0.25], [-1.0, 0.5]]))
    assert list(document) == ["predictions", "notes"]
    names = ["p_upper", "p_lower", "prediction", "entropy", "aleatoric", "epistemic", "outside"]
    assert [list(row) for row in document["predictions"]] == [names] * 2
    assert [row["p_lower"] for row in document["predictions"]] == pytest.approx(pred.probs[:, 1].tolist(), rel=1e-9)
    assert [row["epistemic"] for row in document["predictions"]] == pytest.approx(pred.epistemic.tolist(), rel=1e-6)


BAD_ROWS = {
    "text": ({**GOOD, "area": "wide"}, "'wide' is not a number"),
    "too far": ({**GOOD, "area": 1e30}, "too far from the training rows"),
    "infinite": ({**GOOD, "area": 10**400}, "area"),
    "no column": ({"area": 1.0}, "It has no 'rooms'. Give null where a value is missing."),
    "nested": ({**GOOD, "rooms": [1]}, "'rooms' must be a number, text, true, false or null."),
    "half a sign": ({**GOOD, "zone": "\ud800"}, "'zone' must be a number, text"),
    "no object": (7, "It must be an object with a value for each column. Got a number."),
}


@pytest.mark.parametrize("case", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_each_bad_row_has_a_sentence(table_run, case):
    bad, sentence = case
    answer = served(table_run, lambda app: predict(app, [GOOD, bad, GOOD, bad]))
    assert answer.status == 422
    assert [row["row"] for row in answer.json()["rows"]] == [1, 3]
    assert all(sentence in row["error"] for row in answer.json()["rows"]), answer.body


BAD_BODIES = {
    "no json": (b"{", {}, 422, "The body must be JSON in UTF-8"),
    "bytes": (b"\xff\xfe", {}, 422, "The body must be JSON in UTF-8"),
    "nan": (b'[{"area": NaN}]', {}, 422, "NaN is no number there"),
    "deep": (b"[" * 7_000, {}, 422, "The body must be JSON"),
    "text": (b'"rows"', {}, 422, "The body must be a list of objects"),
    "no rows": (b"[]", {}, 422, "1 to 50 rows. Got 0"),
    "many rows": (json.dumps([GOOD] * 51).encode(), {}, 413, "1 to 50 rows. Got 51"),
    "many lines": (b"area,rooms,garden,zone\n" + b"1,2,yes,A\n" * 70, {b"content-type": b"text/csv"}, 413, "1 to 50"),
    "large": (b" " * 9000, {}, 413, "A body may have 8,000 bytes"),
    "another key": (b'{"rows": [], "lvl": 1}', {}, 422, "Unknown key 'lvl'"),
    "no column": (b'{"columns": {"area": [1]}}', {}, 422, "There is no column 'rooms'"),
    "uneven": (b'{"columns": {"area": [1], "rooms": [], "garden": [], "zone": []}}', {}, 422, "same number of rows"),
    "a level": (json.dumps({"rows": [GOOD], "level": 2}).encode(), {}, 422, "level must be a number between 0 and 1"),
    "packed": (b"PK\x03\x04" + bytes(9), {b"content-type": b"text/csv"}, 422, "packed or binary"),
    "other columns": (b"area,size\n1,2\n3,4\n", {b"content-type": b"text/csv"}, 422, "rooms"),
    "a form": (b"area=1", {b"content-type": b"application/x-www-form-urlencoded"}, 415, "Content-Type must be"),
}


def test_bad_bodies_are_refused_with_a_sentence(table_run):
    async def calls(app):
        return [await predict(app, body, headers) for body, headers, _, _ in BAD_BODIES.values()]

    answers = served(table_run, calls, rows=50, bytes=8000)
    for (_, _, status, sentence), answer in zip(BAD_BODIES.values(), answers, strict=True):
        assert (answer.status, sentence in answer.json()["error"]) == (status, True), (sentence, answer.body)


def test_a_level_in_the_address_is_a_number_between_0_and_1(table_run):
    async def calls(app):
        return [await predict(app, [GOOD], query=b"level=" + level) for level in (b"95%25", b"nan", b"0", b"", b"0.8")]

    *bad, good = served(table_run, calls)
    assert [answer.status for answer in bad] == [422] * 4
    assert "level must be a number between 0 and 1. Got '95%'" in bad[0].json()["error"]
    assert (good.status, good.json()["level"]) == (200, 0.8)


def test_a_table_may_have_as_many_rows_as_are_allowed(table_run):
    async def calls(app):
        head, row, csv_type = b"area,rooms,garden,zone", b"1,2,yes,A", {b"content-type": b"text/csv"}
        bodies = [end.join([head, *[row] * 4]) + last for end in (b"\n", b"\r\n") for last in (b"", end)]
        return [await predict(app, body, csv_type) for body in bodies]

    assert [answer.status for answer in served(table_run, calls, rows=4)] == [200] * 4


def test_a_body_that_does_not_come_is_not_waited_for(table_run):
    async def calls(app):
        sent = []

        async def receive():
            await asyncio.sleep(5)

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        await app({**scope, "root_path": "", "http_version": "1.1"}, receive, send)
        return sent

    assert served(table_run, calls, seconds=0.05)[0]["status"] == 408


def test_a_client_that_goes_away_is_counted_and_leaves_no_room_taken(table_run):
    async def calls(app):
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        await app({**scope, "root_path": "", "http_version": "1.1"}, receive, send)
        return sent[0]["status"], (await predict(app, [GOOD])).status, (await ask(app, path="/metrics")).body.decode()

    gone, after, counts = served(table_run, calls, held=4096)
    assert (gone, after) == (400, 200)
    assert 'posterity_requests_total{path="/predict",status="400"} 1' in counts


def test_numbers_that_json_does_not_have_are_null():
    document = {"predictions": [{"mean": math.inf, "lower": -math.inf, "outside": ""}, {"mean": 1.5}], "notes": ()}
    told = json.loads(bytes(as_json(document).body))
    assert told == {"predictions": [{"mean": None, "lower": None, "outside": ""}, {"mean": 1.5}], "notes": []}


def test_bodies_of_all_requests_together_have_a_limit(table_run):
    body = json.dumps([GOOD] * 30).encode()
    limits = {"held": 2 * 4096 + len(body) + 100, "bytes": 2 * len(body)}

    async def calls(app):
        arrived, sent = asyncio.Event(), []

        async def receive():
            if not arrived.is_set():
                arrived.set()
                return {"type": "http.request", "body": body[:-1], "more_body": True}
            await finish.wait()
            return {"type": "http.request", "body": body[-1:], "more_body": False}

        async def send(message):
            sent.append(message)

        finish = asyncio.Event()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": headers}
        slow = asyncio.create_task(app({**scope, "root_path": "", "http_version": "1.1"}, receive, send))
        await arrived.wait()
        declared = await predict(app, body)
        undeclared = await predict(app, body, {b"content-length": b"0"})
        small = await predict(app, [GOOD])
        finish.set()
        await slow
        wrong = [await predict(app, bad) for bad in (b"{", b" " * (1 + 2 * len(body)), b"[]")]
        return declared, undeclared, small, sent[0]["status"], wrong, [await predict(app, body) for _ in range(3)]

    declared, undeclared, small, slow, wrong, after = served(table_run, calls, **limits)
    for refused in (declared, undeclared):
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "holds as many requests as it may" in refused.json()["error"]
    assert (small.status, slow) == (200, 200)
    assert [answer.status for answer in wrong] == [422, 413, 422]
    assert [answer.status for answer in after] == [200] * 3


KINDS_OF_COLUMNS = {
    "area": ["40.5", "61", "88", "120.25", "", "200"],
    "rooms": ["1", "2", "3", "4", "5", "7"],
    "garden": ["yes", "no", "yes", "no", "yes", "no"],
    "cellar": ["true", "false", "", "true", "false", "true"],
    "zone": ["A", "B", "C", "A", "B", "C"],
    "agent": ["Ann", "", "Bob", "Ann", "Bob", ""],
    "code": ["1", "2", "1", "2", "1", "2"],
}
VALUES = {
    "area": [
        100.0,
        61,
        3,
        2**53,
        2**53 + 1,
        10**30,
        10**400,
        1e-320,
        -0.0,
        None,
        True,
        "12.5",
        "1,5",
        "",
        "wide",
        1e30,
    ],
    "rooms": [1, 2.5, None, False, "3", " 3", "NA", 7, 7.5, -4],
    "garden": ["yes", "no", "NO", True, None, 0, 1, "maybe"],
    "cellar": ["true", "False", True, False, None, 1, "no"],
    "zone": ["A", "B", "C", "Q", "", None, 1, 2.0, True, "NA"],
    "agent": ["Ann", "Bob", None, "Cleo", ""],
    "code": ["1", "2", 1, 2.0, True, None, "3"],
    "price": [5.0, "?"],
    "other": [1],
    "share": [0.02, "3 %"],
    "built": ["2020-01-31", 18_270],
}


def run_on(folder: Path, **further):
    """What a reader of requests takes from a run on a table with columns of all kinds, and of `further` ones."""
    columns = {**KINDS_OF_COLUMNS, **further, "price": ["1", "2", "3", "4", "5", "6.5"]}
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    (folder / "kinds.csv").write_text("\n".join([lines[0], *lines[1:] * 40]) + "\n")
    table = read_table(folder / "kinds.csv", "price", category=["code"])
    prepared = prepare(table)
    part = Part({}, reach(Source(prepared.data, preprocessing=prepared.preprocessing)))
    return SimpleNamespace(preprocessing=prepared.preprocessing, reach=part, config={})


def in_two_ways(run, monkeypatch, count, odd):
    """Random rows with so many odd values each, and what a reader makes of them with `FewRows` and without."""
    reader, draw = Reader(run, 50), random.Random(0)

    def told(rows):
        try:
            inputs, *rest = reader.read(json.dumps(rows).encode(), "application/json", None)
        except Refused as error:
            return str(error), error.rows
        return inputs.numpy().tobytes(), inputs.shape, inputs.dtype, rest

    def row(names):
        chosen = draw.sample(names, odd)
        return {name: draw.choice(VALUES[name] if name in chosen else VALUES[name][:2]) for name in names}

    for _ in range(count):
        names = [*reader.columns, *(name for name in ("price", "other") if draw.random() < 0.05 * odd)]
        rows = [row(names) for _ in range(draw.choice((1, 1, 2, 4)))]
        given = told(rows)
        with monkeypatch.context() as patch:
            patch.setattr(FewRows, "encoded", lambda *args: None)
            yield rows, given, told(rows)


@pytest.mark.parametrize("odd", [0, 1, 2, len(KINDS_OF_COLUMNS)])
def test_few_rows_are_encoded_as_whole_columns(tmp_path, monkeypatch, odd):
    """Inputs to the bit, what is outside, notes and refusals."""
    taken, encoded = [], FewRows.encoded
    monkeypatch.setattr(FewRows, "encoded", lambda *args: taken.append(encoded(*args)) or taken[-1])
    for rows, given, wanted in in_two_ways(run_on(tmp_path), monkeypatch, 200, odd):
        assert given == wanted, rows
    shares = {0: (1.0, 1.0), 1: (0.1, 0.7), 2: (0.02, 0.5), len(KINDS_OF_COLUMNS): (0.0, 0.1)}
    low, high = shares[odd]
    assert low <= sum(known is not None for known in taken) / len(taken) <= high


def test_few_rows_of_a_run_without_ranges_are_encoded_as_whole_columns(tmp_path, monkeypatch):
    run = run_on(tmp_path)
    run.reach = None
    for rows, given, wanted in in_two_ways(run, monkeypatch, 100, 1):
        assert given == wanted, rows


@pytest.mark.parametrize(
    "further", [{"share": [f"{n} %" for n in range(6)]}, {"built": [f"2020-01-{n:02}" for n in (3, 10, 17, 24, 31, 3)]}]
)
def test_signs_and_dates_are_left_to_whole_columns(tmp_path, monkeypatch, further):
    for rows, given, wanted in in_two_ways(run_on(tmp_path, **further), monkeypatch, 30, 1):
        assert given == wanted, rows


def test_columns_of_plain_values_are_those_of_a_frame(tmp_path, monkeypatch):
    """They take no way through Arrow's functions: the inputs are the same to the bit."""
    reader, draw, plain, fast = Reader(run_on(tmp_path), 50), random.Random(0), Column.of_values, 0
    monkeypatch.setattr(FewRows, "encoded", lambda *args: None)

    def told(rows):
        try:
            asked = reader.read(json.dumps(rows).encode(), "application/json", None)
        except Refused as error:
            return str(error), error.rows
        return asked.inputs.tolist(), asked.outside, asked.notes

    for _ in range(150):
        rows = [{name: draw.choice(VALUES[name]) for name in reader.columns} for _ in range(draw.choice((1, 1, 2, 4)))]
        given = told(rows)
        with monkeypatch.context() as patch:
            patch.setattr(Column, "of_values", lambda *args: None)
            assert given == told(rows), rows
        fast += isinstance(given[0], list) and all(
            plain(Path("table"), name, [row[name] for row in rows], range(len(rows))) for name in reader.columns
        )
    assert fast > 5


def test_concurrent_requests_share_a_pass_and_get_their_own_rows(table_run):
    asked = [({**GOOD, "area": 50.0 + 5 * index}, 0.5 + 0.4 * (index % 2)) for index in range(12)]

    async def calls(app):
        each = [
            predict(app, {"rows": [row] * (1 + index % 3), "level": level}) for index, (row, level) in enumerate(asked)
        ]
        together = await asyncio.gather(*each)
        passes = (await ask(app, path="/metrics")).body.decode()
        alone = [await predict(app, {"rows": [row], "level": level}) for row, level in asked]
        return together, alone, int(re.search(r"posterity_passes_total (\d+)", passes)[1])

    together, alone, passes = served(table_run, calls, window=0.05)
    assert passes < 6
    for index, (shared, single) in enumerate(zip(together, alone, strict=True)):
        rows, (wanted,) = shared.json()["predictions"], single.json()["predictions"]
        assert len(rows) == 1 + index % 3
        for row in rows:
            numbers = {name: value for name, value in wanted.items() if name != "outside"}
            assert row == {**{k: pytest.approx(v, rel=1e-5) for k, v in numbers.items()}, "outside": wanted["outside"]}
    assert len({answer.json()["predictions"][0]["mean"] for answer in together}) == len(asked)


def test_a_pass_that_fails_spoils_no_other_request(table_run, monkeypatch, capsys):
    whole = Model.answers

    def answers(self, requests):
        if any(len(asked) == 2 for asked in requests):
            raise RuntimeError("no memory")
        return whole(self, requests)

    monkeypatch.setattr(Model, "answers", answers)

    async def calls(app):
        return await asyncio.gather(*(predict(app, [GOOD] * count) for count in (1, 2, 3)), return_exceptions=True)

    first, second, third = served(table_run, calls, window=0.05)
    assert (first.status, third.status) == (200, 200)
    assert second.status == 500 if not isinstance(second, Exception) else "no memory" in str(second)
    assert "RuntimeError: no memory" in capsys.readouterr().err


def test_other_hosts_and_origins_are_refused(table_run):
    async def status(app, **headers):
        named = {name.encode(): value for name, value in headers.items()}
        return (await ask(app, headers=named.items())).status

    async def calls(app):
        assert [await status(app, host=h) for h in (b"localhost", b"127.0.0.1:8000", b"[::1]:80", b"LOCALHOST")] == [
            200
        ] * 4
        bad = (b"evil.example", b"", b"localhost.evil.example", b"a:b", b"x@localhost", b"192.168.0.1", b"localhost/x")
        assert [await status(app, host=h) for h in bad] == [421] * len(bad)
        assert await status(app, origin=b"http://localhost:8000") == 200
        for origin in (b"http://evil.example", b"null", b"http://localhost:9999", b"http://localhost"):
            assert await status(app, origin=origin) == 403
        asked = await ask(app, "OPTIONS", "/predict", headers={b"origin": b"http://evil.example"}.items())
        assert asked.status == 403
        assert not [name for name in asked.headers if name.startswith("access-control")]

    served(table_run, calls)


def test_names_of_hosts_are_the_same_in_capitals():
    for host in (b"models.example", b"Models.Example:8000", b"MODELS.EXAMPLE"):
        assert Access((*LOOPBACK, "Models.Example")).refusal({b"host": host}, "/") is None


def test_a_token_opens_the_server(table_run, monkeypatch):
    async def status(app, given, path="/metrics"):
        headers = {} if given is None else {b"authorization": given}
        return (await ask(app, path=path, headers=headers.items())).status

    async def calls(app):
        basic = b"Basic " + b64encode(b"anyone:secret")
        assert [await status(app, given) for given in (b"Bearer secret", b"bearer secret", basic)] == [200] * 3
        wrong = (
            None,
            b"",
            b"Bearer",
            b"Bearer secre",
            b"secret",
            b"Basic !",
            b"Basic " + b64encode(b"secret:"),
            b"Bearer \xff",
        )
        assert [await status(app, given) for given in wrong] == [401] * len(wrong)
        assert [await status(app, None, path) for path in ("/health", "/ready", "/", "/nope")] == [200, 200, 401, 401]
        assert (await ask(app, headers={b"host": b"10.0.0.7:80"}.items(), path="/ready")).status == 200

    served(table_run, calls, token="secret")
    from posterity.cli.serving import guard

    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda *pair: compared.append(pair) or True)
    assert Access(LOOPBACK, "secret").refusal({b"host": b"localhost", b"authorization": b"Bearer x"}, "/") is None
    assert compared == [(b"x", b"secret")]


def test_request_ids_go_in_and_out_and_into_the_log(table_run, capsys):
    async def calls(app):
        given = await ask(app, headers={b"x-request-id": b"mine-7"}.items(), path="/health")
        odd = await ask(app, headers={b"x-request-id": b"a b\n"}.items(), path="/health\x1b[31m")
        return given, odd

    given, odd = served(table_run, calls, quiet=False)
    assert given.headers["x-request-id"] == "mine-7"
    assert re.fullmatch(r"[0-9a-f]{16}", odd.headers["x-request-id"])
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"mine-7 GET /health 200 [\d.]+ ms", lines[0])
    assert "\x1b" not in lines[1]
    assert given.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_the_report_with_a_form_for_a_row(table_run, tmp_path):
    async def calls(app):
        return [await ask(app, path=path) for path in ("/", "/", "/docs")]

    page, again, docs = (answer.body.decode() for answer in served(table_run, calls))
    assert page == again
    assert '<p class="verdict">' in page
    assert 'data-figure="observed"' in page
    assert re.findall(r'data-column="(\w+)"', page) == ["area", "rooms", "garden", "zone"]
    assert [text for text in ("connect-src 'self'", "connect-src") if text in page] == [
        "connect-src 'self'",
        "connect-src",
    ]
    assert "connect-src" not in docs
    for name in re.findall(r'data-column="[^>]*id="([\w-]+)"|id="([\w-]+)" data-column', page):
        assert f'<label for="{"".join(name)}">' in page

    for part in table_run.iterdir():
        (shutil.copytree if part.is_dir() else shutil.copy)(part, tmp_path / part.name)
    run = find_run(tmp_path)
    gone = run_page(tmp_path, replace(run, file=tmp_path / "gone.csv"), list(GOOD))
    assert "There is no report:" in gone
    assert "Scores of the test rows" in gone
    assert 'id="ask"' in gone


def test_pages_ask_nothing_of_other_places(table_run):
    async def calls(app):
        return [await ask(app, path=path) for path in ("/", "/docs", "/openapi.json")]

    page, docs, schema = served(table_run, calls)
    assert "on houses" in page.body.decode()
    for each in (page, docs):
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", each.body.decode())
        assert "default-src 'none'" in each.body.decode()
    body = schema.json()["paths"]["/predict"]["post"]["requestBody"]["content"]
    assert body["application/json"]["schema"]["oneOf"][0]["items"]["required"] == ["area", "rooms", "garden", "zone"]
    assert "area, rooms, garden, zone" in docs.body.decode()


def test_the_example_can_be_pasted_whatever_columns_are_called():
    shown = unescape(docs_page({"paths": {}}, {"owner's; area": 1.0}, "http://localhost:8000/"))
    words = shlex.split(shown[shown.index("curl ") : shown.index("</pre>")])
    assert json.loads(words[words.index("-d") + 1]) == [{"owner's; area": 1.0}]


def test_the_example_is_answered_at_the_address_that_was_asked(table_run):
    async def calls(app):
        shown = unescape((await ask(app, path="/docs")).body.decode())
        words = shlex.split(shown[shown.index("curl ") : shown.index("</pre>")])
        return words[-1], await predict(app, json.loads(words[words.index("-d") + 1]))

    address, answer = served(table_run, calls)
    assert address == "http://localhost:8000/predict"
    assert answer.status == 200
    assert answer.json()["predictions"][0]["outside"] == ""


def test_metrics_count_what_was_answered(table_run):
    async def calls(app):
        await predict(app, [GOOD, GOOD])
        await predict(app, b"{")
        for path in ("/nope", "/a", "/b"):
            await ask(app, path=path)
        return (await ask(app, path="/metrics")).body.decode()

    text = served(table_run, calls)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['posterity_requests_total{path="/predict",status="200"}'] == "1"
    assert values['posterity_requests_total{path="/predict",status="422"}'] == "1"
    assert values['posterity_requests_total{path="other",status="404"}'] == "3"
    assert values["posterity_rows_total"] == "2"
    assert values['posterity_request_seconds_bucket{le="+Inf"}'] == values["posterity_request_seconds_count"] == "5"


def test_a_server_that_stops_takes_no_new_requests(table_run):
    async def calls(app):
        app.draining = True
        return [await ask(app, path="/ready"), await predict(app, [GOOD]), await ask(app, path="/health")]

    ready, refused, health = served(table_run, calls)
    assert (ready.status, refused.status, health.status) == (503, 503, 200)
    assert refused.headers["connection"] == "close"


def test_options_are_checked(run, table_run, monkeypatch):
    monkeypatch.delenv("POSTERITY_TOKEN", raising=False)
    open_to_all = run("serve", table_run, "--host", "0.0.0.0")
    assert open_to_all.code == 2
    assert "needs a token" in open_to_all.err
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "fastapi", None)  # else it would serve
        assert "needs a token" in run("serve", table_run, "--host", "0.0.0.0", "--token", " \n").err
    assert run("serve", table_run, "--port", "99999").code == 2
    assert run("serve", table_run.parent).code == 4
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    missing = run("serve", table_run)
    assert missing.code == 1
    assert "pip install 'posterity[serve]'" in missing.err


def test_fuzzed_requests_never_fail(table_run, capsys):
    """A small version of `python -m benchmarks.serve`, without sockets."""
    fuzzer = benchmark.Fuzzer(1)

    async def calls(app):
        statuses = []
        for _ in range(150):
            kind = random.choice((b"application/json",) * 3 + (b"text/csv",))
            statuses.append((await predict(app, fuzzer.body(), {b"content-type": kind})).status)
        return statuses

    statuses = served(table_run, calls)
    assert set(statuses) <= {200, 413, 422}
    assert {200, 422} <= set(statuses)
    assert "error:" not in capsys.readouterr().err


def test_sigterm_under_load_loses_no_accepted_request(table_run, tmp_path):
    facts = benchmark.stop(table_run, tmp_path, 0.5)
    assert facts["exit_code"] == 0, facts
    assert facts["server"] == facts["clients"]
    assert sum(facts["server"].values()) > 0
    assert facts["sound"]
    assert facts["refused_afterwards"]
