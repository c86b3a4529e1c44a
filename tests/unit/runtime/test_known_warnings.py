"""Known messages of libraries are dropped; others of the same loggers are not."""

from __future__ import annotations

import logging
import warnings

import pytest

from rlhpc.runtime.known_warnings import quiet_known_warnings


def test_known_messages_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        quiet_known_warnings()
    for name, text in (("DeepSpeed", "Setting accelerator to CPU. If you have"), ("DeepSpeed", "out of memory")):
        logging.getLogger(name).addHandler(caplog.handler)
        logging.getLogger(name).warning(text)
        logging.getLogger(name).removeHandler(caplog.handler)
    assert {record.getMessage() for record in caplog.records} == {"out of memory"}
    assert len(logging.getLogger("DeepSpeed").filters) == 1


def test_a_deprecated_name_that_deepspeed_uses_is_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_known_warnings()
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use", FutureWarning, stacklevel=1)
        warnings.warn("another is deprecated", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["another is deprecated"]
