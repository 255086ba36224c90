"""SIGTERM and SIGINT: the first asks for a stop after the step, the second ends the process at once.

A Python signal handler waits until the interpreter has its turn, which in a step can take long. The number of a signal
is written to a pipe by the C handler right away, and a thread reads it: so a second signal ends even a step that hangs.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: not done, try again
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether a stop has been asked for.

    Attributes:
        signal: name of the signal that asked, None so long as there was none.
    """

    def __init__(self) -> None:
        self.signal: str | None = None

    def received(self, number: int) -> None:
        """Note the first signal; end the process, as the shell knows it from that signal, on the next one."""
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def stop_requests() -> Iterator[Stop]:
    """While this is open, the first SIGTERM or SIGINT is noted in the `Stop` that it gives, the second one ends all.

    Outside the main thread, where Python sets no signal handlers, signals keep their meaning.

    Example:
        >>> with stop_requests() as stop:
        ...     trainer.fit(x, y, callbacks=[Checkpoints(trainer, "checkpoints", stop=stop)])
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    reader = threading.Thread(target=_read, args=(reading, stop), daemon=True)
    reader.start()
    before_pipe = signal.set_wakeup_fd(writing)
    before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_pipe)
        os.close(writing)
        reader.join()
        os.close(reading)


def _read(pipe: int, stop: Stop) -> None:
    while numbers := os.read(pipe, 16):
        for number in numbers:
            if number in _SIGNALS:
                stop.received(number)
