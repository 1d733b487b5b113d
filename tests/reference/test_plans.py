"""Plans on real numbers against Hugging Face transformers, under every policy."""

import numpy as np
import pytest

from tests.wafer_emu.numeric_cases import TINY, policy_of
from wafer_emu.check import compare_values
from wafer_emu.emulation import emulate
from wafer_emu.model import Model
from wafer_emu.weights import Weights
from wafer_emu.workload import Workload

torch = pytest.importorskip("torch", reason="the extra 'reference' is not installed")
transformers = pytest.importorskip("transformers", reason="the extra 'reference' is not installed")

from tests.reference.test_transformers import SMALL, TOKENS, peer  # noqa: E402, F401

TOLERANCE = 2e-5
POLICIES = ("gpipe", "uniform", "terapipe", "lbcp", "mbkr", "mocap", "layerwise")


def test_logits_of_every_policy(peer, tmp_path):  # noqa: F811
    peer.save_pretrained(tmp_path)
    ids = np.random.default_rng(7).integers(0, SMALL["vocab_size"], TOKENS).tolist()
    with torch.no_grad():
        expected = peer(torch.tensor(ids)[None], use_cache=False).logits[0].numpy()
    model = Model.from_hf(tmp_path)
    weights = dict(Weights.open(tmp_path, model))
    for policy in POLICIES:
        run = emulate(
            TINY, model, Workload.single(TOKENS), policy_of(policy), numbers=weights,
            token_ids=ids, logits="all", stages=3, chunks=4,
        )  # fmt: skip
        errors = compare_values(run.logits, expected, TOLERANCE)
        assert errors["max_relative_error"] <= TOLERANCE, policy
        assert errors["argmax_equal"], policy
        if policy in ("mbkr", "mocap"):
            assert run.summary["reallocated_bytes"] > 0
