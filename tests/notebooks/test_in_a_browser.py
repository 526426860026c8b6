"""Lessons in JupyterLab, in a real browser: drawings show, links resolve, each question is answered, one by keyboard.

`make browser` runs this file and fails where Chromium and its driver are missing.
"""

import contextlib
import json
import posixpath
import shutil
import urllib.parse

import nbformat
import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from course_lib.lessons import notebook
from course_lib.lessons.notebook import QUESTION
from tests import waiting
from tests.browsing import chromium, needs_a_browser
from tests.notebooks.test_lab import LINK, ROOT, TOKEN, started

LESSONS = sorted(path.stem for path in ROOT.glob("notebooks/*.ipynb"))
BY_KEYBOARD = "02_data_parallel"
WARNS = "10_faults_and_hangs"  # once: torch's own words about a rank that did not come
ACTIVE = ".jp-NotebookPanel:not(.lm-mod-hidden) "
POSITION = f"""const cells = [...document.querySelectorAll("{ACTIVE}.jp-Notebook .jp-Cell")];
               return cells.findIndex(each => each.classList.contains("jp-mod-active"))"""
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # a cell out of sight is on the page, too
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

pytestmark = [pytest.mark.long, needs_a_browser]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of JupyterLab over a copy of the course, and the copy."""
    private = tmp_path_factory.mktemp("lab")
    course = private / "course"
    shutil.copytree(ROOT, course, ignore=shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info"))
    settings = private / "config" / "lab" / "user-settings" / "@jupyterlab"
    for name, values in SETTINGS.items():
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with started(course, private) as (address, _):
        yield address, course


@pytest.fixture(scope="module")
def browser():
    with chromium("--window-size=1400,1000") as driver:
        yield driver


def until(found, what):
    """What a function finds, asked again until it finds something; a page changes while it is read."""

    def tried():
        with contextlib.suppress(WebDriverException):
            return found()

    return waiting.until(tried, what=what)


def select(browser, css):
    return browser.find_elements(By.CSS_SELECTOR, css)


def outputs(browser, mime):
    return select(browser, f"{ACTIVE}.jp-OutputArea-output[data-mime-type='{mime}']")


def errors(browser):
    return [each.text for each in outputs(browser, "application/vnd.jupyter.error")]


def kernel_is(browser, word):
    return any(word in each.text for each in select(browser, "#jp-main-statusbar"))


def opened(browser, lab, lesson):
    """The lesson in an empty workspace, its kernel idle. Returns the cells as stored."""
    address, course = lab
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(f"{address}lab/tree/notebooks/{lesson}.ipynb?reset&token={TOKEN}")
    cells = nbformat.read(course / "notebooks" / f"{lesson}.ipynb", as_version=4).cells
    until(lambda: len(select(browser, f"{ACTIVE}.jp-Notebook .jp-Cell")) >= len(cells), "all cells are on the page")
    until(lambda: kernel_is(browser, "Idle"), "the kernel is idle")
    return cells


def run_cells(browser, keys, count):
    """Shift and Enter as often as there are cells: each time the next one is the active one before it goes on."""
    for _ in range(count):
        before = browser.execute_script(POSITION)
        keys.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
        until(lambda before=before: browser.execute_script(POSITION) != before, "the next cell is active")


def drawings(cells):
    return sum(
        "image/svg+xml" in output.get("data", {}) and "application/vnd.jupyter.widget-view+json" not in output["data"]
        for cell in cells
        for output in cell.get("outputs", ())
    )


def local_links(cells):
    """Files that the texts link to, by their paths in the course."""
    found = {a or b for cell in cells if cell.cell_type == "markdown" for a, b in LINK.findall(cell.source)}
    urls = [urllib.parse.urlsplit(link) for link in found]
    return {
        posixpath.normpath(posixpath.join("notebooks", urllib.parse.unquote(url.path)))
        for url in urls
        if url.path and not url.scheme
    }


def files_linked(browser):
    """Files of the course that JupyterLab's links lead to; test_lab.py asks the server for each."""
    links = [each.get_attribute("href") or "" for each in select(browser, f"{ACTIVE}.jp-RenderedMarkdown a")]
    return {urllib.parse.urlsplit(link).path.partition("/files/")[2] for link in links}


def answer(browser, cell):
    """Answer each question of a cell by the mouse, whatever its field is; returns how many there are."""
    buttons = [each for each in cell.find_elements(By.TAG_NAME, "button") if each.text == "Keep my answer"]
    for number, button in enumerate(buttons, start=1):
        line = button.find_element(By.XPATH, "..")
        if radios := line.find_elements(By.CSS_SELECTOR, "input[type='radio']"):
            radios[0].click()
        elif lists := line.find_elements(By.TAG_NAME, "select"):
            lists[0].find_elements(By.TAG_NAME, "option")[-1].click()
        else:
            line.find_element(By.CSS_SELECTOR, "input[placeholder='a number']").send_keys("1", Keys.TAB)
        button.click()
        until(lambda number=number: kept(cell) == number, "the answer is kept")
    return len(buttons)


def kept(cell):
    return sum(each.text.startswith("kept: ") for each in cell.find_elements(By.CSS_SELECTOR, "[role='status']"))


def questions(cell):
    return sum(QUESTION in output.get("data", {}) for output in cell.get("outputs", ()))


def has_run(browser):
    return kernel_is(browser, "Idle") and not any(
        "[*]" in each.text for each in select(browser, f"{ACTIVE}.jp-InputPrompt")
    )


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_has_its_drawings_and_every_question_is_answered_before_its_result_is_shown(lesson, lab, browser):
    cells = opened(browser, lab, lesson)
    assert drawings(cells) == until(lambda: len(outputs(browser, "image/svg+xml")) + 1, "outputs") - 1
    assert len(outputs(browser, "application/vnd.jupyter.stderr")) == (lesson == WARNS)
    assert files_linked(browser) >= local_links(cells)
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    keys = ActionChains(browser)
    browser.find_element(By.CSS_SELECTOR, f"{ACTIVE}.jp-Notebook").send_keys(Keys.ESCAPE)
    for number, cell in enumerate(cells):
        run_cells(browser, keys, 1)
        if asked := questions(cell):
            until(lambda: has_run(browser), "the cells so far have run")
            on_page = select(browser, f"{ACTIVE}.jp-Notebook .jp-Cell")[number]
            assert answer(browser, on_page) == asked
            keys.send_keys(Keys.ESCAPE, Keys.ARROW_DOWN).perform()
            until(lambda number=number: browser.execute_script(POSITION) == number + 1, "the next cell is active")
    until(lambda: has_run(browser), "all cells have run")
    assert errors(browser) == []
    answers = [each for each in select(browser, f"{ACTIVE}.jp-RenderedHTMLCommon") if "you:" in each.text]
    assert len(answers) >= sum(map(questions, cells))


def test_a_learner_goes_through_a_lesson_by_keyboard_and_predicts(lab, browser):
    cells = opened(browser, lab, BY_KEYBOARD)
    asks = next(number for number, cell in enumerate(cells) if "ask=" in cell.source and "choices" not in cell.source)
    keys = ActionChains(browser)
    browser.find_element(By.CSS_SELECTOR, f"{ACTIVE}.jp-Notebook").send_keys(Keys.ESCAPE)
    run_cells(browser, keys, asks + 1)
    field = until(
        lambda: select(browser, f"{ACTIVE}.jp-Cell .jupyter-widgets input[placeholder='a number']"),
        "the question has its field",
    )[0]
    until(lambda: kernel_is(browser, "Idle"), "the cell has ended")
    for _ in range(40):  # Shift and Enter have gone on to the next cell: back to the output above it
        keys.key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
        if browser.switch_to.active_element == field:
            break
    assert browser.switch_to.active_element == field
    keys.send_keys("0.25", Keys.TAB).perform()
    until(lambda: browser.switch_to.active_element.tag_name == "button", "the button is next")
    keys.send_keys(Keys.SPACE).perform()
    until(lambda: any("kept: 0.25" in each.text for each in select(browser, ".widget-html")), "it is kept")
    keys.send_keys(Keys.ESCAPE).perform()
    run_cells(browser, keys, len(cells) - asks - 1)
    until(lambda: kernel_is(browser, "Busy"), "cells run")
    until(lambda: has_run(browser), "all cells have run")
    assert errors(browser) == []
    assert any("you: 0.25" in each.text for each in select(browser, f"{ACTIVE}.jp-RenderedHTMLCommon"))
    keys.key_down(Keys.CONTROL).send_keys("s").key_up(Keys.CONTROL).perform()
    path = lab[1] / "notebooks" / f"{BY_KEYBOARD}.ipynb"
    stored = (ROOT / "notebooks" / f"{BY_KEYBOARD}.ipynb").read_text()
    until(lambda: path.read_text() != stored, "it is saved")
    assert notebook.recorded(path)
