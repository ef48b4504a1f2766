"""Several processes, one run: none waits for one that has died.

A process that is killed leaves the others in a collective that NCCL ends after half an hour and gloo with an error that
names nobody. `RankWatch` keeps a connection of each process to process 0: the kernel closes it when its owner ends,
however it ends, and at no other time, so a process that is stopped or starved is never taken for dead.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from accumft.signals import Interrupted

JOIN_SECONDS, HELLO_SECONDS = 20.0, 2.0  # for a process to reach process 0; for a connection to say whose it is
NEWS_SECONDS = 1.0  # a broken collective can be an error milliseconds before the news of the process that broke it
LEAVE_SECONDS = 10.0  # for a process that has lost another, once it has left the watch, to end by itself
# An idle connection to a machine that vanished ends after 10 + 3 * 3 seconds. macOS has its own name for the first.
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))


class _Link:
    """A connection to another process that carries JSON objects, one a line: data only, never code."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.sock, self.rank, self._rest = sock, rank, b""
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((getattr(socket, name), value) for name, value in KEEPALIVE if hasattr(socket, name)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, **message: Any) -> None:
        """Sends a few hundred bytes, which the kernel takes at once; an other end that is gone does not matter."""
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """→ the objects that have arrived; None: the other end is gone."""
        try:
            data = self.sock.recv(65_536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None


class RankWatch:
    """Ends this process soon after another of the run has died, though its main thread hangs in a collective.

    with RankWatch(accelerator):  # every process, at the same point; for one process alone it does nothing
        ...                       # the training

    Where a process just ends, or leaves by an exception, each of the others prints one line that names it (and the
    exception), gives its main thread `grace` seconds to get an error of its own, and exits with 1. A process that
    leaves without an exception, or by a signal as all do, is dead to nobody; once process 0 has left, nobody is
    watched. Leaving raises RuntimeError where a process is lost and nothing else was raised.
    """

    def __init__(self, accelerator: Accelerator, grace: float = 3.0) -> None:
        self.lost: str | None = None  # what was printed of the process that is lost
        self._rank, self._count, self._grace = int(accelerator.process_index), int(accelerator.num_processes), grace
        self._cause: tuple[int, str | None] | None = None  # the first process that died, and by which exception
        self._links: dict[int, _Link] = {}  # process 0: to each of the others; the others: to process 0
        self._news, self._leaving = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # between leaving in the main thread and ending the process in the other
        self._thread = threading.Thread(target=self._watch, name="accumft-rank-watch", daemon=True)
        self._open = False  # in a forked child it is not

    def __enter__(self) -> "RankWatch":
        global _current
        _current = self
        if self._count == 1:
            return self
        problems = self._connect()
        if problems:  # the training itself may run well
            for link in self._links.values():
                link.sock.close()
            if self._rank == 0:
                print(f"warning: a process that dies will be noticed late: {problems}", file=sys.stderr, flush=True)
            return self
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for link in self._links.values():
            self._selector.register(link.sock, selectors.EVENT_READ, link)
        self._open = True
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self._open:
            return
        text = None if error is None else " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(": ")
        if isinstance(error, RuntimeError):  # torch's, it may be: what comes of a death is raised before the news of it
            self._news.wait(NEWS_SECONDS)
        with self._lock:
            self._leaving.set()
        self._wake.send(b".")
        self._thread.join()
        if self._cause is not None and (error is None or (isinstance(error, RuntimeError) and text != self._cause[1])):
            self._say()  # else it is a mistake that every process finds, or one of its own, which it ends with
        for link in self._links.values() if self.lost is None else ():
            link.send(well=error is None or isinstance(error, Interrupted), rank=self._rank, error=text)
        self._close()
        if self.lost is not None:
            timer = threading.Timer(LEAVE_SECONDS, _end_process)
            timer.daemon = True
            timer.start()
            if error is None:
                raise RuntimeError(self.lost)

    def _connect(self) -> str:
        """Connects each process to process 0; → what is in the way (a firewall, say), the same on every process."""
        host, token = os.environ.get("MASTER_ADDR", "127.0.0.1"), secrets.token_hex(16)
        listener = _listener(host, self._count) if self._rank == 0 else None
        offer: list[Any] = [listener and (listener.getsockname()[1], token)]
        broadcast_object_list(offer)
        port, token = offer[0]
        problem = self._accept(listener, token.encode()) if listener else self._call(host, port, token)
        return "; ".join(filter(None, gather_object([problem])))

    def _call(self, host: str, port: int, token: str) -> str:
        try:
            sock = socket.create_connection((host, port), timeout=JOIN_SECONDS)
            sock.sendall(f"{token}{self._rank:08}".encode())
            self._links[0] = _Link(sock, 0)
        except OSError as error:
            return f"process {self._rank} does not reach process 0 at {host} ({error})"
        return ""

    def _accept(self, listener: socket.socket, token: bytes) -> str:
        """Process 0: takes the connections of the others, which know the token, and drops any other."""
        end = time.monotonic() + JOIN_SECONDS
        with listener:
            while missing := set(range(1, self._count)) - self._links.keys():
                listener.settimeout(max(0.0, end - time.monotonic()))
                try:
                    sock, hello = listener.accept()[0], b""
                except OSError:
                    return f"process 0 waited in vain for {', '.join(map(str, sorted(missing)[:8]))}"
                sock.settimeout(HELLO_SECONDS)
                with contextlib.suppress(OSError):
                    while len(hello) < len(token) + 8 and (part := sock.recv(len(token) + 8 - len(hello))):
                        hello += part
                if hmac.compare_digest(hello[:-8], token):
                    self._links[int(hello[-8:])] = _Link(sock, int(hello[-8:]))
                else:
                    sock.close()
        return ""

    def _watch(self) -> None:
        """What the thread does: waits for the first death, spreads the news, and ends this process."""
        self._cause = self._first_death()
        if self._cause is None:
            return
        rank, text = self._cause
        for link in self._links.values() if self._rank == 0 else ():
            link.send(well=False, rank=rank, error=text)
        if text is None:
            self._say()
        self._news.set()
        self._leaving.wait(self._grace)
        with self._lock:
            if not self._leaving.is_set():
                self._say()
                _end_process()

    def _first_death(self) -> tuple[int, str | None] | None:
        """→ the process that died and its exception; None: this process leaves."""
        while not self._leaving.is_set():
            for key, _ in self._selector.select():
                link: _Link | None = key.data
                if link is None:  # woken to leave
                    continue
                messages = link.receive()
                if messages is None:
                    return link.rank, None
                for message in messages:
                    if not message["well"]:
                        return message["rank"], message["error"]
                    self._selector.unregister(link.sock)
                    link.sock.close()
        return None

    def _say(self) -> None:
        if self.lost is None and self._cause is not None:
            rank, text = self._cause
            end = "has ended without a word (killed, out of memory, or its machine is gone)"
            self.lost = (
                f"process {rank} {end if text is None else f'ended: {text}'}; this process ({self._rank}) ends too"
            )
            if text is None:
                self.lost += "; with --resume_from_checkpoint true the run goes on from its last checkpoint"
            with contextlib.suppress(OSError, ValueError):  # nobody reads: no reason to live on
                print(f"\nerror: {self.lost}", file=sys.stderr, flush=True)  # after the open line of a progress bar

    def _close(self) -> None:
        self._open = False
        self._selector.close()
        for sock in (self._wake, self._woken, *(link.sock for link in self._links.values())):
            sock.close()


_current: RankWatch | None = None


def lost_rank() -> str | None:
    """What the last watch of this process printed of a process that is lost: what is raised then only follows."""
    return None if _current is None else _current.lost


def _forget_in_child() -> None:
    """A forked process, such as a worker of a DataLoader, would hide the death of its parent by holding its sockets."""
    if _current is not None and _current._open:
        _current._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def _end_process() -> None:
    """Exit code 1, though the main thread hangs; what was printed so far is kept, unless nobody takes it."""
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(1)


def _listener(host: str, backlog: int) -> socket.socket:
    """A server where the group meets; on every address, if that name may be another one on another machine."""
    with contextlib.suppress(OSError, ValueError):
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        # Debian's /etc/hosts has a machine's own name at 127.0.1.1.
        if host in ("localhost", address[0]) or not ipaddress.ip_address(address[0]).is_loopback:
            return socket.create_server(address[:2], family=family, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)
