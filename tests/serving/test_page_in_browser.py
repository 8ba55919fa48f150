"""The page at `/` as a person meets it, in headless Chromium, with `amips serve` behind it."""

import json
import os
import shutil
import time

import pytest

from serving_helpers import READ, served

webdriver = pytest.importorskip("selenium.webdriver")


@pytest.fixture(scope="module")
def driver():
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not chromium or not chromedriver:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("install chromium and chromedriver to test the page in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(executable_path=chromedriver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def server(bundle):
    with served(bundle) as server:
        yield server


@pytest.fixture
def page(driver, server):
    """The browser with the page open; whatever a test does, no error is logged."""
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.get(server.address)
    until(driver, "!document.getElementById('ask').hidden")
    yield driver
    assert not [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def until(driver, condition, seconds=15):
    end = time.monotonic() + seconds
    while not driver.execute_script(f"return {condition}"):
        assert time.monotonic() < end, condition
        time.sleep(0.05)


def text(driver, name):
    return driver.find_element("id", name).text


def search(driver, vector, *keys):
    box = driver.find_element("id", "input")
    box.clear()
    box.send_keys(" ".join(map(str, vector)), *keys)


def test_a_pasted_vector_is_answered_by_the_keyboard_alone(page, server, x):
    from selenium.webdriver.common.keys import Keys

    assert page.execute_script("return document.activeElement.id") == "input"
    page.switch_to.active_element.send_keys(
        json.dumps([round(float(v), 4) for v in x[0]]), Keys.CONTROL, Keys.ENTER
    )
    until(page, "!document.getElementById('answer').hidden")
    assert len(page.find_elements("css selector", "#results li")) == 10
    assert "cells were probed" in text(page, "effort")
    assert "of 600 keys were scored" in text(page, "effort")
    names = [row.text for row in page.find_elements("css selector", "#methods td:first-child")]
    assert (names[0], names[-1]) == ("amips", "exact search")
    assert len(page.find_elements("css selector", "#map .result")) == 10
    assert len(page.find_elements("css selector", "#map .query")) == 1
    assert page.find_elements("css selector", "#map .probed")
    asked = []
    for entry in page.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert {url for url in asked if not url.startswith("data:")} <= {
        f"{server.address}{path}" for path in ("/", "/info", "/explain")
    }


def test_the_slider_asks_again(page):
    from selenium.webdriver.common.keys import Keys

    assert text(page, "recall-shown") == "0.90"
    page.find_element("id", "random").click()
    until(page, "document.getElementById('status').textContent.includes('results')")
    count = "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/explain')).length"
    before = page.execute_script(f"return {count}")
    page.find_element("id", "recall").send_keys(Keys.ARROW_LEFT)
    until(page, f"{count} > {before}")
    until(page, "!document.getElementById('go').disabled")
    assert text(page, "recall-shown") == "0.89"
    assert text(page, "problem") == ""


def test_a_slider_that_is_dragged_asks_when_it_rests_and_is_never_refused(page):
    from selenium.webdriver.common.keys import Keys

    page.find_element("id", "random").click()
    until(page, "!document.getElementById('answer').hidden")
    entries = "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/explain'))"
    before = page.execute_script(f"return {entries}.length")
    page.find_element("id", "recall").send_keys(*[Keys.ARROW_LEFT] * 20)
    until(page, f"{entries}.length > {before}")
    until(page, "!searching && !document.getElementById('go').disabled")
    assert page.execute_script(f"return {entries}.length") <= before + 10
    assert page.execute_script(f"return {entries}.every(e => e.responseStatus === 200)")
    assert text(page, "problem") == ""


def test_what_is_wrong_is_said(page):
    from selenium.webdriver.common.keys import Keys

    search(page, [1, 2], Keys.CONTROL, Keys.ENTER)
    until(page, "document.getElementById('problem').textContent")
    assert text(page, "problem") == "2 numbers: expected 16"
    search(page, ["<b>"], Keys.CONTROL, Keys.ENTER)
    until(page, "document.getElementById('problem').textContent.includes('not a number')")


def test_a_phone_scrolls_down_only(page):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.find_element("id", "random").click()
    until(page, "!document.getElementById('answer').hidden")
    until(page, "innerWidth == 360")
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360


def test_a_token_is_asked_for_and_kept_in_the_tab(driver, bundle):
    with served(bundle, AMIPS_TOKEN=READ) as server:
        driver.get(server.address)
        until(driver, "!document.getElementById('door').hidden")
        field = driver.find_element("id", "token")
        field.send_keys("wrong")
        field.submit()
        until(driver, "document.getElementById('problem').textContent.includes('token')")
        field.send_keys(READ)
        field.submit()
        until(driver, "!document.getElementById('ask').hidden")
        assert driver.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
        driver.find_element("id", "random").click()
        until(driver, "!document.getElementById('answer').hidden")
        driver.refresh()
        until(driver, "!document.getElementById('ask').hidden")
    driver.get_log("browser")  # which tells of the 401s
