"""Filters for warnings of libraries about machines without an accelerator, because users cannot act on these warnings."""

from __future__ import annotations

import logging
import warnings

#: Logger → beginning of a message.
_MESSAGES = {
    "DeepSpeed": "Setting accelerator to CPU",
    "vllm.triton_utils.importing": "Triton not installed or not compatible",
}


def quiet_known_warnings() -> None:
    """Keeps known warnings out of the terminal and of the ranks' logs, also those of libraries that are imported later."""
    for name, message_start in _MESSAGES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(log_filter, _Beginning) for log_filter in logger.filters):
            logger.addFilter(_Beginning(message_start))
    warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)


class _Beginning(logging.Filter):
    """Log filter that drops records with a message that begins with a text."""

    def __init__(self, message_start: str) -> None:
        super().__init__()
        self._message_start = message_start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._message_start)
