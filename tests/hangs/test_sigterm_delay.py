"""SIGTERM is held back for a report (test_watchdog.py), and never taken from a script that handles it itself."""

import os
import signal

from course_lib.hangs.sigterm_delay import SigtermDelay


def test_a_handler_that_is_set_later_has_the_signal_to_itself():
    before, heard = signal.signal(signal.SIGTERM, signal.SIG_DFL), []
    try:
        delay = SigtermDelay()
        delay.start()
        own = lambda number, frame: heard.append(number)  # noqa: E731
        signal.signal(signal.SIGTERM, own)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] and delay.seconds() == 0.0  # else the watchdog would end the process
        delay.stop()
        assert signal.getsignal(signal.SIGTERM) is own
        assert heard == [signal.SIGTERM]  # and it does not come a second time
    finally:
        signal.signal(signal.SIGTERM, before)
