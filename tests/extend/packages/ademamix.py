"""AdEMAMix: AdamW with a second, slow momentum (Pagliardini et al. 2024, arXiv 2409.03137, section 3)."""

from math import sqrt

from phalanx import extend

STATE = tuple(map(extend.StateKind, ("exp_avg", "exp_avg_slow", "exp_avg_sq")))
OPTIONS = {
    "alpha": extend.ExtraOption(5.0, "weight of the slow momentum", extend.Interval(0)),
    "beta3": extend.ExtraOption(0.9999, "decay of the slow momentum", extend.Interval(0, below=1)),
}
MOVED = 112
"""Bytes per parameter of the kernels in `rule`: momenta (24), second moment (20), its root (24), their sum (20), the
weight (24)."""


def rule(groups, config):
    """Makes the torch optimizer when a run begins: torch is not imported before."""
    import torch

    from phalanx.train.optimizers.rule import UpdateRule

    own = extend.optimizer_options(config)

    class AdEMAMix(UpdateRule):
        def update(self, parameter, shard, group):
            state = self.state[parameter]
            if not state:
                state |= {kind.kind: torch.zeros_like(parameter) for kind in STATE} | {"step": torch.tensor(0.0)}
            state["step"] += 1
            (beta1, beta2), step, lr = config.betas, state["step"].item(), group["lr"]
            bias1, bias2 = 1 - beta1**step, sqrt(1 - beta2**step)
            for w, g, *momenta in self.chunks(1, parameter, *(state[kind.kind] for kind in STATE)):
                fast, slow, square = momenta
                fast.lerp_(g, 1 - beta1)
                slow.lerp_(g, 1 - own["beta3"])
                square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                root = square.sqrt().div_(bias2).add_(config.eps)
                direction = (fast / bias1).add_(slow, alpha=own["alpha"])
                w.mul_(1 - lr * group["weight_decay"]).addcdiv_(direction, root, value=-lr)

    return AdEMAMix(groups, {"lr": config.lr})


def register():
    extend.optimizer(
        "ademamix",
        extend.OptimizerEntry(
            "AdamW with a second, slow momentum",
            "Pagliardini et al. 2024, section 3",
            rule=rule,
            state=lambda config, name, shape: STATE,
            moved=lambda config, name, shape: MOVED,
            options=("betas", "eps"),
            defaults={"betas": (0.9, 0.999)},
            extra_options=OPTIONS,
        ),
    )
