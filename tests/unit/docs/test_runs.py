"""The playbook's runs as the explorer of chapter 12 reads them: whole, and no text that could end their element."""

import csv
import io
import math

from docs.extensions.runs import RUNS, explorer

SETTINGS = ("nodes", "dp", "tp", "pp", "mbs", "gas", "zero")
MEASURED = ("mfu_pct", "tok_s_gpu", "mem_gb")


def test_the_explorer_has_every_run_with_its_settings_and_all_or_no_measurements():
    html = explorer()
    table = html.partition('id="runs-csv">\n')[2].removesuffix("</script>")
    assert table == RUNS.read_text() and "<" not in table and '"' not in table
    runs = list(csv.DictReader(io.StringIO(table)))
    failed = 0
    for run in runs:
        assert all(int(run[name]) >= 0 for name in SETTINGS)
        assert 8 * int(run["nodes"]) == int(run["dp"]) * int(run["tp"]) * int(run["pp"])
        missing = {math.isnan(float(run[name])) for name in MEASURED}
        assert len(missing) == 1
        failed += missing.pop()
    assert (len(runs), failed) == (1643, 616)
