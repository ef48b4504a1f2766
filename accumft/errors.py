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
