"""The report as a file, and as a reader meets it in a browser; figures as files."""

import builtins
import html
import json
import math
import re
import shutil
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from amips.bench.figures import columns, draw_figures, looks, short
from amips.bench.page import write_page
from amips.bench.summary import Chart, Grid, Panel, Series, Summary, Table
from amips.errors import AmipsError, ResultsError

pytest.importorskip("plotly", reason="the report needs plotly: pip install 'amips[bench]'")
pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'amips[bench]'")

HOSTILE = "</script><img src=x onerror=alert(1)>"
MARKUP = "a & b <i>"


def recall(cost, strength):
    return [1 - math.exp(-strength * (c / cost[-1]) ** 0.45) for c in cost]


def trade_off(title, label, scale, log=True):
    """Recall against a cost, for the systems of a bench."""
    budgets = [1, 2, 4, 8, 16, 32, 64, 128]
    cost = [scale * b for b in budgets]
    text = [f"{b} of 512 cells" for b in budgets]
    series = [
        Series("centroids", cost, recall(cost, 3.4), text, group="baseline"),
        Series("linear", cost, recall(cost, 4.4), text),
        Series("SupportNet", [c * 1.25 for c in cost], recall(cost, 4.6), text),
        Series("KeyNet", [c * 1.4 for c in cost], recall(cost, 3.9), text),
        Series("best possible routing", cost, recall(cost, 7.0), text, group="reference"),
        Series("exact search", [scale * 512], [1.0], ["every key"], group="reference"),
    ]
    return Panel(title, label, "recall@10", series, log_x=log)


def bell(x, middle, width):
    return math.exp(-(((x - middle) / width) ** 2) / 2)


def sample():
    """A summary such as a bench ends in."""
    steps = list(range(0, 6000, 60))
    places = [0.02 * i for i in range(1, 41)]
    plane = [i / 5 - 3 for i in range(31)]
    bars = [
        Series("queries", places, [900 * bell(x, 0.42, 0.1) for x in places], kind="bars"),
        Series("keys", places, [700 * bell(x, 0.3, 0.07) for x in places], kind="bars", group="baseline"),
    ]
    histogram = Panel("Best score", "inner product", "queries", bars, marks=[("median", 0.42), ("p95", 0.6)])
    density = [[bell(x, 0.6, 1.1) * bell(y, 0.8 * x, 0.7) for x in plane] for y in plane]
    cloud = Panel(
        "Where queries lie", "first axis", "second axis", grids=[Grid("density", plane, plane, density)]
    )
    losses = [
        Series("linear", steps, [0.05 + 0.6 * math.exp(-s / 700) for s in steps]),
        Series("SupportNet", steps, [0.03 + 0.9 * math.exp(-s / 1500) for s in steps]),
    ]
    return Summary(
        name="bench",
        title="Learned routing on 100,000 passages",
        verdict=[
            "At recall@10 0.95 the linear router needs 11 % fewer FLOPs than the best centroid routing.",
            "SupportNet draws level at recall 0.99 only; KeyNet loses everywhere on this data.",
            "Differences under 3 % are within what the repetitions vary by.",
        ],
        tables=[
            Table(
                "What a query costs at recall@10 0.95",
                ["system", "cells", "FLOPs", "keys scanned", "µs a query", "against centroids", "training"],
                [
                    ["centroids", "512", "1.94 M", "7,420", "312", "-", "none"],
                    ["linear", "512", "1.73 M", "6,610", "281", "0.89 x", "2 min"],
                    ["SupportNet", "512", "2.05 M", "6,380", "334", "1.06 x", "30 min, 4 threads"],
                    ["KeyNet", "1,024", "2.21 M", "6,900", "351", "1.14 x", "30 min, 4 threads"],
                ],
                note="Between the two nearest budgets; `probes` is the number of cells looked at.",
            )
        ],
        charts=[
            Chart(
                "trade-off",
                "Recall against cost",
                [
                    trade_off("FLOPs", "FLOPs a query", 48_000),
                    trade_off("Keys scanned", "keys a query", 195),
                    trade_off("Time", "µs a query, one thread", 9.5, log=False),
                ],
                caption="Further up and to the left is better. Each point is one number of probed cells.",
            ),
            Chart("data", "The data", [histogram, cloud], caption="On held-out queries."),
        ],
        facts=[
            ("keys", "100,000 of 384 values"),
            ("queries", "40,000"),
            ("best key in nearest cell", "61 %"),
        ],
        curves=[
            Chart("loss", "Loss in training", [Panel("", "steps", "validation loss", losses, log_y=True)])
        ],
        method=[
            "Queries are split at random; figures are of the test part, which training and tuning never saw.",
            "Times are medians of nine passes in turns on one thread.",
        ],
        command="amips bench task --models runs/linear runs/supportnet --out results",
        machine={"processor": "AMD EPYC 7B13, 2 threads", "numpy": "2.4.0", "faiss": "1.12.0"},
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report of the sample."""
    folder = tmp_path_factory.mktemp("report")
    sample().save(folder / "results")
    return write_page(folder / "results", folder / "report.html")


def made(folder, summary):
    summary.save(folder / "results")
    return write_page(folder / "results", folder / "out.html").read_text()


def with_series(*series, **values):
    panel = Panel("Panel", "x", "y", list(series), **values)
    return replace(sample(), charts=[Chart("only", "Only", [panel])], curves=[])


def data_of(page):
    """The embedded JSON; the constants that JSON has not are refused."""
    text = re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.S)[1]
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class Tags(HTMLParser):
    """Names of the elements, and their attributes that a browser may load from."""

    def __init__(self, page):
        super().__init__()
        self.names, self.loads, self.handlers = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_everything_is_told_in_order(written):
    page = written.read_text()
    summary = sample()
    body = html.unescape(page[page.index("<body>") : page.index('id="plots"')])
    told = [summary.title, *summary.verdict]
    told += [chart.title for chart in summary.charts] + [chart.caption for chart in summary.charts]
    told += ["SupportNet", "µs a query, one thread", summary.tables[0].title, "6,610", "<code>probes</code>"]
    told += [text for fact in summary.facts for text in fact] + ["Loss in training"]
    told += [*summary.method, summary.command, "AMD EPYC 7B13, 2 threads"]
    for text in told:
        assert text in body, text
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", body)
    assert headings == ["Results", "Tables", "Data", "Training", "How it was measured"]
    assert "<noscript>" in body
    assert body.count("aria-label=") >= 6
    assert "<caption>" in body


def test_same_name_has_the_same_look_everywhere(written):
    data = data_of(written.read_text())
    names = {}
    for plot in data["plots"]:
        for trace in (trace for panel in plot["panels"] for trace in panel["traces"]):
            names.setdefault(trace["name"], set()).add(trace["look"])
    assert all(len(found) == 1 for found in names.values())
    colours = [look.light for look in looks(sample()).values()]
    assert len(set(colours)) == len(colours)


def test_foreign_text_stays_text(tmp_path):
    series = [Series(HOSTILE, [1, 2], [1, 2], [HOSTILE, MARKUP]), Series(MARKUP, [1, 2], [2, 1])]
    hostile = "<!-- {{plots}} " + HOSTILE
    summary = replace(
        with_series(*series, marks=[(HOSTILE, 1.5)]),
        title=hostile,
        verdict=[hostile, hostile],
        tables=[Table(hostile, [hostile], [[hostile]], hostile)],
        facts=[(hostile, hostile)],
        method=[hostile],
        command=hostile,
        machine={hostile: hostile},
    )
    page = made(tmp_path, summary)
    tags = Tags(page)
    assert "img" not in tags.names
    assert "i" not in tags.names
    assert not tags.handlers
    assert tags.names.count("script") == 3
    embedded = page[page.index('id="plots">') :]
    assert embedded.index("</script>") > embedded.index("onerror")
    traces = data_of(page)["plots"][0]["panels"][0]["traces"]
    assert traces[1]["name"] == html.escape(MARKUP)
    assert "<img" not in json.dumps(traces)


def test_what_is_not_finite_becomes_null(tmp_path):
    grid = Grid("g", [0, 1], [0, 1], [[0, math.nan], [1, math.inf]])
    page = made(tmp_path, with_series(Series("s", [1, math.nan, 3], [math.inf, 2, -math.inf]), grids=[grid]))
    density, trace = data_of(page)["plots"][0]["panels"][0]["traces"]
    assert trace["x"] == [1, None, 3]
    assert trace["y"] == [None, 2, None]
    assert density["z"] == [[0, None], [1, None]]


def test_nothing_is_loaded_from_elsewhere(written):
    tags = Tags(written.read_text())
    assert not [value for value in tags.loads if not value.startswith("#")]
    assert "link" not in tags.names


def test_an_empty_summary_is_a_page_too(tmp_path):
    empty = Summary(
        "bench", "Nothing", [], charts=[Chart("c", "No panels", []), Chart("d", "d", [Panel("", "", "")])]
    )
    assert "No panels" in made(tmp_path, empty)
    assert len(draw_figures(empty, tmp_path / "figures", ("svg",))) == 2


DAMAGES = {
    "not JSON": "{",
    "another kind": '{"kind": "task"}',
    "no tables": '{"kind": "summary", "format": 1}',
}


@pytest.mark.parametrize("text", [*DAMAGES.values(), None], ids=[*DAMAGES, "missing"])
def test_damaged_results_leave_the_old_page(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    out = tmp_path / "out.html"
    out.write_text("old")
    with pytest.raises(ResultsError) as problem:
        write_page(tmp_path, out)
    assert "\n" not in str(problem.value)
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    "summary",
    [
        with_series(Series("s", [1, 2], [1])),
        with_series(Series("s", [1], ["high"])),
        with_series(Series("s", [1], [1], group="other")),
        with_series(grids=[Grid("g", [0, 1], [0, 1], [[1, 2]])]),
        replace(sample(), tables=[Table("t", ["a"], 5)]),
    ],
    ids=["lengths", "text for number", "group", "grid", "rows"],
)
def test_values_that_cannot_be_shown(tmp_path, summary):
    summary.save(tmp_path)
    out = tmp_path / "out.html"
    out.write_text("old")
    with pytest.raises(ResultsError):
        write_page(tmp_path, out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "summary.json"]


def test_places_that_cannot_be_written(tmp_path):
    sample().save(tmp_path)
    for out in (tmp_path / "none" / "out.html", tmp_path):
        with pytest.raises(ResultsError, match="cannot write"):
            write_page(tmp_path, out)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    sample().save(tmp_path)
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] in ("plotly", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AmipsError, match=re.escape("amips report needs plotly; pip install 'amips[bench]'")):
        write_page(tmp_path, tmp_path / "out.html")
    with pytest.raises(AmipsError, match=r"needs matplotlib; pip install 'amips\[bench\]'"):
        draw_figures(sample(), tmp_path)


def test_figures_are_the_same_each_time(tmp_path):
    first, again = draw_figures(sample(), tmp_path / "a"), draw_figures(sample(), tmp_path / "b")
    assert sorted(path.name for path in first) == sorted(
        f"{name}.{ending}" for name in ("trade-off", "data", "loss") for ending in ("png", "svg")
    )
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_size > 4000
    assert not re.search(rb"<dc:date>|\d{4}-\d\d-\d\dT", (tmp_path / "a" / "loss.svg").read_bytes())


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden"])
def test_figures_stay_in_their_directory(tmp_path, name):
    with pytest.raises(ResultsError, match="file name"):
        draw_figures(replace(sample(), charts=[Chart(name, "t", [])]), tmp_path)


def test_numbers_for_reading():
    values = {0.12345: "0.1235", 1234: "1,234", 12_345: "12.35k", 1.94e6: "1.94M", -5e9: "\N{MINUS SIGN}5G"}
    assert {value: short(value) for value in values} == values
    assert [columns(count) for count in range(7)] == [1, 1, 2, 3, 2, 3, 3]


@pytest.fixture(scope="module")
def driver():
    """Headless Chromium that records its console and its network requests."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="install selenium to test the page in a browser"
    )
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("install chromium and chromedriver to test the page in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(executable_path=chromedriver))
    yield browser
    browser.quit()


@pytest.fixture
def page(driver, written):
    """The browser with the report open, wide and light; whatever a test does, no error is logged."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    prefer(driver, "light")
    driver.get(written.as_uri())
    until(driver, "document.querySelectorAll('.plot .main-svg').length >= 12")
    yield driver
    assert not [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def prefer(driver, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def until(driver, condition, seconds=10):
    end = time.monotonic() + seconds
    while not driver.execute_script(f"return {condition}"):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def test_page_asks_for_nothing(page, written):
    asked = []
    for entry in page.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [written.as_uri()]


def test_legend_hides_a_series_in_all_panels(page):
    key = (
        "[...document.querySelectorAll('#chart-0 .legend button')].find(b => b.innerText.trim() == 'linear')"
    )
    trace = "document.getElementById(`chart-0-${i}`).data.find(t => t.name == 'linear')"
    shown = f"[0, 1, 2].map(i => {trace}.visible)"
    page.execute_script(f"return {key}").click()
    assert page.execute_script(f"return {shown}") == ["legendonly"] * 3
    assert page.execute_script(f"return {key}.getAttribute('aria-pressed')") == "false"
    page.execute_script(f"return {key}").click()
    assert page.execute_script(f"return {shown}") == [True] * 3
    everything = "document.getElementById('chart-0-0').data.map(t => t.visible)"
    alone = ["legendonly", True, *["legendonly"] * 4]
    for expected in (alone, [True] * 6):
        page.execute_script(f"{key}.dispatchEvent(new MouseEvent('dblclick'))")
        assert page.execute_script(f"return {everything}") == expected


def test_hovering_tells_name_and_value(page):
    from selenium.webdriver.common.action_chains import ActionChains

    # Where plotly itself drew the fifth point of the second series, in the middle of its panel.
    point = page.execute_script(
        "document.getElementById('chart-0').scrollIntoView();"
        "const box = document.querySelectorAll('#chart-0-0 .trace.scatter')[1]"
        ".querySelectorAll('.point')[4].getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]"
    )
    layer = "(document.querySelector('#chart-0-0 .hoverlayer').textContent || '')"
    actions = ActionChains(page)
    actions.w3c_actions.pointer_action.move_to_location(round(point[0]), round(point[1]))
    actions.perform()
    until(page, f"{layer}.includes('linear')")
    text = page.execute_script(f"return {layer}")
    assert "16 of 512 cells" in text
    assert "recall@10: 0." in text


def test_x_axis_switches_between_log_and_linear(page):
    kinds = "return [0, 1, 2].map(i => document.getElementById(`chart-0-${i}`).layout.xaxis.type)"
    box = page.find_element("css selector", "#chart-0 .switch input")
    assert page.execute_script(kinds) == ["log", "log", "linear"]
    assert page.execute_script("return arguments[0].indeterminate", box)
    box.click()
    assert page.execute_script(kinds) == ["log"] * 3
    box.click()
    assert page.execute_script(kinds) == ["linear"] * 3
    assert not page.find_elements("css selector", "#chart-1 .switch")


def test_phone_scrolls_down_only(page):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    until(
        page, "innerWidth == 390 && document.getElementById('chart-0-0').getBoundingClientRect().width < 390"
    )
    until(page, "document.querySelector('#chart-0-0 .main-svg').getBoundingClientRect().right <= 390")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    left = "[0, 1, 2].map(i => document.getElementById(`chart-0-${i}`).getBoundingClientRect().left)"
    assert len(set(page.execute_script(f"return {left}"))) == 1
    assert page.execute_script(
        "const b = document.querySelector('.scroll'); return b.scrollWidth > b.clientWidth"
    )


def test_dark_follows_the_system_and_the_button(page):
    ground = "return getComputedStyle(document.body).backgroundColor"
    line = "return document.getElementById('chart-0-0').data[1].line.color"
    light = page.execute_script(ground), page.execute_script(line)
    prefer(page, "dark")
    until(page, "document.getElementById('theme').textContent == 'Light'")
    dark = page.execute_script(ground), page.execute_script(line)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    page.find_element("id", "theme").click()
    assert (page.execute_script(ground), page.execute_script(line)) == light


def test_print_draws_light_plots_of_the_width_of_the_paper(page):
    prefer(page, "dark")
    width = "document.querySelector('#chart-0-0 .main-svg').getBoundingClientRect().width"
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    until(page, f"{width} < 340")
    assert page.execute_script("return document.documentElement.dataset.theme") == "light"
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    until(page, f"{width} > 340")
    assert page.execute_script("return document.documentElement.dataset.theme") is None


def test_hostile_names_do_nothing_in_the_browser(page, tmp_path):
    made(tmp_path, with_series(Series(HOSTILE, [1, 2], [1, 2], [HOSTILE] * 2), marks=[(HOSTILE, 1.5)]))
    page.get((tmp_path / "out.html").as_uri())
    until(page, "document.querySelector('#chart-0-0 .main-svg')")
    assert page.find_element("css selector", ".legend button").text == HOSTILE
    assert page.execute_script("return document.querySelector('#chart-0-0').textContent").count(HOSTILE)
