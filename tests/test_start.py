"""Starting TensorFlow: standard error stays free for errors."""

import os

import pytest

from multitower import start


def written_to_standard_error(monkeypatch, capfd, then=lambda: None, level="2"):
    """What comes out when TensorFlow's C++ side, which knows nothing of sys.stderr, writes while it starts."""

    def noisy():
        os.write(2, b"could not find cuda\n")
        then()

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    monkeypatch.setattr(start, "_start", noisy)
    try:
        start.start_tensorflow()
    finally:
        os.write(2, b"afterwards\n")
    return capfd.readouterr().err


def test_messages_are_held_back(monkeypatch, capfd):
    assert written_to_standard_error(monkeypatch, capfd) == "afterwards\n"


def test_messages_are_shown_to_who_asks_for_them(monkeypatch, capfd):
    assert written_to_standard_error(monkeypatch, capfd, level="0") == "could not find cuda\nafterwards\n"


def test_messages_are_shown_when_it_does_not_start(monkeypatch, capfd):
    def fail():
        raise ImportError("no TensorFlow")

    with pytest.raises(ImportError, match="no TensorFlow"):
        written_to_standard_error(monkeypatch, capfd, fail)
    assert capfd.readouterr().err == "could not find cuda\nafterwards\n"
