"""Figures of schedules and metrics: matplotlib without pyplot."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slalom as sl
from helpers import after_steps

matplotlib = pytest.importorskip("matplotlib")
S = sl.schedules
PNG = b"\x89PNG\r\n\x1a\n"


def params():
    return {"b": jnp.ones(2), "w": jnp.ones((3, 2))}


def data(axes):
    """The points of each line."""
    return [np.stack(line.get_data()) for line in axes.lines]


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.slow
def test_schedules_are_plotted_by_their_paths_with_a_line_at_the_next_step():
    schedule = S.linear(1.0, 0.0, 4)
    (axes,) = schedule.plot(6).axes
    ((steps, values),) = data(axes)
    np.testing.assert_array_equal(steps, np.arange(6))
    np.testing.assert_array_equal(values, schedule.values(6))
    assert axes.figure._repr_png_().startswith(PNG)  # so that it shows in a notebook

    tx = sl.adamw(S.linear(1.0, 0.0, 4), weight_decay=lambda step: 0.1 * step.astype(float))
    figure = sl.Optimizer(tx, params()).plot_schedules(5)
    assert titles(figure) == [
        "add_decayed_weights.weight_decay",
        "scale_by_learning_rate.learning_rate",
    ]
    decay, rate = (data(axes)[0][1] for axes in figure.axes)
    np.testing.assert_allclose(decay, 0.1 * np.arange(5), rtol=1e-6)
    np.testing.assert_allclose(rate, [1, 0.75, 0.5, 0.25, 0])
    k = S.piecewise_constant(2.0, {3: 2.0})  # that of a window is plotted too
    figure = sl.Optimizer(sl.sgd(0.1).every_k(k), params()).plot_schedules(5)
    assert titles(figure) == ["every_k.k"]
    np.testing.assert_array_equal(data(figure.axes[0])[0][1], k.values(5))

    opt = sl.Optimizer(sl.sgd(S.linear(1.0, 0.0, 4)).every_k(2), params())
    assert len(opt.plot_schedules(5).axes[0].lines) == 1
    _, opt = after_steps(opt, 5, params(), params())
    _, mark = opt.plot_schedules(5).axes[0].lines
    assert set(mark.get_xdata()) == {2}


def recorded(n=3):
    model, history = params(), []
    opt = sl.Optimizer((sl.Clip(1.0) | sl.sgd(S.linear(1.0, 0.0, 9))).record(), model)
    for _ in range(n):
        model, opt = opt.step(model, params())
        history.append(opt.metrics)
    return history


def test_metrics_are_plotted_by_their_names_from_any_form_of_history():
    history = recorded()
    figure = sl.plot_metrics(history)
    assert titles(figure) == [  # the gradients and the bound of the clipping never change
        "record.update_norm",
        "record.param_norm",
        "record.scale_by_learning_rate.learning_rate",
    ]
    ((steps, values),) = data(figure.axes[1])
    np.testing.assert_array_equal(steps, [0, 1, 2])
    np.testing.assert_array_equal(values, [float(m["param_norm"]) for m in history])

    history = recorded()
    for other in (
        [metrics.to_dict() for metrics in history],
        jax.tree.map(lambda *x: jnp.stack(x), *history),
    ):
        ours, theirs = sl.plot_metrics(history), sl.plot_metrics(other)
        assert titles(ours) == titles(theirs)
        for left, right in zip(ours.axes, theirs.axes, strict=True):
            np.testing.assert_allclose(data(left), data(right), rtol=1e-6)


def test_names_and_positions_place_lines_also_of_runs_and_flags():
    history = [{"a.norm": 1.0, "a.loss": 2.0, "b.loss": 3.0, "still": 1.0}] * 2
    assert titles(sl.plot_metrics(history, ["norm", "still"])) == ["a.norm", "still"]
    assert titles(sl.plot_metrics(history, ["**.loss", "a.loss"])) == ["a.loss", "b.loss"]
    assert titles(sl.plot_metrics(history)) == list(history[0])  # nothing changes

    history = [
        {"step": 10, "loss": 3.0},
        {"step": 20, "loss": 2.0, "accuracy": 0.5},
        {"step": 40, "loss": 1.0, "accuracy": 0.75},
    ]
    figure = sl.plot_metrics(history)
    np.testing.assert_array_equal(data(figure.axes[0]), [[[10, 20, 40], [3, 2, 1]]])
    np.testing.assert_array_equal(data(figure.axes[1]), [[[20, 40], [0.5, 0.75]]])

    losses = jnp.array([[1.0, 2.0], [jnp.inf, 3.0], [5.0, 4.0]])
    (axes,) = sl.plot_metrics({"loss": losses}).axes
    first, second = data(axes)
    np.testing.assert_array_equal(first[1], [1, np.nan, 5])
    np.testing.assert_array_equal(second[1], [2, 3, 4])

    history = {"norm": [1.0, 1e-3], "loss": [2.0, 1.0], "signed": [-1.0, 1e4]}
    assert [ax.get_yscale() for ax in sl.plot_metrics(history).axes] == ["log", "linear", "linear"]

    history = {"x": jnp.ones(2, jnp.bfloat16).at[0].set(0.5), "flag": np.array([True, False])}
    left, right = sl.plot_metrics(history).axes
    np.testing.assert_array_equal(data(left)[0][1], [0.5, 1])
    np.testing.assert_array_equal(data(right)[0][1], [1, 0])


def test_figures_touch_no_global_state(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    assert S.constant(1.0).plot(3)._repr_png_().startswith(PNG)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for plot in (
        lambda: S.constant(1.0).plot(3),
        lambda: sl.Optimizer(sl.sgd(S.constant(1.0)), params()).plot_schedules(3),
        lambda: sl.plot_metrics({"loss": [1.0]}),
        lambda: sl.LRRangeTestResult(np.array([1.0]), np.array([1.0]), False).plot(),
        lambda: sl.SweepResult({"a": np.array([1.0])}, np.array([[1.0]])).plot(),
    ):
        with pytest.raises(ImportError, match=r"plot.* needs matplotlib: pip install matplotlib\."):
            plot()
