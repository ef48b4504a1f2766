"""What a micro-batch may hold on this run's devices, learnt from those that ran out of memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size

from accumft.data.windows import Window, shape_of, split
from accumft.errors import NotEnoughMemoryError

# Steps without a failure after which a limit grows; each failure of a grown limit doubles them, up to the second.
GROW_AFTER, GROW_AFTER_AT_MOST = 100, 10_000
GROWTH = 1.25

# Allocators that fail on the CPU outside of torch's own: oneDNN's, which says no more than this, and C++'s.
_CPU_MESSAGES = (
    "could not create a primitive",
    "could not create a memory",
    "std::bad_alloc",
    "Cannot allocate memory",
)

REMEDIES = (
    "lower --max_length (seq2seq: --max_source_length and --max_target_length; images: --image_size), or use "
    "--gradient_checkpointing or --mixed_precision bf16 or fp16"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator failed, of any device, torch's or a library's under it."""
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or any(text in str(error) for text in _CPU_MESSAGES)


@dataclass(frozen=True, slots=True)
class Failure:
    """A micro-batch that ran out of memory."""

    tokens: int
    """Padded."""
    length: int
    """Of its longest row."""
    rows: tuple[int, ...]
    """Their numbers in their source; empty where they are not known."""
    count: int
    """How many rows."""
    process: int = 0
    fitted: int = 0
    """Most padded tokens that fitted there with rows of that length."""


class MemoryLimit:
    """Padded tokens that a micro-batch may have, by the length of its rows: none until one did not fit.

    A failure holds for its length and for longer rows, which need no less for a token. After a while without failures
    a limit grows again, since memory may have been short for a moment only. Every process of a run learns from the
    failures of all, so that theirs are the same.
    """

    def __init__(self, grow_after: int = GROW_AFTER) -> None:
        """
        Args:
            grow_after: optimizer steps without a failure after which a limit grows by a quarter.
        """
        self.grow_after = grow_after
        self.retries = 0
        """Windows run again so far."""
        self._limits: dict[int, tuple[int, int]] = {}  # by size class of lengths: (limit, what failed)
        self._fitted: dict[int, int] = {}
        self._steps = 0
        self._grown = False

    @property
    def smallest(self) -> int | None:
        """The smallest limit in force, in padded tokens; None: there is none."""
        return min((limit for limit, _ in self._limits.values()), default=None)

    def allowed(self, length: int) -> int | None:
        """Padded tokens of a micro-batch with rows of this length; None: no limit."""
        limits = [limit for size, (limit, _) in self._limits.items() if size <= length.bit_length()]
        return min(limits, default=None)

    def cut(self, window: Window) -> Window:
        """The window with the micro-batches divided that are above their limit; the same one if there are none."""
        if not self._limits:
            return window
        parts = []
        for number, batch in enumerate(window.micro_batches):
            count, length, tokens = shape_of(batch)
            allowed = self.allowed(length)
            rows = window.rows[number] if window.rows else ()
            counted = number not in window.placeholders
            if allowed is None or tokens <= allowed or count == 1:
                parts.append((tokens, counted, batch, rows))
                continue
            start = 0
            for piece in split(batch, allowed):
                stop = start + shape_of(piece)[0]
                parts.append((shape_of(piece)[2], counted, piece, rows[start:stop]))
                start = stop
        if len(parts) == len(window.micro_batches):
            return window
        # The largest first, as before; what counts nothing at the end.
        parts.sort(key=lambda part: (not part[1], -part[0]))
        return replace(
            window,
            micro_batches=[batch for _, _, batch, _ in parts],
            rows=[rows for *_, rows in parts] if window.rows else (),
            placeholders=frozenset(number for number, part in enumerate(parts) if not part[1]),
            counts=None,
        )

    def failure(self, window: Window, number: int, process: int) -> Failure:
        """Describes the failure of one of a window's micro-batches, before others hear of it."""
        count, length, tokens = shape_of(window.micro_batches[number])
        rows = tuple(window.rows[number]) if window.rows else ()
        return Failure(tokens, length, rows, count, process, self._fitted.get(length.bit_length(), 0))

    def learn(self, accelerator: Accelerator, failure: Failure | None, where: str, again: Sequence[Failure]) -> None:
        """Lowers the limits by the failures of all processes; every process must call it.

        Args:
            failure: this process's own, if it has one.
            where: what was being done, for messages.
            again: failures of this process in earlier attempts at the same thing.

        Raises:
            NotEnoughMemoryError: on every process, if a single row failed twice.
        """
        hopeless = failure is not None and failure.count == 1 and any(other.count == 1 for other in again)
        found: list[tuple[Failure, bool]] = gather_object([(failure, hopeless)] if failure else [])
        self.retries += 1
        self._steps = 0
        if self._grown:
            self.grow_after, self._grown = min(2 * self.grow_after, GROW_AFTER_AT_MOST), False
        for other, is_hopeless in found:
            if is_hopeless:
                row = f"row {other.rows[0]}" if other.rows else "a row"
                raise NotEnoughMemoryError(
                    f"{where}: {row} ({other.length:,} tokens) alone does not fit into the memory of process "
                    f"{other.process}: {REMEDIES}"
                )
            self._lower(other)

    def _lower(self, failure: Failure) -> None:
        size = failure.length.bit_length()
        # Half of it, or nearer to it if that much has fitted before.
        limit = max(failure.tokens // 2, min(failure.fitted, 3 * failure.tokens // 4))
        self._fitted = {s: t for s, t in self._fitted.items() if s < size or t < failure.tokens}
        earlier = self._limits.get(size, (limit, failure.tokens))
        self._limits[size] = (min(limit, earlier[0]), max(failure.tokens, earlier[1]))

    def succeeded(self, window: Window) -> None:
        """Notes a step whose window fitted."""
        for batch in window.micro_batches:
            _, length, tokens = shape_of(batch)
            size = length.bit_length()
            self._fitted[size] = max(tokens, self._fitted.get(size, 0))
        if not self._limits:
            return
        self._steps += 1
        if self._steps >= self.grow_after:
            self._steps, self._grown = 0, True
            grown = {size: (int(limit * GROWTH) + 1, failed) for size, (limit, failed) in self._limits.items()}
            # Above what failed it is a limit no more.
            self._limits = {size: pair for size, pair in grown.items() if pair[0] < pair[1]}
