"""Questions and the page My progress in Chromium, in a small book: by keyboard, kept, read from files, axe, a phone.

See test_in_a_browser.py for what they need.
"""

import functools
import json
import re
import time
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.alert import Alert
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from book import build, course_contents, npm
from book.assemble import PAGES
from book.links import Links
from book.notebooks import page_of
from book.stored_questions import anchor
from course_lib import cli
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.tasks import TASKS
from course_lib.lessons.questions import parsed
from tests import browsing
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = browsing.needs_a_browser
CONTENTS = course_contents.contents()
QUESTIONS = sum(len(lesson["questions"]) for lesson in CONTENTS["lessons"])
POINTS = sum(exercise["points"] for exercise in CONTENTS["exercises"])
NOTEBOOKS = ("notebooks/05_zero_stages", "notebooks/16_gradient_audit")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Where a server of a book of two lessons and the page My progress answers."""
    folder, links = tmp_path_factory.mktemp("book"), Links(ROOT, set())
    source = folder / "source"
    pages = {f"{name}.ipynb": page_of(ROOT / f"{name}.ipynb", Path(f"{name}.ipynb"), links)[0] for name in NOTEBOOKS}
    pages |= {
        "live/progress.md": (PAGES / "live" / "progress.md").read_text(),
        "about-files.json": json.dumps({"alternatives": {}, "files": []}),
        f"_static/{course_contents.NAME}": course_contents.script(),
        "index.md": "\n".join(["# A book\n\n```{toctree}", *NOTEBOOKS, "live/progress\n```\n"]),
    }
    for name, content in pages.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    assert build.sphinx(["-Q", "-b", "html", "-c", str(ROOT / "book"), str(source), str(folder / "html")]) == 0
    with browsing.served(folder / "html") as where:
        yield where


@pytest.fixture
def page(browser, small):
    """Opens a page of the small book; nothing is kept at the beginning."""
    browser.get(small + "index.html")
    browser.execute_script("localStorage.clear()")
    browsing.resize(browser, browsing.WIDE)

    def open_(name):
        browsing.open_(browser, small + name)
        return functools.partial(browser.find_element, By.CSS_SELECTOR)

    return open_


def kept(browser, name):
    return json.loads(browser.execute_script("return localStorage.getItem(arguments[0])", f"course:{name}") or "{}")


def press(browser, *keys):
    ActionChains(browser, duration=0).send_keys(*keys).perform()


def tab_to(browser, selector):
    """Press Tab from the page's beginning until an element has the focus."""
    browser.execute_script("document.activeElement.blur()")
    for _ in range(400):
        if browser.execute_script("return document.activeElement.matches(arguments[0])", selector):
            return
        press(browser, Keys.TAB)
    raise AssertionError(f"Tab does not reach {selector}")


def words(browser):
    return browser.find_element(By.TAG_NAME, "article").text


FOUND = "Measured stage 2 sends: 2 units"


def test_a_question_is_answered_by_keyboard_and_its_answer_is_kept(browser, page):
    find = page("notebooks/05_zero_stages.html")
    question = f"#{anchor('volume_stage_2')}"
    assert "How many units does it send?" in words(browser) and "The author" not in words(browser)
    assert FOUND not in words(browser) and "is a reduce-scatter followed by an all-gather" not in words(browser)
    find(f"#{anchor('volume_stage_3')} input").send_keys("not yet")
    tab_to(browser, f"{question} input")
    press(browser, "many", Keys.ENTER)
    assert "Write a number" in find(f"{question} [role=alert]").text and not kept(browser, "answers")
    press(browser, Keys.BACKSPACE * 4, "2.1", Keys.ENTER)
    said = find(question).text
    assert re.search(r"You\s+2.1 units\s+✓ 5 % too high: close\s+The author\s+2 units\s+✓ exactly that", said), said
    assert re.search(r"Measured\s+2 units", said) and FOUND in words(browser)
    assert browser.execute_script("return document.activeElement.className") == "question-result"
    assert "and stage 1: 2 units" not in words(browser)  # waits for the other question, too
    assert find(f"#{anchor('volume_stage_3')} input").get_property("value") == "not yet"
    page("notebooks/05_zero_stages.html")
    assert "2.1 units" in find(question).text and "8 questions on this page, 1 answered." in words(browser)
    entry = kept(browser, "answers")["05_zero_stages"]["volume_stage_2"]
    assert (entry["value"], entry["measured"], entry["close"]) == (2.1, 2, True)
    tab_to(browser, f"{question} button")
    press(browser, Keys.ENTER)  # try again
    assert browser.execute_script("return document.activeElement.name") == "answer" and FOUND not in words(browser)
    assert kept(browser, "answers") == {"05_zero_stages": {}}


def test_numbers_are_read_as_in_the_notebook(browser, page):
    page("notebooks/05_zero_stages.html")
    question = f"#{anchor('volume_stage_3')}"
    for written in (
        "1,000",
        "0,5",
        "3/4",
        "40 %",
        "1e9",
        "-2.5",
        "1_0",
        ".5",
        "12.",
        "1,5/2",
        "1/0",
        "x",
        "",
        "2 %%",
        "nan",
    ):
        try:
            expected = parsed(written)
        except ValueError:
            expected = None
        field = browser.find_element(By.CSS_SELECTOR, f"{question} input")
        field.clear()
        field.send_keys(written, Keys.ENTER)
        entry = kept(browser, "answers").get("05_zero_stages", {}).get("volume_stage_3")
        assert (entry["value"] if entry else None) == expected, written
        if entry:
            browser.find_element(By.CSS_SELECTOR, f"{question} button").click()


def test_choices_skipping_and_showing_all(browser, page):
    find = page("notebooks/16_gradient_audit.html")
    first, second = f"#{anchor('engine_1_parameters')}", f"#{anchor('engine_1_factor')}"
    find(f"{first} .question-check").click()
    assert "Choose one first" in find(first).text
    tab_to(browser, f"{first} input")
    press(browser, Keys.ARROW_DOWN, Keys.ENTER)
    assert re.search(r"You\s+the split ones.*not this one\s+The author\s+all nine\s+✓ right", find(first).text)
    find(f"{second} .question-link").click()  # show without answering
    assert not browser.find_elements(By.CSS_SELECTOR, f"{second} .question-you")
    assert re.search(r"The author\s+1/6\s+not this one", find(second).text)
    assert "wrong in engine 1: all nine" in words(browser) and "wrong in engine 2" not in words(browser)
    assert "1 answered" in words(browser)
    find(".questions-bar input").send_keys(Keys.SPACE)
    assert "wrong in engine 2" in words(browser) and "wrong in engine 5" in words(browser)
    page("notebooks/16_gradient_audit.html")
    assert find(".questions-bar input").is_selected() and "wrong in engine 5" in words(browser)
    find(".questions-bar input").send_keys(Keys.SPACE)
    assert "wrong in engine 5" not in words(browser) and "wrong in engine 1" in words(browser)


def test_without_javascript_all_is_there(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page_ = functools.partial(browser.find_element, By.CSS_SELECTOR)
        browser.get(browser.current_url.replace("index.html", "notebooks/16_gradient_audit.html"))
        assert page_(".waits").is_displayed() and page_(".question-choices").is_displayed()
        assert page_(".question-author").is_displayed() and not browser.find_elements(By.CSS_SELECTOR, ".question form")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_progress_shows_what_was_done_and_where_one_left(browser, page, tmp_path, capsys, monkeypatch):
    find = page("notebooks/05_zero_stages.html")
    browser.execute_script("document.getElementById('what-moves').scrollIntoView()")
    until(lambda: kept(browser, "places")["05_zero_stages"]["id"] == "what-moves", what="the heading is remembered")
    find(f"#{anchor('volume_stage_2')} input").send_keys("2", Keys.ENTER)
    find(f"#{anchor('volume_stage_3')} input").send_keys("9", Keys.ENTER)
    find = page("live/progress.html")
    assert f"2 of {QUESTIONS} questions answered, 1 close; 0 of {POINTS} points" in words(browser)
    assert find("#progress > p a").get_attribute("href").endswith("notebooks/05_zero_stages.html#what-moves")

    monkeypatch.setenv("COURSE_RESULTS", str(tmp_path / "my_results.json"))
    task = TASKS["zero.bytes"]
    cli.main(["check", str(solutions_folder() / f"{task.lesson}.ipynb"), "--tasks", task.name, "--json"])
    (tmp_path / "results.json").write_text(capsys.readouterr().out)
    status = functools.partial(find, ".progress-said")
    file = tmp_path / "other.json"
    good = {"points": 1, "of": 3, "when": "2026-01-01T00:00:00+00:00"}
    for other in (
        "{",
        "[]",
        "{}",
        json.dumps({"no.such": good}),
        json.dumps({task.name: good | {"points": 4}}),
        json.dumps({task.name: good | {"more": 1}}),
        json.dumps({task.name: good | {"when": "soon"}}),
        json.dumps({"course": 1, "answers": [], "places": {}, "results": {}}),
    ):
        file.write_text(other)
        find("#progress-file").send_keys(str(file))
        until(lambda: "other.json is not what" in status().text, what="a refusal")
        assert "\n" not in status().text and not kept(browser, "results"), other
        browser.execute_script("document.querySelector('.progress-said').textContent = ''")
    find("#progress-file").send_keys(str(tmp_path / "results.json"))
    until(lambda: status().text == "results.json is read: 1 exercise.", what="the results are read")
    assert kept(browser, "results") == json.loads((tmp_path / "results.json").read_text())
    assert f"1 close; {sum(task.points.values())} of {POINTS} points" in words(browser)

    before = [kept(browser, name) for name in ("answers", "results", "places")]
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    export, forget = browser.find_elements(By.CSS_SELECTOR, ".progress-buttons button")
    export.click()
    until((tmp_path / "my-progress.json").is_file, what="a file is exported")
    forget.click()
    Alert(browser).dismiss()
    assert [kept(browser, name) for name in ("answers", "results", "places")] == before
    find(".progress-buttons button + button").click()
    Alert(browser).accept()
    assert browser.execute_script("return Object.keys(localStorage).filter(key => key.startsWith('course:'))") == []
    assert f"0 of {QUESTIONS} questions" in words(browser)
    find("#progress-file").send_keys(str(tmp_path / "my-progress.json"))
    until(lambda: "my-progress.json is read" in status().text, what="the export is read")
    assert [kept(browser, name) for name in ("answers", "results", "places")] == before


def test_questions_and_progress_are_accessible_and_fit_a_phone(browser, page, small):
    axe = (npm.folder("axe-core") / "axe.min.js").read_text(encoding="utf-8")
    problems = []
    for name in ("notebooks/16_gradient_audit.html", "live/progress.html"):
        find = page(name)
        if "notebooks" in name:
            find(f"#{anchor('engine_1_parameters')} input").click()
            find(f"#{anchor('engine_1_parameters')} .question-check").click()
            find(f"#{anchor('engine_1_factor')} .question-check").click()  # an error is shown
        else:
            for fold in browser.find_elements(By.CSS_SELECTOR, ".progress-page summary"):
                fold.click()
        browsing.asked_for(browser)
        browser.execute_script(axe)
        for theme, size in (("light", browsing.WIDE), ("dark", browsing.NARROW)):
            browsing.resize(browser, size)
            browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
            time.sleep(0.3)  # the theme's colours change in steps
            problems += [f"{name}, {theme}: {one}" for one in browser.execute_async_script(browsing.AXE, None)]
            assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
        assert not {url for url in browsing.asked_for(browser) if not url.startswith((small, "data:", "blob:"))}
    assert not problems, "\n".join(problems)
