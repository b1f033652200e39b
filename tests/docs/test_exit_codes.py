"""The site's page of exit codes lists the module's constants."""

import sys
from pathlib import Path

from ultrascale_jax.launch import exit_codes

ROOT = Path(__file__).parents[2]


def test_the_page_has_every_constant_with_its_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    from extensions.exit_codes import PLACE, add_codes

    source = [(ROOT / "docs/exit_codes.md").read_text()]
    assert source[0].count(PLACE) == 1
    add_codes(None, "exit_codes", source)
    constants = {name: value for name, value in vars(exit_codes).items() if name.isupper()}
    for name, value in constants.items():
        assert f"| {value} | `{name}` | " in source[0]
    assert "a restart cannot" in source[0] and PLACE not in source[0]
