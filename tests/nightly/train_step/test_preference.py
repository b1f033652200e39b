"""IPO and SFT as TRL has them, and DPO in every precision."""

import math

import numpy as np
import pytest

from tests.runs import change
from tests.trl import CFG, compare_with_trl, expected, losses
from ultrascale_jax.config.dpo import Dpo


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8_rowwise", "fp8_block"])
def test_a_policy_that_is_its_reference_has_no_reward_in_any_precision(precision):
    found = losses(change(CFG, train={"dpo": Dpo(beta=0.1), "precision": precision}))
    assert found["loss"][0] == pytest.approx(math.log(2), rel=1e-6)
    assert found["reward_chosen"][0] == found["reward_rejected"][0] == 0
    np.testing.assert_allclose(found["loss"], expected()["sigmoid_loss"], rtol=0.03)


@pytest.mark.parametrize(
    ("name", "dpo"), [("ipo", Dpo(beta=0.1, loss="ipo")), ("sft", Dpo())], ids=["ipo", "sft"]
)
def test_four_steps_on_fsdp_x_tp_have_the_losses_and_rewards_of_trl(name, dpo):
    compare_with_trl(name, dpo)
