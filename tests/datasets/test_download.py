"""Downloads: only whole and right files get their names, whatever the other side does."""

import gzip
import hashlib
import io
import lzma
import socket
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posterity.datasets import cifar10_test, download, uci, uci_regression
from posterity.datasets import images as cifar
from posterity.datasets import images as idx
from posterity.datasets.catalogue import catalogue, locate
from posterity.datasets.download import Unreachable
from posterity.errors import BadData, PosterityError

pytestmark = pytest.mark.cpu

IMAGES, LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
PIXELS = bytes(range(256)) * 1000


def sha(data):
    return hashlib.sha256(data).hexdigest()


def entry(name):
    return next(known for known in catalogue() if known.name == name)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def server(monkeypatch):
    """A web server of this test: `files` by path, `asked` what was asked for, `short` bytes kept back at the end."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.asked.append(self.path)
            if web.hang.is_set():
                web.released.wait(20)
                return
            if self.path not in web.files:
                self.send_error(web.refusal)
                return
            data = web.files[self.path]
            self.send_response(200)
            if web.length:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) - web.short])

        def log_message(self, *words):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.files, web.asked, web.short, web.refusal, web.length = {}, [], 0, 404, True
    web.hang, web.released = threading.Event(), threading.Event()
    web.address = f"http://127.0.0.1:{web.server_address[1]}"
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.released.set()
    web.shutdown()
    thread.join()
    web.server_close()


@pytest.fixture
def kmnist(server, monkeypatch):
    """A small KMNIST on the server under /k/; the sums are of what its two files hold."""
    content = {IMAGES: PIXELS, LABELS: b"labels"}
    monkeypatch.setitem(idx._SUMS, "kmnist", {name: sha(data) for name, data in content.items()})
    server.files.update({f"/k/{name}": gzip.compress(data) for name, data in content.items()})
    return entry("kmnist")


@pytest.mark.parametrize("base", ["/k", "/k/"])
def test_files_are_fetched_checked_and_not_fetched_again(kmnist, server, tmp_path, base):
    lines = []
    got = download.download(kmnist, into=tmp_path, source=server.address + base, progress=lines.append)
    assert got == download.Downloaded(tmp_path / "kmnist", (IMAGES, LABELS), (), ())
    assert names(tmp_path) == [f"kmnist/{IMAGES}", f"kmnist/{LABELS}"]
    assert gzip.decompress((got.folder / IMAGES).read_bytes()) == PIXELS
    assert lines[0] == f"{server.address}/k/{IMAGES} ({len(server.files['/k/' + IMAGES]):,} bytes)"
    again = download.download(kmnist, into=tmp_path, source=server.address + base)
    assert (again.fetched, again.kept) == ((), (IMAGES, LABELS))
    assert server.asked == [f"/k/{IMAGES}", f"/k/{LABELS}"]
    (got.folder / LABELS).write_bytes(b"damaged")
    assert download.download(kmnist, into=tmp_path, source=server.address + base).fetched == (LABELS,)


def test_the_user_cache_is_the_default_and_a_length_need_not_be_told(kmnist, server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POSTERITY_DATA", raising=False)
    server.length = False
    assert download.download(kmnist, source=f"{server.address}/k").folder == tmp_path / "posterity" / "kmnist"
    assert locate(kmnist, check=True).status == "here"


def test_another_file_is_refused_and_the_old_one_stays(kmnist, server, tmp_path):
    (tmp_path / "kmnist").mkdir()
    (tmp_path / "kmnist" / IMAGES).write_bytes(b"old")
    server.files[f"/k/{IMAGES}"] = gzip.compress(b"other")
    with pytest.raises(BadData) as caught:
        download.download(kmnist, into=tmp_path, source=f"{server.address}/k/")
    for part in (f"{server.address}/k/{IMAGES}: not the published file", sha(PIXELS), f"Got {sha(b'other')}"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == [f"kmnist/{IMAGES}"]
    assert (tmp_path / "kmnist" / IMAGES).read_bytes() == b"old"
    assert list((tmp_path / "kmnist").iterdir()) == [tmp_path / "kmnist" / IMAGES]


@pytest.mark.parametrize(
    ("length", "message"), [(True, r"must have \d+ bytes\. Got \d+: .*too early"), (False, "gzip")]
)
def test_a_truncated_body_is_refused(kmnist, server, tmp_path, length, message):
    server.short, server.length = 7, length
    with pytest.raises(BadData, match=message):
        download.download(kmnist, into=tmp_path, source=f"{server.address}/k")
    assert not list(tmp_path.iterdir())


def test_a_file_without_end_is_refused(kmnist, server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_LIMIT", 100)
    with pytest.raises(BadData, match=r"must have at most 100 bytes"):
        download.download(kmnist, into=tmp_path, source=f"{server.address}/k")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("status", "message"), [(404, "404 Not Found"), (503, "503 Service Unavailable")])
def test_what_the_server_refuses_is_said(kmnist, server, tmp_path, status, message):
    server.refusal = status
    with pytest.raises(
        Unreachable, match=rf"/nowhere/{IMAGES}: cannot be fetched: .*{message}\. Check .*--from"
    ) as caught:
        download.download(kmnist, into=tmp_path, source=f"{server.address}/nowhere")
    assert caught.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_a_refused_connection_is_said(kmnist, tmp_path):
    with socket.socket() as free:  # bound, but nobody listens
        free.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match=r"cannot be fetched: Connection refused\. Check the connection"):
            download.download(kmnist, into=tmp_path, source=f"http://127.0.0.1:{free.getsockname()[1]}/")
    assert not list(tmp_path.iterdir())


def test_a_silent_server_is_given_up(kmnist, server, tmp_path, monkeypatch):
    assert download.TIMEOUT == 30
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    server.hang.set()
    with pytest.raises(Unreachable, match=r"no answer within 0\.2 seconds"):
        download.download(kmnist, into=tmp_path, source=f"{server.address}/k")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_download_leaves_no_file(server, tmp_path, monkeypatch):
    monkeypatch.setitem(uci._CLASSIFICATION, "wdbc", uci._CLASSIFICATION["wdbc"]._replace(sum=sha(PIXELS)))
    monkeypatch.setattr(download, "_STEP", 100_000)
    server.files["/wdbc.data"] = PIXELS
    seen = []

    def interrupt(line):
        seen.append(names(tmp_path))
        if "so far" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.download(entry("wdbc"), into=tmp_path, source=server.address, progress=interrupt)
    assert len(seen) == 2
    assert any("/.tmp-" in name for name in seen[-1])  # half a file was there
    assert not list(tmp_path.iterdir())
    assert download.download(entry("wdbc"), into=tmp_path, source=server.address).fetched == ("wdbc.data",)
    assert (tmp_path / "uci-classification/wdbc/wdbc.data").read_bytes() == PIXELS


def test_a_folder_or_file_address_may_be_the_source(kmnist, server, tmp_path):
    source = tmp_path / "a source"
    source.mkdir()
    for name in (IMAGES, LABELS):
        (source / name).write_bytes(server.files[f"/k/{name}"])
    for place, given in (("one", str(source)), ("two", source.as_uri())):
        assert download.download(kmnist, into=tmp_path / place, source=given).fetched == (IMAGES, LABELS)
    assert names(source) == [IMAGES, LABELS]
    (source / LABELS).unlink()
    with pytest.raises(Unreachable, match=rf"{LABELS}: cannot be fetched: there is no such file\. Give another folder"):
        download.download(kmnist, into=tmp_path / "three", source=str(source))
    assert names(tmp_path / "three") == [f"kmnist/{IMAGES}"]  # right, and kept for the next time
    assert server.asked == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("wdbc", "", r"no address is known .*'wdbc'.*--from"),
        ("kmnist", "ftp://host/k", r"must begin with http://, https:// or file://\. Got 'ftp://host/k'"),
        ("kmnist", "file://host/k", r"must name no host"),
        ("kmnist", "/no/such/folder", r"must exist\. Got '/no/such/folder'"),
    ],
)
def test_sources_that_cannot_be(name, source, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        download.download(entry(name), into=tmp_path, source=source)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_said(kmnist, server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PosterityError, match=r"cannot be written: .*Make room there, or choose another folder\.$"):
        download.download(kmnist, into=tmp_path / "file", source=f"{server.address}/k")


@pytest.fixture
def energy(server, monkeypatch):
    data = b"".join(b"%d %d %d\n" % (row, row * 10, -row) for row in range(5))
    files = {"data.txt": data, "index_features.txt": b"0\n2\n", "index_target.txt": b"1\n"}
    files |= {"index_train_0.txt": b"4\n0\n2\n", "index_test_0.txt": b"3.0\n1.0\n"}
    monkeypatch.setitem(uci._REGRESSION, "energy", uci._Regression(5, 2, 1, sha(data)))
    server.files.update({f"/{name}": content for name, content in files.items()})
    return entry("energy")


def test_a_regression_set_comes_with_its_splits(energy, server, tmp_path):
    got = download.download(energy, into=tmp_path, source=server.address)
    assert got.folder == tmp_path / "uci" / "energy" / "data"
    assert len(got.fetched) == 5
    assert set(got.without_sum) == set(got.fetched) - {"data.txt"}
    assert uci_regression("energy", 0, root=got.folder).test.targets.tolist() == [[30], [10]]
    (got.folder / "index_test_0.txt").write_bytes(b"3\n2\n")
    again = download.download(energy, into=tmp_path, source=server.address)
    assert again.fetched == ("index_train_0.txt", "index_test_0.txt")
    assert again.kept == ("data.txt", "index_features.txt", "index_target.txt")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("index_test_0.txt", b"3\n2\n", r"index_train_0\.txt and index_test_0\.txt must share out 5 rows"),
        ("index_test_0.txt", b"<html>", r"/index_test_0\.txt: it must hold whole numbers"),
        ("index_target.txt", b"7", r"/index_target\.txt: its numbers must be whole and from 0 to 2\. Got 7\."),
    ],
)
def test_splits_that_do_not_fit_the_table_are_refused(energy, server, tmp_path, file, content, message):
    server.files[f"/{file}"] = content
    with pytest.raises(BadData, match=message) as caught:
        download.download(energy, into=tmp_path, source=server.address)
    assert str(caught.value).startswith(server.address)
    assert file not in {path.name for path in tmp_path.rglob("*")}


@pytest.fixture
def colours(monkeypatch):
    """Plain batches of a small CIFAR-10 whose sums are known, packed and plain."""
    monkeypatch.setattr(cifar, "_ROWS", 1)
    plain = {name: bytes((place,)) + bytes(3072) for place, name in enumerate(cifar._PLAIN)}
    for name, data in plain.items():
        monkeypatch.setitem(cifar._PLAIN, name, sha(data))
        sums = cifar._TEST if name.startswith("test") else cifar._TRAIN
        monkeypatch.setitem(sums, f"{name}.xz", sha(lzma.compress(data)))
    return plain


def archive(files):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def in_folder(plain):
    return {f"cifar-10-batches-bin/{name}": data for name, data in plain.items()}


@pytest.mark.parametrize("base", ["", "/cifar-10-binary.tar.gz"])
def test_cifar_comes_out_of_its_archive_as_plain_files(colours, server, tmp_path, base, monkeypatch):
    server.files["/cifar-10-binary.tar.gz"] = archive(in_folder(colours) | {"cifar-10-batches-bin/readme.html": b"x"})
    folder = tmp_path / "cifar-10"
    folder.mkdir()
    (folder / "test_batch.bin.xz").write_bytes(b"damaged")
    (folder / "data_batch_2.bin.xz").write_bytes(lzma.compress(colours["data_batch_2.bin"]))
    got = download.download(entry("cifar-10"), into=tmp_path, source=server.address + base)
    assert set(got.fetched) == set(colours) - {"data_batch_2.bin"}
    assert got.kept == ("data_batch_2.bin.xz",)
    assert names(folder) == sorted([*got.fetched, *got.kept])
    assert cifar10_test(folder).targets.tolist() == [5]
    monkeypatch.setenv("POSTERITY_DATA", str(tmp_path))
    assert locate(entry("cifar-10"), check=True).status == "here"
    assert download.download(entry("cifar-10"), into=tmp_path, source=server.address + base).fetched == ()
    assert server.asked == ["/cifar-10-binary.tar.gz"]
    (folder / "test_batch.bin").write_bytes(b"damaged")
    assert locate(entry("cifar-10"), check=True).damaged == ("test_batch.bin",)
    with pytest.raises(BadData, match=r"test_batch\.bin: not the published file"):
        cifar10_test(folder)


def test_cifar_comes_from_a_place_with_the_batches_themselves(colours, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, data in colours.items():
        if name == "test_batch.bin":
            (source / name).write_bytes(data)
        else:
            (source / f"{name}.xz").write_bytes(lzma.compress(data))
    got = download.download(entry("cifar-10"), into=tmp_path / "into", source=str(source))
    assert names(tmp_path / "into" / "cifar-10") == names(source) == sorted(got.fetched)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files | {"../../outside.bin": b"x"}, r"not a sound tar\.gz archive: .*outside"),
        (lambda files: {f"../{name}": data for name, data in files.items()}, r"not a sound tar\.gz archive: .*outside"),
        (lambda files: dict(list(files.items())[:-1]), r"It lacks test_batch\.bin\.$"),
        (
            lambda files: files | {"cifar-10-batches-bin/test_batch.bin": b"x"},
            r"test_batch\.bin: not the published file",
        ),
    ],
)
def test_bad_archives_are_refused_and_write_nothing(colours, server, tmp_path, change, message):
    server.files["/cifar-10-binary.tar.gz"] = archive(change(in_folder(colours)))
    with pytest.raises(BadData, match=message) as caught:
        download.download(entry("cifar-10"), into=tmp_path / "into", source=server.address)
    assert f"{server.address}/cifar-10-binary.tar.gz" in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("cut", [20, 150])
def test_a_cut_archive_is_refused(colours, tmp_path, cut):
    path = tmp_path / "cifar-10-binary.tar.gz"
    whole = archive(in_folder(colours))
    path.write_bytes(whole[:cut])
    with pytest.raises(BadData, match=r"cifar-10-binary\.tar\.gz: (not a sound tar\.gz archive|it must hold)"):
        download.download(entry("cifar-10"), into=tmp_path / "into", source=str(path))
    assert names(tmp_path / "into") == []


def test_published_addresses_are_whole():
    bases = {known.name: known.base for known in catalogue() if known.folder != "uci-classification"}
    assert all(base.startswith("https://") and base.endswith(("/", ".tar.gz")) for base in bases.values())
    assert bases["energy"].endswith("/UCI_Datasets/energy/data/")
