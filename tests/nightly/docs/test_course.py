"""Every block of the course prints what its page says; `make test` runs a tenth of the commands."""

import pytest

from scripts import course


@pytest.mark.parametrize("page", course.find_pages(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_print_what_it_says(page):
    course.check(page)
