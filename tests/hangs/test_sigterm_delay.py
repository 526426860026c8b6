"""SIGTERM is held back for a report, and never taken from a script that handles it itself."""

import os
import signal

import pytest

from course_lib.hangs.sigterm_delay import Reprieve


@pytest.fixture
def undisturbed():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_held_back_until_the_end(undisturbed):
    reprieve = Reprieve()
    reprieve.start()
    os.kill(os.getpid(), signal.SIGTERM)  # without it this would end the tests
    assert reprieve.seconds() > 0
    reprieve._came_at = None  # it would come again, now
    reprieve.stop()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_set_later_has_the_signal_to_itself(undisturbed):
    reprieve, heard = Reprieve(), []
    reprieve.start()
    own = lambda number, frame: heard.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM] and reprieve.seconds() == 0.0  # else the watchdog would end the process
    reprieve.stop()
    assert signal.getsignal(signal.SIGTERM) is own
    assert heard == [signal.SIGTERM]  # and it does not come a second time
