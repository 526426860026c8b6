"""Chromium, driven by Selenium, for the tests that look at pages.

Debian and Ubuntu have both as packages: chromium and chromium-driver. Without them these tests are skipped, unless
``BROWSER_TESTS`` is set, as `make book-test` and `make browser` do.
"""

import contextlib
import functools
import http.server
import json
import os
import shutil
import threading

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
needs_a_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("BROWSER_TESTS"), reason="no browser"
)
WIDE, NARROW = (1280, 900), (360, 800)
AXE = """const [rules, done] = arguments;
axe.run(document, {resultTypes: ["violations"], ...(rules && {runOnly: rules})}).then(found => done(
  found.violations.filter(one => ["serious", "critical"].includes(one.impact)).map(one =>
    `${one.id}: ${one.nodes.length}, first ${one.nodes[0].target.join(" ")} ${one.nodes[0].html.slice(0, 200)}`)))"""
TYPESET = "const done = arguments[0]; (window.MathJax?.startup?.promise ?? Promise.resolve()).then(() => done())"


@contextlib.contextmanager
def chromium(*arguments):
    """A browser without a window, which keeps its log and the addresses that it asks for."""
    assert CHROMIUM and DRIVER, "install chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--force-prefers-reduced-motion",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(120)
    driver.set_script_timeout(300)
    try:
        yield driver
    finally:
        driver.quit()


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served(folder):
    """Where a server of a folder answers, until the block ends."""
    handler = functools.partial(Quiet, directory=os.fspath(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def resize(browser, size):
    """Give the page a width and a height, and let it answer to them."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
    )
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))")


def open_(browser, address):
    """Go to a page, and wait for its formulas."""
    browser.get(address)
    browser.execute_async_script(TYPESET)


def asked_for(browser):
    """Addresses that the browser has asked for since the last call."""
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
