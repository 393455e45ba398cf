"""Annotations in a run that checks them (`--jaxtyping-packages`)."""

from contextlib import contextmanager

import jaxtyping


@contextmanager
def unchecked():
    """Meanwhile nothing is: for what is no array, of a fake or of a user's mistake, that the code
    itself is to judge."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)
