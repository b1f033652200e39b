"""The role {src} of the site: links to lines of source files, and what it refuses."""

import io
import re
import sys
from pathlib import Path

import pytest
from sphinx.testing.util import SphinxTestApp

ROOT = Path(__file__).parents[3]
GOOD = {
    "ultrascale_jax/train_step/zero.py#reduce_gradients": "def reduce_gradients(",
    "ultrascale_jax/config/run.py#Config.mesh": "    mesh:",
    "ultrascale_jax/hooks.py#Hook.after_step": "    def after_step(",
    "ultrascale_jax/config/mesh.py#AXES": "AXES = ",
}
BAD = {
    "ultrascale_jax/train_step/zero.py#reduce": "zero.py defines no 'reduce'",
    "ultrascale_jax/hooks.py#Hook.after_steps": "hooks.py defines no 'Hook.after_steps'; near it: after_step",
    "ultrascale_jax/zeros.py": "the repository has no file ultrascale_jax/zeros.py",
    "../README.md": "the repository has no file ../README.md",
    "Makefile#docs": "Makefile is not Python: leave '#docs' out",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> tuple[Path, str, str]:
    """Build a page with every link; return the site's folder, the page and the warnings."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    (folder / "deep").mkdir(parents=True)
    extensions = "['myst_parser', 'extensions.source_links']"
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r})"
    (folder / "conf.py").write_text(f"{path}\nextensions = {extensions}\nhtml_theme = 'basic'\n")
    (folder / "index.md").write_text("# Index\n\n```{toctree}\ndeep/page\n```\n")
    links = [f"{{src}}`{target}`" for target in [*GOOD, *BAD, "Makefile", "the words <Makefile>"]]
    links += [f"`{path}`" for path in ("sharding/rules.py", "sharding/rulez.py", "own/code.py")]
    (folder / "deep" / "page.md").write_text("# Page\n\n" + "\n\n".join(links))
    warnings = io.StringIO()
    before = sys.path.copy()
    app = SphinxTestApp(srcdir=folder, freshenv=True, warning=warnings)
    app.build()
    app.cleanup()
    sys.path[:] = before
    return Path(app.outdir), Path(app.outdir, "deep/page.html").read_text(), warnings.getvalue()


@pytest.mark.parametrize("target", GOOD)
def test_a_link_leads_to_the_line_that_defines_the_name(site, target):
    folder, page, _ = site
    address = re.search(rf'href="([^"]*)" title="{re.escape(target)}"', page)[1]
    file, _, anchor = address.partition("#")
    code = folder.joinpath("deep", file).read_text()
    line = code.split(f'<span id="{anchor}">')[1].split("\n")[0]
    assert GOOD[target] in re.sub("<[^>]*>", "", line)


@pytest.mark.parametrize("target", BAD)
def test_a_wrong_file_or_name_is_a_warning(site, target):
    assert f"{{src}}`{target}`: {BAD[target]}" in site[2]


def test_words_may_replace_the_name(site):
    assert re.search(r'href="[^"]*/Makefile.html" title="Makefile">.*>Makefile<', site[1])
    assert ">the words</span></a>" in site[1]


def test_a_path_in_backquotes_is_a_link_and_must_exist_where_its_folder_does(site):
    folder, page, warnings = site
    (address,) = re.findall(r'href="([^"]*)" title="sharding/rules.py"', page)
    assert "def act(" in re.sub("<[^>]*>", "", folder.joinpath("deep", address).read_text())
    assert "`sharding/rulez.py`: the repository has no such file" in warnings
    assert warnings.count("WARNING") == len(BAD) + 1
