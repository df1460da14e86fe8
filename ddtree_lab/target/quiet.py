"""Loading stage: what transformers and huggingface_hub print in a block of code -> nothing; errors say what matters."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No log lines of transformers and huggingface_hub, and their progress bars on a terminal only.

    They draw bars on any standard error, and in a notebook as widgets. Every switch is put back at the end.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as switches

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    hides_bars = not sys.stderr.isatty() and switches.is_progress_bar_enabled()
    hub_was_silent = are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    if hides_bars:
        switches.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if hides_bars:
            switches.enable_progress_bar()
            if hub_was_silent:
                disable_progress_bars()
