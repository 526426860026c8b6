"""SIGTERM is held back for a report, and never taken from a script that handles it itself."""

import os
import signal

import pytest

from course_lib.hangs.sigterm_delay import SigtermDelay


@pytest.fixture
def undisturbed():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_held_back_until_the_end(undisturbed):
    delay = SigtermDelay()
    delay.start()
    os.kill(os.getpid(), signal.SIGTERM)  # without it this would end the tests
    assert delay.seconds() > 0
    delay._came_at = None  # it would come again, now
    delay.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_set_later_has_the_signal_to_itself(undisturbed):
    delay, heard = SigtermDelay(), []
    delay.start()
    own = lambda number, frame: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] and delay.seconds() == 0.0  # else the watchdog would end the process
    delay.stop()
    assert signal.getsignal(signal.SIGTERM) is own
    assert heard == [signal.SIGTERM]  # and it does not come a second time
