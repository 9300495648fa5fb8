import pytest


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Each test has its own state directory: no calibration of this machine leaks in."""
    monkeypatch.setenv("SPECPILOT_HOME", str(tmp_path / "home"))
