"""The errors that accumft raises on purpose."""


class UserError(Exception):
    """A mistake in what the user gave: a file, a row, a flag.

    The message is one line that names the file, the row or the flag, and the remedy. On the command line it ends the
    run with exit code 2 and no traceback; in a notebook it is an ordinary exception.
    """


class NonFiniteLossError(ArithmeticError):
    """The loss or the gradient of a step is not a finite number. The weights are those before the step."""


class EmptyWindowError(ValueError):
    """An effective batch holds no items, so its mean loss does not exist."""


class NotEnoughMemoryError(RuntimeError):
    """What cannot be made smaller does not fit into a device's memory. The weights are those before the step."""

    everywhere = True
    """Whether every process raises it."""


class OutputError(RuntimeError):
    """What a run was to leave behind could not be written."""
