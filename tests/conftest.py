"""Ctrl-C reaches the tests also where a shell has started them in the background, ignoring it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
