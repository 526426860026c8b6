"""docs/commands.md says what the commands say."""

from course_lib.commands.submit import ASK_ABOVE
from tools import transcript


def test_the_page_is_what_the_commands_say_now():
    text = transcript.page()
    assert transcript.PAGE.read_text(encoding="utf-8") == text, "run `python tools/transcript.py`"
    assert len(transcript.CASES) >= 15 and text.count("| `course ") == len(transcript.CASES)
    for told in (
        "Try: course train --model tiny-bert",
        "--dataset corpus.txt --max_steps",
        f"more than ${ASK_ABOVE:g}",
    ):
        assert told in text
    assert "Traceback" not in text
