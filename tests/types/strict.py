# pyright: strict
"""A user's file in strict mode: nothing of Slalom is unknown. Read by `tests/core/test_types.py`.

It has no line that a strict checker complains of.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float

import slalom as sl

Model = dict[str, Array]
key = jax.random.key(0)
x: Float[Array, " 3"] = jax.random.normal(key, (3,))
model: Model = {"w": x, "b": x[0]}


def loss_fn(model: Model, x: Float[Array, " 3"]) -> Float[Array, ""]:
    return model["w"] @ x + model["b"]


def aux_fn(model: Model, x: Float[Array, " 3"]) -> tuple[Array, Array]:
    return loss_fn(model, x), x


schedule = sl.schedules.warmup_cosine_decay(0.0, 1e-3, warmup_steps=10, decay_steps=100)
tx = sl.ClipByGlobalNorm(1.0) | sl.adamw(schedule, weight_decay=0.1).every_k(2).if_finite()
grouped = sl.adam(1e-3).partition({sl.where.path("b"): sl.sgd(0.1)}).mask(sl.where.everything())
kept = tx.store("int8").write("master").average(0.9).record()
b1 = tx[sl.ScaleByAdam].b1
first = tx[0]
clip = tx["clip_by_global_norm"]

opt = sl.Optimizer(tx, model)
model, opt = opt.step(model, model, value=x[0], key=key)
updates, opt = opt.update(model, model)
model = sl.apply_updates(model, updates)
opt = opt.with_hyperparams(weight_decay=0.2)
opt = opt.reset(model)
opt, report = opt.rebind(model, tx=kept)
print(report, opt.describe(model), opt.count, opt.has_updated, opt.loss_scale)
evaluated = opt.eval_params(model, full_precision=True)
rate = opt.hyperparams["learning_rate"]
metrics = opt.metrics.to_dict()
state = opt.state_of(sl.ScaleByAdam)

step = sl.train_step(loss_fn, donate="all", microbatches=None)
model, opt, loss = step(model, opt, x)
number = float(loss)
step_with_aux = sl.train_step(aux_fn, has_aux=True)
model, opt, (loss, aux) = step_with_aux(model, opt, x)


@sl.train_step
def decorated(model: Model, x: Float[Array, " 3"]) -> Float[Array, ""]:
    return loss_fn(model, x)


@sl.train_step(has_weight=True, compute_dtype="bfloat16")
def weighted(model: Model, x: Float[Array, " 3"]) -> tuple[Array, Array]:
    return loss_fn(model, x), x[0]


model, opt, loss = decorated(model, opt, x)
model, opt, (loss, weight) = weighted(model, opt, x)

sl.checkpoint.save("run.slalom", model=model, opt=opt)
loaded = sl.checkpoint.load("run.slalom", model=model, opt=opt)
found = sl.sweep(loss_fn, tx, model, [(x,)], {"learning_rate": [1e-3, 1e-2]}, steps=1)
losses = found.losses
tested = sl.lr_range_test(loss_fn, tx, model, [(x,)])
print(tested)


class LastState(eqx.Module):
    last: sl.Updates = sl.fields.param_like()


class Repeat(sl.AbstractTransform[LastState]):
    share: sl.fields.Number = sl.fields.hyperparameter(0.5)

    def init(self, params: sl.Params) -> LastState:
        return LastState(sl.tree.zeros_like(params))

    def update(
        self,
        updates: sl.Updates,
        state: LastState,
        params: sl.Params | None = None,
        context: sl.Context | None = None,
    ) -> tuple[sl.Updates, LastState]:
        return state.last, LastState(updates)
