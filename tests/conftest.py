"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts a job in the background lets it ignore Ctrl-C, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
