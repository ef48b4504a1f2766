"""SIGTERM and SIGINT as a request: the run saves a checkpoint after the step it is in, and ends."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# What a launcher passes on to its processes within this time of a Ctrl-C, which they have got from the terminal
# already, is the same Ctrl-C.
SAME_REQUEST_SECONDS = 2.0
NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(SystemExit):
    """The run was asked to end, and every process does, with a checkpoint saved. The exit code is 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class StopSignals:
    """Context manager: while it is open, the first SIGTERM or SIGINT is noted in `signum`, a second SIGINT ends the
    process at once.

    Only the main thread can have handlers; elsewhere signals do what they did before. Python runs a handler when the
    main thread comes back from what it is in, which a collective that hangs never does: so the numbers of the signals
    go through a socket to a thread, which can end the process all the same.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._first = 0.0
        self._owner = 0
        self._before: dict[int, Any] = {}
        self._descriptor_before = -1
        self._sent: socket.socket | None = None

    def __enter__(self) -> "StopSignals":
        global _current
        if threading.current_thread() is threading.main_thread():
            self._owner = os.getpid()
            heard, self._sent = socket.socketpair()
            self._sent.setblocking(False)
            listener = threading.Thread(target=self._listen, args=(heard,), name="accumft-signals", daemon=True)
            listener.start()
            self._descriptor_before = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._note) for number in NUMBERS}
            _current = self
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
        if self._sent is not None:
            signal.set_wakeup_fd(self._descriptor_before)
            if os.getpid() == self._owner:
                self._sent.send(b"\0")
            self._sent.close()
            self._sent = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread: when it goes on, it knows."""
        self.signum = self.signum or number
        if "TORCHELASTIC_RUN_ID" not in os.environ and number == signal.SIGINT:
            # No launcher repeats it: the next one is meant, and works though a kernel holds all of Python up.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _listen(self, heard: socket.socket) -> None:
        """What the thread does."""
        with heard:
            while number := heard.recv(1)[0]:
                if number in NUMBERS:
                    self._hear(number)

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self._first:
            if number == signal.SIGINT and now - self._first > SAME_REQUEST_SECONDS:
                os._exit(128 + number)
            return
        self.signum, self._first = self.signum or number, now
        again = "; Ctrl-C again ends at once, and the step is lost" if number == signal.SIGINT else ""
        if os.environ.get("RANK", "0") == "0":
            text = f"\n{signal.Signals(number).name}: saving a checkpoint after this step, then ending{again}\n"
            with contextlib.suppress(OSError):  # a terminal that is gone is no reason to stay
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())


_current: StopSignals | None = None


def _forget_in_child() -> None:
    """A forked process ends by a signal as any other, and does not pass it on to its parent."""
    if _current is not None:
        _current.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
