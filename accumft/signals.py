"""SIGTERM and SIGINT as a request: the run saves a checkpoint after the step it is in, and ends."""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# What a launcher passes on to its processes within this time of a Ctrl-C, which they have got from the terminal
# already, is the same Ctrl-C.
SAME_REQUEST_SECONDS = 2.0


class Interrupted(SystemExit):
    """The run was asked to end, and has saved a checkpoint. Its exit code is 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class StopSignals:
    """Context manager: while it is open, the first SIGTERM or SIGINT is noted in `signum`, a second SIGINT ends the
    process at once.

    Only the main thread can have handlers; elsewhere signals do what they did before.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signum:
            if number == signal.SIGINT and time.monotonic() - self._first > SAME_REQUEST_SECONDS:
                os._exit(128 + number)
            return
        self.signum, self._first = number, time.monotonic()
        if "TORCHELASTIC_RUN_ID" not in os.environ and number == signal.SIGINT:
            # No launcher repeats it: the next one is meant, and must work in the middle of a kernel too.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        again = "; Ctrl-C again ends at once, and the step is lost" if number == signal.SIGINT else ""
        if os.environ.get("RANK", "0") == "0":
            text = f"\n{signal.Signals(number).name}: saving a checkpoint after this step, then ending{again}\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
