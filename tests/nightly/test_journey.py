"""The tutorial `examples/journey.sh` goes from a text to a chat."""

import os
import re
import subprocess
import sys

from tests.paths import ROOT
from tests.runs import step_rows


def test_the_journey_from_a_text_to_a_chat(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    env |= {"PYTHON": sys.executable, "STEPS": "60", "TUNE_STEPS": "60"}
    command = ["bash", str(ROOT / "examples" / "journey.sh"), str(tmp_path / "journey")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\$ kill -9 \d+\n", done.stdout)
    assert re.search(r"resumed from \S+/out/base/checkpoints/\d+", done.stdout)
    base, tuned = (step_rows(tmp_path / "journey/out" / name) for name in ("base", "tuned"))
    assert [row["step"] for row in tuned] == list(range(1, 61)) and base[-1]["step"] == 60
    assert base[-1]["loss"] < base[0]["loss"] - 3 and tuned[-1]["loss"] < tuned[0]["loss"] - 1
    before, after = re.findall(r"│ talks *│ *[\d,]+ │ *([\d.]+) │", done.stdout)
    assert float(after) < float(before) - 1
    assert "logits differ by" in done.stdout or "transformers reads config" in done.stdout
    assert "the capital of" in done.stdout.rpartition("$ ultrascale generate")[2]
