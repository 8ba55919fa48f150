"""`amips.connect`: the same answers as the index, retries of what is safe, errors in one line."""

import re
import threading

import httpx
import numpy as np
import pyarrow as pa
import pytest

import amips
from helpers import ROOT
from serving_helpers import WRITE, served


@pytest.fixture(scope="module")
def server(bundle):
    with served(bundle, "--max-rows", 30) as process:
        yield process


@pytest.fixture
def index(server):
    with amips.connect(server.address) as remote:
        yield remote


def test_it_answers_like_the_index(index, bundle, x):
    local = amips.load(bundle)
    for options in (
        {},
        {"k": 3, "recall": 0.8},
        {"probes": 2},
        {"where": "price < 100", "k": 9},
        {"filter": np.arange(50)},
        {"filter": np.arange(600) % 7 == 0, "where": "price > 20"},
        {"k": np.int64(4), "recall": np.float32(0.75)},
    ):
        scores, ids = index.search(x, **options)  # 100 rows, of which a request takes 30
        expected = local.search(x, **options)
        if rows := 1 if "filter" in options else 30 if "where" in options else 0:
            # Few are searched in another way than many; those with a filter of their own go one by one.
            parts = [local.search(x[low : low + rows], **options) for low in range(0, len(x), rows)]
            expected = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
        np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
        np.testing.assert_array_equal(ids, expected[1])
        assert (scores.dtype, ids.dtype) == (np.float32, np.int64)
    assert index.search(x[0])[1].shape == (1, 10)
    assert index.search(np.empty((0, 16)))[1].shape == (0, 10)
    assert (index.d, index.n, len(index)) == (16, 600, 600)
    assert index.info["target_recall"] == 0.9


def test_the_page_is_right(server, x, capsys):
    page = (ROOT / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {"x": x}
    exec(block.replace("http://127.0.0.1:8000", server.address).replace("0.95", "0.9"), names)
    names["index"].close()
    assert names["ids"].shape == (100, 10)
    assert capsys.readouterr().out == "600\n"


def test_threads_share_a_client(index, bundle, x):
    _, expected = amips.load(bundle).search(x)
    answers = {}

    def ask(part):
        for row in range(part, len(x), 8):
            answers[row] = index.search(x[row])[1][0]

    threads = [threading.Thread(target=ask, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal([answers[row] for row in range(len(x))], expected)


def test_what_is_wrong_is_one_line(index, x, server):
    with pytest.raises(
        amips.VectorError, match=r"answered 400: .*this index needs numbers \[m, 16\]|400.*bytes"
    ):
        index.search(np.ones((2, 5)))
    with pytest.raises(amips.AmipsError, match="not finite"):
        index.search(np.full(16, np.nan))
    with pytest.raises(amips.AmipsError, match="no column 'colour'"):
        index.search(x[0], where="colour = 1")
    with pytest.raises(amips.AmipsError, match="changes are off"):
        index.add(x[:1])
    with pytest.raises(amips.AmipsError, match="not a table"):
        index.search("words")
    with pytest.raises(amips.AmipsError, match="address="):
        amips.connect("127.0.0.1:8000")
    with pytest.raises(amips.AmipsError, match="404"):
        index.ask("why?")
    with pytest.raises(amips.AmipsError, match="no JSON object"):
        remote(lambda _: httpx.Response(200, text="<p>"))[0].info  # noqa: B018
    other = remote(lambda _: httpx.Response(200, json={"a": 1}))[0]
    for call in (
        lambda: other.n,
        lambda: other.search(x[0]),
        lambda: other.add(x[0]),
        lambda: other.ask("?"),
    ):
        with pytest.raises(amips.AmipsError, match="is not a service of amips"):
            call()
    other.close()
    with pytest.raises(amips.AmipsError, match="connect again"):
        other.info  # noqa: B018


@pytest.mark.parametrize(
    "address", ["http://h:abc", "http://h:99999", "http://[::1", "http://h?x=1", "http://"]
)
def test_what_is_no_address_is_refused_at_once(address):
    with pytest.raises(amips.AmipsError, match="address="):
        amips.connect(address)


@pytest.mark.parametrize("token", ["two\nlines", "\xe9" * 20, 5])
def test_a_token_that_no_header_can_have_is_refused_without_it(token, monkeypatch):
    with pytest.raises(amips.AmipsError, match=r"^token: expected one word, without accents$"):
        amips.connect("http://h", token=token)
    monkeypatch.setenv("AMIPS_TOKEN", "of a file with an end\n")
    assert amips.connect("http://h")._token == "of a file with an end"


def test_arguments_that_cannot_be_sent_are_named(index, x):
    for chosen in ({1, 2}, [1.5], [None], [[1], [1, 2]], 3, object()):
        with pytest.raises(amips.AmipsError, match="filter: expected a mask, or ids"):
            index.search(x[0], filter=chosen)
    with pytest.raises(amips.AmipsError, match="where=5"):
        index.search(x[0], where=5)
    with pytest.raises(amips.AmipsError, match="attributes="):
        index.add(x[:1], attributes=[1])
    with pytest.raises(amips.VectorError, match="key 1 is not finite"):
        index.add([x[0], np.full(16, np.nan)], [700, 701])


def test_long_conditions_and_columns_of_other_libraries_are_sent(index, own_bundle, x):
    long = "price in (" + ", ".join(map(str, range(0, 600, 2))) + ", 4000" * 700 + ")"
    assert (index.search(x[:3], where=long)[1] % 2 == 0).all()
    with pytest.raises(amips.AmipsError, match="characters: expected at most"):
        index.search(x[0], where="x" * 200_000)
    with (
        served(own_bundle, AMIPS_WRITE_TOKEN=WRITE) as server,
        amips.connect(server.address, write_token=WRITE) as own,
    ):
        assert own.add(x[:1], attributes={"price": np.array([7001])}).tolist() == [600]
        assert own.add(x[:1], attributes=pa.table({"price": [7002]})).tolist() == [601]
        assert own.search(x[0], k=2, where="price > 7000")[1].tolist() == [[600, 601]]


def test_keys_come_and_go(own_bundle, x):
    with served(own_bundle, AMIPS_WRITE_TOKEN=WRITE) as server:
        own, index = amips.load(own_bundle), amips.connect(server.address, write_token=WRITE)
        first = index.add(3 * x[:2])
        assert first.tolist() == [600, 601]
        named = index.add(3 * x[2:3], [900], attributes={"price": [7]})
        assert named.tolist() == [900]
        assert index.search(x[:3])[1][:, 0].tolist() == [600, 601, 900]
        assert index.search(x[2], where="price = 7")[1][0, 0] == 900
        index.update([900], x[3:4])
        assert index.remove([600, 601]) == 2
        assert index.n == 601
        assert not set(index.search(x[:3])[1].ravel().tolist()) & {600, 601}
        assert index.reload() is False
        own.remove([5])
        own.close()
        assert index.reload() is True
        index.close()


class Flaky:
    """A service that fails first, and remembers what it was sent."""

    def __init__(self, *failures):
        self.failures, self.requests = list(failures), []

    def __call__(self, request):
        self.requests.append(request.url.path)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure or httpx.Response(200, json={"n": 3, "d": 2, "ids": [1], "removed": 1})


def remote(flaky, **options):
    index = amips.connect("http://service", transport=httpx.MockTransport(flaky), **options)
    waits = []
    index._sleep = waits.append
    return index, waits


def test_what_changes_nothing_is_tried_again_as_the_service_asks():
    flaky = Flaky(
        httpx.Response(503, headers={"retry-after": "7"}, json={"error": "full"}),
        httpx.ReadError("cut off"),
        httpx.ConnectError("refused"),
    )
    index, waits = remote(flaky)
    assert index.n == 3
    assert len(flaky.requests) == 4
    assert waits[0] == 7
    assert 0 < waits[1] < waits[0]


def test_it_gives_up_and_does_not_wait_for_ever():
    flaky = Flaky(*[httpx.Response(503, headers={"retry-after": "9999999"}, json={"error": "full"})] * 9)
    index, waits = remote(flaky, retries=2)
    with pytest.raises(amips.AmipsError, match="answered 503: full"):
        index.info  # noqa: B018
    assert len(flaky.requests) == 3
    assert max(waits) <= 30
    with pytest.raises(amips.AmipsError, match="does not answer: refused"):
        remote(Flaky(*[httpx.ConnectError("refused")] * 9), retries=1)[0].info  # noqa: B018


@pytest.mark.parametrize("failure", [httpx.ReadError("cut"), httpx.Response(503, json={"error": "full"})])
def test_a_change_is_sent_once(failure):
    flaky = Flaky(failure)
    with pytest.raises(amips.AmipsError, match=r"cut|full"):
        remote(flaky)[0].add([[1.0, 2.0]])
    assert flaky.requests == ["/add"]


def test_a_change_that_was_not_sent_is_sent_again():
    flaky = Flaky(httpx.ConnectError("refused"))
    assert remote(flaky)[0].remove([1]) == 1
    assert flaky.requests == ["/remove", "/remove"]


def test_what_takes_too_long_is_not_asked_again():
    flaky = Flaky(httpx.ReadTimeout("too long"))
    with pytest.raises(amips.AmipsError, match="too long"):
        remote(flaky)[0].info  # noqa: B018
    assert len(flaky.requests) == 1


def test_the_token_for_changes_goes_with_changes_alone(monkeypatch):
    heads = []

    def service(request):
        heads.append((request.url.path, request.headers.get("authorization")))
        return httpx.Response(200, json={"n": 3, "d": 2, "removed": 1})

    monkeypatch.delenv("AMIPS_TOKEN", raising=False)
    index = remote(service, write_token=WRITE)[0]
    assert (index.n, index.remove([1])) == (3, 1)
    assert heads == [("/info", None), ("/remove", f"Bearer {WRITE}")]


def test_a_mask_of_millions_of_keys_fits_into_a_request():
    sizes = []

    def service(request):
        sizes.append(len(request.content))
        if request.url.path == "/info":
            return httpx.Response(200, json={"d": 2, "limits": {"rows": 10, "body": 8 << 20}})
        return httpx.Response(200, json={"scores": [[1.0]], "ids": [[0]]})

    remote(service)[0].search([1.0, 2.0], 1, filter=np.ones(20_000_000, bool))
    assert sizes[-1] < 8 << 20


def test_a_client_error_is_not_tried_again():
    flaky = Flaky(httpx.Response(400, json={"error": "no"}))
    with pytest.raises(amips.AmipsError, match="answered 400: no"):
        remote(flaky)[0].info  # noqa: B018
    assert len(flaky.requests) == 1
