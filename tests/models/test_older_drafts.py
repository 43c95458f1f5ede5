"""Draft folders that earlier versions wrote load as they are, for the target that they name, and compute the same.

`drafts_written_before` holds one folder a method, and what each network gave for `states` below when it was written.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch

from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.drafts.longspec import LongSpec, plan_queries

FOLDER = Path(__file__).with_name("drafts_written_before")
OUTPUTS = json.loads((FOLDER / "outputs.json").read_text())
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHAPE = {"hidden_size": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "intermediate_size": 12}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_folder_of_an_earlier_version(name, tiny_target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a target with other weights
        draft = load_draft(FOLDER / name, tiny_target(rope=LLAMA3, **SHAPE))
    hidden = torch.linspace(-1, 1, 72).reshape(9, 8)
    if isinstance(draft, LongSpec):
        kv = hidden[:, :4].reshape(9, 1, 4)
        states = draft.states(hidden, torch.arange(90, 99), kv, kv, plan_queries([0, 4, 9], [1, 3], 8))
    else:
        states = torch.cat(draft.states(hidden))
    torch.testing.assert_close(states[-1], torch.tensor(OUTPUTS[name]), rtol=1e-5, atol=2e-6)
    restricted = name in ("silu_chain", "longspec")
    assert (None if draft.token_ids is None else draft.token_ids.tolist()) == (
        [90, 4, 17, 3, 66] if restricted else None
    )
    info = read_info(FOLDER / name)
    assert (info.train_length, info.step, info.noise) == (24, 20, 3 if name == "longspec" else None)
    assert info.tree["levels"] == [3, 2] and info.tree["choice_rates"] == [[0.5, 0.2, 0.1], [0.25, 0.125, 0.0]]
    assert info.target["name"] == "tiny-0" and info.train_config == {"seed": 1, "train": {"steps": 20}}
