"""Vectors at an address, read in blocks by pyarrow's file systems: file://, and S3 as a stub speaks it."""

import http.server
import threading
import xml.sax.saxutils
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

import amips
from amips.vectors import inspect, open_vectors

pytest.importorskip("pyarrow")
ROWS = np.random.default_rng(0).standard_normal((700, 6)).astype(np.float32)


def write(path, rows):
    n, d = rows.shape
    if path.suffix == ".npy":
        np.save(path, rows)
    elif path.suffix == ".fbin":
        path.write_bytes(np.array([n, d], "<u4").tobytes() + rows.tobytes())
    elif path.suffix == ".fvecs":
        lengths = np.full((n, 1), d, "<i4").view(np.float32)
        path.write_bytes(np.hstack([lengths, rows]).tobytes())
    else:
        import pyarrow as pa
        import pyarrow.feather
        import pyarrow.parquet

        table = pa.table({"id": np.arange(n), "vector": list(rows)})
        if path.suffix == ".parquet":
            pa.parquet.write_table(table, path, row_group_size=100)
        else:
            pa.feather.write_feather(table, path)
    return path


class Bucket(http.server.BaseHTTPRequestHandler):
    """What of S3 reading needs: HEAD and GET of a range of bytes, of files below a directory."""

    protocol_version = "HTTP/1.1"
    root = Path()
    ranges: list = []  # noqa: RUF012

    def answer(self, status, body, size, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": size, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        path = self.root / unquote(urlsplit(self.path).path).lstrip("/")
        if path.is_file():
            self.answer(200, b"", path.stat().st_size, Last_Modified="Wed, 01 Jan 2025 00:00:00 GMT")
        else:
            self.answer(404, b"", 0)

    def do_GET(self):
        parts = urlsplit(self.path)
        path = self.root / unquote(parts.path).lstrip("/")
        if not path.is_file():
            name = xml.sax.saxutils.escape(path.name)
            body = f"<ListBucketResult><Name>{name}</Name><KeyCount>0</KeyCount></ListBucketResult>".encode()
            self.answer(200, body, len(body), Content_Type="application/xml")
            return
        data, asked = path.read_bytes(), self.headers.get("Range")
        first, last = (int(end) for end in asked.removeprefix("bytes=").split("-"))
        self.ranges.append((first, last))
        part = data[first : last + 1]
        self.answer(206, part, len(part), Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(data)}")

    def log_message(self, *words):
        pass


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A directory that s3://bucket/... reads from, and the query that its address needs."""
    fs = pytest.importorskip("pyarrow.fs")
    if not hasattr(fs, "S3FileSystem"):
        pytest.skip("pyarrow without S3")
    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    handler = type("Handler", (Bucket,), {"root": tmp_path, "ranges": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (tmp_path / "bucket").mkdir()
        port = server.server_address[1]
        yield tmp_path / "bucket", f"?scheme=http&endpoint_override=127.0.0.1:{port}&region=x", handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("ending", [".npy", ".fbin", ".fvecs", ".parquet", ".feather"])
def test_every_format(tmp_path, ending):
    path = write(tmp_path / f"keys{ending}", ROWS)
    here, there = open_vectors(path), open_vectors(path.as_uri())
    assert (there.n, there.d) == ROWS.shape
    assert inspect(there) == inspect(here)
    np.testing.assert_array_equal(there.rows(13, 57), ROWS[13:57])
    np.testing.assert_array_equal(there.take(np.array([600, 3, 3])), ROWS[[600, 3, 3]])
    assert there.source.name == path.as_uri()
    assert there.source.stamp == here.source.stamp


def test_a_column_is_named_after_a_colon(tmp_path):
    path = write(tmp_path / "keys.parquet", ROWS)
    np.testing.assert_array_equal(open_vectors(f"{path.as_uri()}:vector").load(), ROWS)


def test_a_path_object_has_lost_a_slash(tmp_path):
    path = write(tmp_path / "keys.npy", ROWS)
    np.testing.assert_array_equal(open_vectors(Path(path.as_uri())).load(), ROWS)


def test_s3_is_read_in_ranges(bucket):
    folder, query, server = bucket
    rows = np.random.default_rng(1).standard_normal((40_000, 16)).astype(np.float32)
    write(folder / "keys.npy", rows)
    vectors = open_vectors(f"s3://bucket/keys.npy{query}")
    np.testing.assert_array_equal(vectors.rows(100, 200), rows[100:200])
    assert sum(last + 1 - first for first, last in server.ranges) < 1 << 16
    np.testing.assert_array_equal(vectors.load(), rows)


def test_s3_is_labelled(bucket, tmp_path):
    folder, query, _ = bucket
    write(folder / "keys.npy", ROWS)
    write(folder / "queries.fbin", ROWS[:300] + 1)
    names = [f"s3://bucket/{name}{query}" for name in ("keys.npy", "queries.fbin")]
    amips.label(*names, cells=8, out=tmp_path / "there")
    amips.label(folder / "keys.npy", folder / "queries.fbin", cells=8, out=tmp_path / "here")
    for path in (path for path in (tmp_path / "here").rglob("*") if path.is_file()):
        assert (tmp_path / "there" / path.relative_to(tmp_path / "here")).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.npy", "absent.npy does not exist"),
        ("", "is a directory; give the vector file inside it"),
        ("cut.npy", r"cut.npy is damaged: it has 16,\d+ bytes, its header says 16,\d+"),
        (
            "columns.npy",
            "columns.npy is stored column by column: save it with np.asc",
        ),
        ("keys.h5", r"keys.h5: unknown kind of vector file '.h5'; known: .npy .*parquet .arrow .feather$"),
        ("keys.fvecs", "keys.fvecs: 4 bytes is not a whole number of rows|the first row has dimension"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, name, message):
    data = write(tmp_path / "keys.npy", ROWS).read_bytes()
    (tmp_path / "cut.npy").write_bytes(data[:-1])
    np.save(tmp_path / "columns.npy", np.asfortranarray(ROWS))
    (tmp_path / "keys.h5").write_bytes(b"x")
    (tmp_path / "keys.fvecs").write_bytes(b"\0\0\0\0")
    with pytest.raises(amips.VectorError, match=message) as caught:
        open_vectors(f"{tmp_path.as_uri()}/{name}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = write(tmp_path / "keys.npy", ROWS)
    vectors = open_vectors(path.as_uri())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(amips.VectorError, match=r"keys.npy"):
        vectors.load()
