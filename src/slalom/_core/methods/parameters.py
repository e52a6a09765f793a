"""Methods that write the parameters, or keep others to evaluate."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...tree.types import Hyperparameter, WhereLike
from ..protocol.parts import AbstractDeclared
from ..text.calls import advise_methods
from ..text.messages import library

if TYPE_CHECKING:
    import slalom

# Every `self` here is an `AbstractTransform`: see `fluent.py`.
# pyright: reportArgumentType=false


@advise_methods
class AbstractParameterMethods(AbstractDeclared):
    """Methods that write the parameters, or keep others to evaluate."""

    def mechanize(
        self,
        weight_decay: Hyperparameter = 1e-2,
        eps: Hyperparameter = 1e-8,
        s_init: Hyperparameter = 1e-6,
        num_betas: int = 6,
    ) -> "slalom.wrappers.Mechanize":
        """Learns a scale of this transform's updates while training (Mechanic).

        **Arguments:**

        - `weight_decay`: λ, the coefficient of a weight decay that only Mechanic sees, ≥ 0.
        - `eps`: ε, a small number that keeps divisors positive, > 0.
        - `s_init`: s₀, the first scale, > 0.
        - `num_betas`: n, the number of decays that it chooses from, an int ≥ 1.

        **Returns:** a transform.
        """
        return library.wrappers.Mechanize(self, weight_decay, eps, s_init, num_betas)

    def outer(
        self, optimizer: "slalom.AbstractTransform", every: int, reset_state: bool = False
    ) -> "slalom.wrappers.Outer":
        """Keeps slow weights, which another optimizer steps towards this transform's parameters.

        **Arguments:**

        - `optimizer`: the transform that makes the slow steps, such as
            `sl.sgd(0.7, momentum=0.9, nesterov=True)`. Rules and wrappers that use the loss are
            refused, since its gradient is not that of the loss.
        - `every`: the number of fast steps between two slow ones, an int ≥ 1.
        - `reset_state`: whether to reset this transform's state after each slow step. As with
            `opt.reset(model)`, moments start from scratch, and step counts continue. The state of
            `optimizer` stays.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        return library.wrappers.Outer(self, optimizer, every, reset_state)

    def lookahead(
        self, sync_period: int, slow_step_size: Hyperparameter, reset_state: bool = False
    ) -> "slalom.wrappers.Outer":
        """Keeps slow weights that move towards this transform's parameters every few steps.

        This is `tx.outer(sl.sgd(slow_step_size), sync_period)`.

        **Arguments:**

        - `sync_period`: k, the number of fast steps between two slow ones, an int ≥ 1.
        - `slow_step_size`: α, the fraction of the way to the fast weights that the slow weights
            move, in [0, 1].
        - `reset_state`: whether to reset this transform's state after each slow step. As with
            `opt.reset(model)`, moments start from scratch, and step counts continue.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the slow weights.
        """
        from ...wrappers.parameters.outer import lookahead

        return lookahead(self, sync_period, slow_step_size, reset_state)

    def average(
        self, decay: Hyperparameter | None = None, debias: bool = True
    ) -> "slalom.wrappers.Average":
        """Keeps an average of the parameters that this transform produces.

        **Arguments:**

        - `decay`: d, the decay of an exponential average, in [0, 1), or
            `sl.schedules.power_average(sigma_rel)`. Defaults to a uniform average.
        - `debias`: whether the exponential average is corrected for its start at zero. If not, it
            starts at the first parameters.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        return library.wrappers.Average(self, decay, debias)

    def schedule_free(
        self,
        b1: Hyperparameter = 0.9,
        weight_lr_power: Hyperparameter = 2.0,
        r: Hyperparameter = 0.0,
        state_dtype: Any | None = None,
        *,
        average_after: int = 0,
        polyak: bool = False,
        polyak_beta: Hyperparameter | None = None,
        weight_decay: Hyperparameter | None = None,
        decay_where: WhereLike | None = None,
    ) -> "slalom.wrappers.ScheduleFree":
        """Averages the iterates of this transform, in place of a decaying learning rate.

        **Arguments:**

        - `b1`: β₁, the weight of the average in the parameters at which gradients are taken, in
            (0, 1]. With a schedule, they are written with the value of each step.
        - `weight_lr_power`: p, the power of the learning rate that weights the steps in the
            average, ≥ 0. With 0 the learning rate has no influence.
        - `r`: the power of the step that weights them, ≥ 0. Positive values give late steps more
            weight.
        - `state_dtype`: the floating dtype of the iterates; complex parameters use its complex
            counterpart. Defaults to the parameter's dtype, but at least float32.
        - `average_after`: the number of first steps that the average leaves out, an int ≥ 0. The
            authors recommend one or two times the length of the warm-up of the learning rate.
        - `polyak`: whether the size of a step is computed from the loss, which must be passed as
            `value`. The learning rate of this transform then multiplies it, and is 1 in the paper.
        - `polyak_beta`: the decay of an exponential average of ‖g‖₁, in [0, 1), by which `polyak`
            divides. Defaults to no average.
        - `weight_decay`: λ, ≥ 0, of a decay that also follows the learning rate: γ²·λ. The paper
            uses 20 to 50 with `polyak`. Defaults to none.
        - `decay_where`: which parameters decay: a selector, a function or a tree. Defaults to all.

        **Returns:** a transform, which must be the last link of a chain.
        `opt.eval_params(model)` returns the model with the average.
        """
        return library.wrappers.ScheduleFree(
            self,
            b1,
            weight_lr_power,
            r,
            state_dtype,
            average_after=average_after,
            polyak=polyak,
            polyak_beta=polyak_beta,
            weight_decay=weight_decay,
            decay_where=decay_where,
        )

    def project(
        self, fn: Callable[..., Any], where: WhereLike | None = None
    ) -> "slalom.AbstractTransform":
        """Projects the parameters after each step of this transform.

        Onto a smooth set, such as `sl.projections.sphere()`, it also projects gradients and updates
        onto the tangent.

        **Arguments:**

        - `fn`: a function from a tree of parameters to a tree like it, such as those of
            `sl.projections`. It receives all selected parameters, in at least float32 (complex
            ones as complex arrays), and `None` at the others.
        - `where`: which parameters: a selector, a function or a tree of bools. Defaults to all.

        **Returns:** a transform, which must be the last link of a chain.
        """
        from ...wrappers.parameters.schedule_free import project

        return project(self, fn, where)
