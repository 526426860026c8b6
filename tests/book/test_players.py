"""Players of recorded ranks: a lesson has its own, the code is that of the recording, and by keyboard it is played."""

import html
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from book import npm, players
from tests.browsing import needs_a_browser, resize
from tests.waiting import until

STATIC = Path(players.__file__).parent / "static"
RECORDINGS = players.recordings()
AXE = """axe.run(document, {runOnly: ["wcag2a", "wcag2aa"], preload: false}).then(
  said => arguments[0](said.violations.map(one => one.id)))"""


def test_each_recording_is_on_the_page_of_all_and_on_its_lesson_s():
    page = players.page()["live/ranks.md"]
    assert re.findall(r'data-name="(\w+)"', page) == list(RECORDINGS)
    for path in sorted((players.ROOT / "notebooks").glob("[0-9]*.ipynb")):
        text = path.read_text(encoding="utf-8")
        made = players.with_players(text, path.relative_to(players.ROOT))
        own = [name for name in RECORDINGS if name[:2] == path.name[:2]]
        if not own:
            assert made == text
            continue
        before, after = (nbformat.reads(one, as_version=4).cells for one in (text, made))
        assert [cell.source for cell in before] == [cell.source for cell in after[:-1]]
        assert re.findall(r'data-name="(\w+)"', after[-1].source) == own


def test_the_coloured_code_is_the_code_line_by_line():
    files = players.files()
    for name, recording in RECORDINGS.items():
        text = files[f"_static/recordings/{name}.js"].decode()
        called = json.loads(text.removeprefix(f'courseRecording("{name}", ').removesuffix(");\n"))
        for part, plain in zip(called["code"], recording["code"], strict=True):
            shown = [html.unescape(re.sub("<[^>]+>", "", line)) for line in part["html"]]
            assert [line.strip() for line in shown] == [line.strip() for line in plain["lines"]]
            assert min(len(line) - len(line.lstrip()) for line in shown if line.strip()) == 0


# --- in a browser, from a folder, without the book around it

COLOURS = {"light": ("#fff", "#222832", "#48566b"), "dark": ("#121212", "#ced6dd", "#9ca4af")}
PAGE = """<!doctype html><html lang="en" data-theme="{theme}"><meta charset="utf-8"><title>ranks</title>
<meta name="viewport" content="width=device-width"><style>html {{ --pst-color-background: {0}; --pst-color-surface: {0};
--pst-color-text-base: {1}; --pst-color-text-muted: {2}; --pst-color-border: #888; --pst-color-primary: #1f5f99;
background: {0}; color: {1}; }} body {{ font-family: sans-serif; }}</style>
<link rel="stylesheet" href="player.css"><script src="player.js"></script>
<body><main class="bd-article"><h1>ranks</h1>{player}</main></body></html>"""


@pytest.fixture
def played(browser, tmp_path):
    """Opens a recording's player from a folder; gives a function that presses keys in it."""
    for name in ("player.js", "player.css"):
        shutil.copy(STATIC / name, tmp_path)

    def opened(name, theme="light", width=1280):
        script = f"{name}.js"
        (tmp_path / script).write_bytes(players.files()[f"_static/recordings/{script}"])
        markup = players.player(name, RECORDINGS[name]).replace("../_static/recordings/", "")
        page = PAGE.format(*COLOURS[theme], theme=theme, player=re.sub("```.*", "", markup))
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        resize(browser, (width, 1000))
        browser.get((tmp_path / "page.html").as_uri())
        until(lambda: browser.find_elements(By.CSS_SELECTOR, ".ranks-box svg"), what="the lanes")
        browser.execute_script("document.querySelector('.ranks-box').focus()")
        return lambda *keys: ActionChains(browser, duration=0).send_keys(*keys).perform()

    return opened


def marked(browser):
    """The line of each rank that has one, by the marks in the code."""
    return {
        int(rank): int(line)
        for line, ranks in browser.execute_script(
            "return [...document.querySelectorAll('.ranks-on')].map(row => [row.dataset.line, "
            "[...row.querySelectorAll('.ranks-here b')].map(chip => chip.textContent)])"
        )
        for rank in ranks
    }


def expected(recording, at):
    """The same by the recording."""
    lines = {}
    for rank, lane in enumerate(recording["ranks"]):
        last = [line for line in lane["lines"] if line[0] <= at][-1:]
        if last and last[0][1] >= 0 and at < lane["end"]["at"]:
            lines[rank] = last[0][2]
    return lines


def moment(browser):
    return browser.execute_script("return document.querySelector('.ranks').player.t")


def said(browser):
    return browser.find_element(By.CSS_SELECTOR, ".ranks-live").text


class TestInABrowser:
    pytestmark = [pytest.mark.long, needs_a_browser]

    def test_arrow_keys_step_from_event_to_event_and_the_marked_lines_follow(self, browser, played):
        press, recording = played("07_one_f_one_b"), RECORDINGS["07_one_f_one_b"]
        seen = []
        for _ in range(40):
            press(Keys.ARROW_RIGHT)
            seen.append(moment(browser))
            assert marked(browser) == expected(recording, seen[-1])
        assert seen == sorted(set(seen)) and len({tuple(expected(recording, at).items()) for at in seen}) > 20
        press(Keys.ARROW_LEFT)
        assert moment(browser) == seen[-2]
        press(Keys.HOME, Keys.PAGE_DOWN)
        assert moment(browser) == min(call[0] for lane in recording["ranks"] for call in lane["calls"] if call[0] > 0)
        press(Keys.END)
        assert moment(browser) == recording["until"] and "rank 3 has returned" in said(browser)
        press(Keys.HOME, " ")
        until(lambda: moment(browser) > 0, what="that it plays")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".ranks-arrow")) == len(recording["links"])

    def test_the_values_are_those_of_the_moment(self, browser, played):
        press, recording = played("07_one_f_one_b"), RECORDINGS["07_one_f_one_b"]
        for _ in range(60):
            press(Keys.ARROW_RIGHT)
        shown = [
            dict(
                zip(
                    [one.text for one in card.find_elements(By.TAG_NAME, "dt")],
                    [one.get_attribute("title") for one in card.find_elements(By.TAG_NAME, "dd")],
                    strict=True,
                )
            )
            for card in browser.find_elements(By.CSS_SELECTOR, ".ranks-card")
        ]
        for lane, values in zip(recording["ranks"], shown, strict=True):
            for place, name in enumerate(recording["variables"]):
                texts = [text for at, which, text in lane["values"] if which == place and at <= moment(browser)]
                assert values[name] == (texts[-1] if texts else "–")
            assert re.fullmatch(r"[\d.]+ (MB|kB|bytes)", values["memory"])

    def test_a_hang_is_a_lane_that_stops_with_a_mark_and_says_who_waits_for_whom(self, browser, played):
        press = played("10_leaves_the_loop")
        assert len(browser.find_elements(By.CSS_SELECTOR, ".ranks-stop")) == 2
        labels = [one.text for one in browser.find_elements(By.CSS_SELECTOR, ".ranks-never")]
        assert labels == ["never returned", "waits for rank 1"] * 2
        press(Keys.END, Keys.ARROW_LEFT)  # rank 1 has left, the others wait
        assert "rank 0 line 117, all_reduce of 4 bytes: waits for rank 1; rank 1 has returned" in said(browser)
        press(Keys.END)
        assert "rank 0 never returned from all_reduce: waits for rank 1" in said(browser)
        assert marked(browser) == {}

    @pytest.mark.parametrize("theme", COLOURS)
    def test_all_can_read_it_and_nothing_comes_from_elsewhere(self, browser, played, theme):
        for name, width in (("10_mismatched_collectives", 360), ("02_data_parallel", 1280)):
            press = played(name, theme, width)
            press(Keys.PAGE_DOWN, Keys.PAGE_DOWN)
            browser.find_element(By.CSS_SELECTOR, ".ranks-table summary").click()
            rows = "return document.querySelectorAll('.ranks-table tbody tr').length"
            lanes = RECORDINGS[name]["ranks"]
            events = sum(
                len(lane["lines"]) + 1 + sum(1 + (call[1] is not None) for call in lane["calls"]) for lane in lanes
            )
            until(lambda: browser.execute_script(rows) == events, what="the table of events")  # noqa: B023
            browser.execute_script((npm.folder("axe-core") / "axe.min.js").read_text(encoding="utf-8"))
            assert browser.execute_async_script(AXE) == []
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        assert all(
            one["params"]["request"]["url"].startswith(("file:", "data:"))
            for one in asked
            if one["method"] == "Network.requestWillBeSent"
        )
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
