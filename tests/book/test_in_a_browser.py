"""Every page of the built book in Chromium: nothing from elsewhere, no error, axe, a narrow page, search, keyboard.

`make book-test` runs this file and fails where Chromium and its driver are missing.
"""

import gzip
import json
import re
import urllib.parse

import nbformat
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from book import npm
from book.build import ROOT
from book.live import memory, planner
from tests.browsing import AXE, NARROW, WIDE, asked_for, needs_a_browser, open_, resize, served
from tests.waiting import until

pytestmark = [pytest.mark.long, needs_a_browser]
FIRST_PAGE = 600_000
"""Bytes that come for the front page and all that it loads, text packed as servers send it."""
FILES_LOOKED_AT = 3
"""Pages that show a file are all of one template."""
COLOURS = ("color-contrast", "link-in-text-block")
"""Rules whose answer a theme changes; the others are asked once per width."""
REACHABLE = """return [...document.querySelectorAll("a[href], button, input, summary")].filter(
  one => one.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) && one.getClientRects().length)"""


def pages_of(site):
    """The pages to look at: all of the book's own, and some that show a file."""
    files = set(json.loads((ROOT / "build/book-source/about-files.json").read_text(encoding="utf-8"))["files"])
    found = [
        path.relative_to(site).as_posix()
        for path in sorted(site.rglob("*.html"))
        if path.relative_to(site).parts[0] not in ("_static", "_sources")
    ]
    shown = [name for name in found if name.removesuffix(".html") in files]
    return [name for name in found if name not in shown] + shown[:FILES_LOOKED_AT]


def test_every_page(site, address, browser):
    axe = (npm.folder("axe-core") / "axe.min.js").read_text(encoding="utf-8")
    pages, problems = pages_of(site), []
    for name in pages:
        open_(browser, address + name)
        browser.execute_script(axe)
        said = []
        for size in (WIDE, NARROW):
            resize(browser, size)
            for theme, rules in (("light", None), ("dark", list(COLOURS))):
                browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
                said += [f"{theme}, {size[0]} px: {one}" for one in browser.execute_async_script(AXE, rules)]
            width = browser.execute_script("return document.documentElement.scrollWidth")
            said += [f"{width} px wide on a page of {size[0]}"] if width > size[0] else []
        said += [f"asks for {url}" for url in asked_for(browser) if not url.startswith((address, "data:", "blob:"))]
        said += [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        problems += [f"{name}: {one}" for one in said]
    assert not problems, f"{len(problems)} on {len(pages)} pages:\n" + "\n".join(problems)


SCROLLED_OR_BROKEN = """const height = one => parseFloat(getComputedStyle(one).lineHeight);
  return [...document.querySelectorAll(".cell_input pre")].flatMap(
    one => [...one.querySelectorAll(".line")].filter(line => one.scrollWidth > one.clientWidth ||
      line.getBoundingClientRect().height > 1.5 * height(one))).map(one => one.textContent)"""
MEASURE = """const range = document.createRange(), lengths = [];
  for (const one of document.querySelectorAll("article section > p")) {
    if (one.querySelector("mjx-container, code")) continue;
    if (one.textContent.length < 250) continue;
    range.selectNodeContents(one);
    const lines = new Set([...range.getClientRects()].map(line => Math.round(line.bottom)));
    lengths.push(one.textContent.length / (lines.size - 0.5));
  }
  return lengths"""


def test_prose_has_a_measure_and_no_line_of_code_scrolls_or_breaks(address, browser):
    lengths, wrong, lines = [], [], 0
    resize(browser, WIDE)
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        open_(browser, f"{address}notebooks/{path.stem}.html")
        browser.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
        lines += browser.execute_script("return document.querySelectorAll('.cell_input .line').length")
        wrong += [f"{path.stem}: {line}" for line in browser.execute_script(SCROLLED_OR_BROKEN)]
        lengths += browser.execute_script(MEASURE)
    assert lines > 5000 and wrong == []
    assert len(lengths) > 100 and 60 < sum(lengths) / len(lengths) < 75


def terms():
    """For each lesson the word of its headings that the fewest lessons have."""
    texts = {
        path.stem: "\n".join(
            cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"
        )
        for path in ROOT.glob("notebooks/[0-9]*.ipynb")
    }
    words = {name: set(re.findall(r"[a-z]{5,}", text.lower())) for name, text in texts.items()}
    return {
        name: min(
            sorted(set(re.findall(r"[a-z]{5,}", " ".join(re.findall(r"^#+ (.*)", text, re.M)).lower()))),
            key=lambda word: sum(word in each for each in words.values()),
        )
        for name, text in texts.items()
    }


def test_search_finds_a_term_of_each_lesson(address, browser):
    resize(browser, WIDE)
    missed = {}
    for name, term in terms().items():
        open_(browser, f"{address}search.html?q={urllib.parse.quote(term)}")

        def answered():
            found = browser.find_elements(By.CSS_SELECTOR, "#search-results .search-summary")
            return found and found[0].text and "Searching" not in found[0].text

        until(answered, what=f"an answer to {term}")
        links = [each.get_attribute("href") for each in browser.find_elements(By.CSS_SELECTOR, "#search-results li a")]
        if not any(f"notebooks/{name}.html" in link for link in links):
            missed[name] = term
    assert not missed and len(terms()) >= 15


@pytest.mark.parametrize("name", ["index.html", "notebooks/00_start_here.html", "command-line/index.html"])
def test_the_keyboard_reaches_everything(address, browser, name):
    resize(browser, WIDE)
    open_(browser, address + name)
    browser.execute_script("""window.reached = new Set();
      addEventListener("focusin", event => window.reached.add(event.target))""")
    wanted = len(browser.execute_script(REACHABLE))
    for _ in range(wanted // 20 + 10):
        ActionChains(browser, duration=0).send_keys(Keys.TAB * 20).perform()
    left = browser.execute_script(
        REACHABLE.replace("return ", "const all = ")
        + """;
      return all.filter(one => !window.reached.has(one)).map(one => one.outerHTML.slice(0, 200))"""
    )
    assert wanted > 40 and left == []


def opened(browser, page, selector, words):
    """Open a live part, load it, and wait until an element of it says something; the button's text before."""
    open_(browser, page)
    button = browser.find_element(By.NAME, "open")
    said = button.text
    button.click()
    until_it_says(browser, selector, words)
    return said


def until_it_says(browser, selector, words):
    def text():
        return " ".join(found.text for found in browser.find_elements(By.CSS_SELECTOR, selector))

    until(lambda: words in text(), what=words, told=text)


def nothing_is_wrong(browser, address):
    browser.execute_script((npm.folder("axe-core") / "axe.min.js").read_text(encoding="utf-8"))
    assert browser.execute_async_script(AXE, None) == []
    assert not {url for url in asked_for(browser) if not url.startswith((address, "data:", "blob:"))}
    assert not [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    resize(browser, NARROW)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= NARROW[0]
    resize(browser, WIDE)


def test_the_schedule_bench_answers_with_the_librarys_own_sentences(site, address, browser):
    """Python in the page: how much has come, a table, an action moved by keyboard, a refusal."""
    resize(browser, WIDE)
    said = opened(browser, address + "live/schedule.html", ".bench-said", "idle 27.3 %")
    size = sum(
        path.stat().st_size
        for path in (site / "_static/live").rglob("*")
        if path.suffix in (".gz", ".zip", ".json", ".mjs")
    )
    progress = browser.find_element(By.CSS_SELECTOR, ".live-load progress")
    assert said == f"Load ({size / 1e6:.1f} MB)"
    assert int(progress.get_property("value")) == int(progress.get_property("max")) == size
    until_it_says(browser, ".bench-legend", "forward\nbackward, whole\nidle")
    browser.execute_script('document.querySelector(\'[data-rank="3"][data-at="0"]\').focus()')
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    until_it_says(browser, ".bench-said", "rank 3 of 1f1b has 3B0 before 3F0: put it later")
    browser.execute_script('document.querySelector(\'[data-rank="0"][data-at="0"]\').focus()')
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    until_it_says(browser, ".bench-said", "idle 29.4 %")
    nothing_is_wrong(browser, address)


def test_the_planner_says_what_course_plan_says(address, browser):
    resize(browser, WIDE)
    opened(browser, address + "live/planner.html", ".live-said", "Train facebook/opt-6.7b")
    wanted = {"model": "facebook/opt-6.7b", "gpu": "A100-80", "gpus": "8", "tokens": "10B", "optimizer": "adamw"}
    right = json.loads(planner.planned(json.dumps(wanted)))
    until_it_says(browser, ".live-said", right["answer"])
    until_it_says(browser, ".live-command pre", right["command"])
    assert len(browser.find_elements(By.CSS_SELECTOR, ".live-bars .live-parameters")) == len(right["bars"])
    until(lambda: len(browser.find_elements(By.CSS_SELECTOR, ".planner-if button")) == len(right["what_if"]))
    nothing_is_wrong(browser, address)
    browser.find_element(By.CSS_SELECTOR, ".planner-if [data-name=gpus][data-value='16']").click()
    until_it_says(browser, ".live-said", "16 x A100-80")
    model, gpu = (Select(browser.find_element(By.NAME, name)) for name in ("model", "gpu"))
    model.select_by_visible_text("meta-llama/Llama-2-70b-hf")
    gpu.select_by_value("T4")
    until_it_says(browser, ".live-said.live-wrong", "meta-llama/Llama-2-70b-hf does not fit on 16 x T4")
    assert not browser.find_element(By.CSS_SELECTOR, ".live-result").is_displayed()


def test_memory_follows_the_sliders(address, browser):
    resize(browser, WIDE)
    states = {"model": "meta-llama/Llama-2-7b-hf", "precision": "bf16", "optimizer": "adamw", "offload": "none"}
    opened(browser, address + "live/memory.html", "[name=gpus_said]", "8")
    for gpus in (8, 16):
        right = json.loads(memory.counted(json.dumps(states | {"gpus": gpus})))["rows"]
        until_it_says(browser, ".memory-formula", right[-1]["formula"])
        drawn = [text.text for text in browser.find_elements(By.CSS_SELECTOR, ".live-total")]
        assert drawn == [f"{row['total'] / 2**30:.1f} GiB" for row in right]
        browser.execute_script("document.querySelector('[name=gpus]').focus()")
        ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    Select(browser.find_element(By.NAME, "offload")).select_by_visible_text("optimizer")
    until_it_says(browser, ".live-said", "FSDP2 is not drawn: fsdp with offload optimizer")
    until_it_says(browser, ".memory-formula", "in host memory")  # ZeRO-3's
    nothing_is_wrong(browser, address)


def test_an_exercise_is_checked_in_the_page_and_an_endless_one_is_stopped(address, browser):
    resize(browser, WIDE)
    open_(browser, address + "live/exercises.html")
    exercise = browser.find_element(By.CSS_SELECTOR, "[data-task='pipeline.bubble']")
    text, report = (exercise.find_element(By.CSS_SELECTOR, name) for name in ("textarea", ".live-report"))
    check, stop, anew = exercise.find_elements(By.TAG_NAME, "button")

    def answer(line):
        anew.click()
        text.send_keys(Keys.CONTROL, Keys.END, Keys.NULL, Keys.SHIFT, Keys.HOME, Keys.NULL, f"    {line}")
        check.click()

    answer("return 0.5")  # loads Python too
    until(lambda: "pipeline.bubble: 0 of 2 points" in report.text, what="no points", told=lambda: report.text)
    answer("while True: pass")
    until(stop.is_enabled, what="something to stop")
    assert browser.execute_script("return 1 + 1") == 2  # the page lives on
    stop.click()
    until(lambda: "Stopped" in report.text, what="stopped", told=lambda: report.text)
    answer("return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)")
    until(lambda: "pipeline.bubble: 2 of 2 points" in report.text, what="all points", told=lambda: report.text)
    assert "/ (stages_per_rank" in browser.execute_script("return localStorage['course:exercise:pipeline.bubble']")
    nothing_is_wrong(browser, address)


def test_a_live_part_that_was_loaded_opens_without_a_network(site, browser):
    """Its server is gone: page, Python and modules come from what the browser has kept."""
    resize(browser, WIDE)
    with served(site) as here:
        opened(browser, here + "live/memory.html", ".memory-formula", "GiB")
        until(
            lambda: browser.execute_async_script("""const done = arguments[0];
          caches.match(location.href).then((kept) => done(Boolean(kept)))"""),
            what="kept",
        )
    opened(browser, here + "live/memory.html", ".memory-formula", "GiB")


@pytest.mark.parametrize("name", ["schedule", "planner", "memory", "exercises"])
def test_from_a_file_a_live_part_says_how_to_open_it(site, browser, name):
    resize(browser, NARROW)
    open_(browser, (site / f"live/{name}.html").as_uri())
    assert not browser.find_element(By.NAME, "open").is_enabled()
    said = browser.find_element(By.CSS_SELECTOR, ".live-load").text
    assert "python -m http.server" in said and f"http://localhost:8000/live/{name}.html" in said
    buttons = browser.find_elements(By.CSS_SELECTOR, ".live button, .live-exercise button")
    assert buttons and not [button for button in buttons if button.is_enabled() and button.is_displayed()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= NARROW[0]


def test_the_front_page_is_light_and_its_picture_runs_again(site, address, browser):
    resize(browser, WIDE)
    open_(browser, address + "index.html")
    loaded = browser.execute_script("""return performance.getEntries().filter(
      one => one.decodedBodySize !== undefined).map(one => one.name)""")
    files = [site / urllib.parse.urlsplit(url).path.removeprefix("/") for url in loaded if url.startswith(address)]
    assert len(files) > 20
    assert sum(min(path.stat().st_size, len(gzip.compress(path.read_bytes()))) for path in files) < FIRST_PAGE
    begun = browser.execute_script("""window.begun = 0;
      document.getElementById("run").addEventListener("animationstart", () => window.begun++)""")
    browser.find_element(By.ID, "run-again").click()
    assert begun is None and "run" in browser.find_element(By.ID, "run").get_attribute("class")
