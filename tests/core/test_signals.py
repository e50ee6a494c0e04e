"""An interrupt is not lost in what is raised on its way out."""

import pytest

from coterie.core.signals import as_interrupt


def test_an_error_on_the_way_out_does_not_hide_an_interrupt():
    def close():
        raise OSError("cannot be closed now")

    with pytest.raises(KeyboardInterrupt), as_interrupt():
        try:
            raise KeyboardInterrupt
        finally:
            close()
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        try:
            try:
                raise KeyboardInterrupt
            finally:
                close()
        except OSError as error:
            raise ValueError("damaged") from error


def test_other_errors_stay_what_they_are():
    with pytest.raises(ValueError, match="mine"), as_interrupt():
        raise ValueError("mine")
    with pytest.raises(OSError, match="second"), as_interrupt():
        try:
            raise ValueError("first")
        except ValueError:
            raise OSError("second") from None
    with pytest.raises(KeyboardInterrupt), as_interrupt():
        raise KeyboardInterrupt
