"""The command `ultrascale` in this process."""

import pytest

from ultrascale_jax.cli import main


def ultrascale(*words: object) -> int | str | None:
    """Return the exit code of `ultrascale WORDS`, None where it returns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["ultrascale", *map(str, words)])
        try:
            main.main()
        except SystemExit as stop:
            return stop.code
    return None


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the one line with which `ultrascale WORDS` is refused, without its `error: `."""
    capsys.readouterr()
    assert ultrascale(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removeprefix("error: ")
