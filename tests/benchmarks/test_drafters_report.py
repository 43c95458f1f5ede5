"""The picture of a run shows two quantities on two axes, and only what was measured."""

import pytest
from matplotlib.figure import Figure

from longdraft.benchmarks.drafters.text_report import _draw_agreement, _draw_loss, _heldout, _training

RATES = [[0.2, 0.1, 0.1], [0.1, 0.1, 0.0]]


def heldout(step: int, loss: float | None) -> dict:
    return {"step": step, "heldout_loss": loss, "heldout_rank_rates": None if loss is None else RATES}


@pytest.mark.parametrize(
    ("objectives", "axes"),
    [
        (["cross_entropy", "cross_entropy"], 1),  # the same quantity as the held-out one
        (["kl", "kl"], 2),
        (["kl", "overlap"], 2),  # after train.kl_steps
        ([None, None], 2),  # recorded before it was
        ([], 1),  # nothing but validations
    ],
)
def test_what_is_minimised_has_an_axis_of_its_own(objectives, axes):
    figure = Figure()
    training = [{"step": i, "loss": 3.0 - i} | ({"objective": one} if one else {}) for i, one in enumerate(objectives)]
    _draw_loss(figure.subplots(), training, [heldout(1, 20.0), heldout(2, 19.0)])
    assert len(figure.axes) == axes
    assert all(one in figure.axes[0].get_ylabel() for one in objectives if one)
    assert "cross" in figure.axes[-1].get_ylabel()
    assert list(figure.axes[-1].lines[-1].get_ydata()) == [20.0, 19.0]


def test_a_validation_without_labels_is_not_drawn():
    metrics = [{"step": 1, "loss": None}, heldout(1, None), heldout(2, 19.0)]
    assert [record["step"] for record in _heldout(metrics)] == [2]
    assert "19.00" in _training(metrics)[0] and _training(metrics[:2]) == []
    _draw_agreement(Figure().subplots(), [], [])
