"""Indexing, shapes, linear algebra and losses."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, Over, mean_square, sequences, small
from torch import Tensor, nn
from torch.nn import functional

from trainload.capture.job.definition import Loss

FAMILY = Family("functional")
add = FAMILY.add


# Indexing and shapes.


@add("einsum")
def _() -> Any:
    return small(lambda model, x: torch.einsum("bi,ij,bj->bj", x, model.first.weight, x))


@add("fft")
def _() -> Any:
    return small(lambda _, x: torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 0.5, n=WIDTH, dim=-1))


@add("complex values")
def _() -> Any:
    return small(
        lambda _, x: (torch.view_as_complex(x.view(-1, 4, 2).contiguous()) * 1j).abs().repeat(1, 2)
    )


@add("index_put")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, torch.tensor([0, 2, 4])] = x[:, :3]
        y[:, 1] += x[:, 0]
        return y + x

    return small(middle)


@add("scatter_add and gather")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        place = torch.arange(WIDTH).flip(0).expand(x.shape[0], WIDTH) // 2
        return torch.zeros_like(x).scatter_add(1, place, x) + x.gather(1, place)

    return small(middle)


@add("index_add over nodes of a graph")
def _() -> Any:
    """Message passing on a graph for each row."""

    def forward(model: Any, x: Tensor) -> Tensor:
        source, target = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
        return model.part(torch.zeros_like(x).index_add(1, target, x[:, source]))

    return sequences(Over(forward, part=nn.Linear(WIDTH, WIDTH)))


@add("topk, sort, argmax")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        values, places = x.topk(3, -1)
        return (
            x.sort(-1)[0]
            + values.sum(-1, keepdim=True)
            + functional.one_hot(x.argmax(-1), WIDTH) * places.sum(-1, keepdim=True)
        )

    return small(middle)


@add("bucketize and searchsorted")
def _() -> Any:
    return small(
        lambda model, x: (
            x + model.table(torch.bucketize(x.detach(), torch.linspace(-1, 1, 6))).squeeze(-1)
        ),
        table=nn.Embedding(7, 1),
    )


@add("views written in place")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :2].mul_(2.0)
        y.view(-1)[0:1].add_(0.0)
        y.t()[3].sin_()
        return y

    return small(middle)


@add("in-place operators")
def _() -> Any:
    return small(lambda _, x: x.clone().add_(1.0).mul_(0.5).relu_())


@add("chunk, split, cat, stack, roll, flip")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, d = x.split([3, 5], -1)
        return (
            torch.cat([b, a], -1).roll(1, -1)
            + torch.cat([d, c], -1).flip(-1)
            + torch.stack([x, x.cos()]).sum(0)
        )

    return small(middle)


@add("cumsum, cumprod, logcumsumexp")
def _() -> Any:
    return small(lambda _, x: x.cumsum(-1) + x.sigmoid().cumprod(-1) + x.logcumsumexp(-1))


@add("linear algebra")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        w = model.first.weight
        positive = w @ w.t() + torch.eye(WIDTH)
        return (
            torch.linalg.solve(positive, x.t()).t()
            + torch.linalg.cholesky(positive).diagonal()
            + torch.logdet(positive)
        )

    return small(middle)


@add("Embedding and EmbeddingBag")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(20, WIDTH, padding_idx=0)
            self.bag = nn.EmbeddingBag(20, WIDTH, mode="mean")

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x).sum(1) + self.bag(x)

    return Model(), {"x": torch.randint(0, 20, (ROWS, 5))}, mean_square


@add(
    "sparse embedding gradients",
    refused="the gradient is a sparse tensor, which neither a bucket nor a package can hold",
)
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x).sum(1)
            return out

    return Model(), {"x": torch.randint(0, 20, (ROWS, 5))}, mean_square


@add(
    "Embedding with max_norm",
    refused="forward writes to the table: the step would change a parameter beside the optimizer",
)
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(20, WIDTH, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x).sum(1)
            return out

    return Model(), {"x": torch.randint(0, 20, (ROWS, 5))}, mean_square


@add("activations")
def _() -> Any:
    def middle(_: Any, x: Tensor) -> Tensor:
        each = (
            functional.silu,
            functional.mish,
            functional.elu,
            functional.hardswish,
            functional.softsign,
            functional.logsigmoid,
        )
        return torch.stack([f(x) for f in each]).sum(0) + functional.glu(torch.cat([x, x], -1))

    return small(middle)


@add("a mixture of experts by masks")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        weights, places = model.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(model.experts):
            out = out + expert(x) * (weights * (places == index)).sum(-1, keepdim=True)
        return out

    return small(
        middle,
        router=nn.Linear(WIDTH, 4),
        experts=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
    )


# Losses.


def classified(loss: Any, classes: int = 5, **more: Tensor) -> tuple[nn.Module, Batch, Any]:
    """Return (model, batch, loss) of a linear classifier; the loss is `loss(logits, batch)`."""
    stack = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, classes))
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.tensor([0, 3, 2, 1]), **more}
    return stack, batch, lambda model, b: loss(model(b["x"]), b)


@add("cross entropy with label smoothing")
def _() -> Any:
    return classified(
        lambda logits, b: functional.cross_entropy(logits, b["y"], label_smoothing=0.1)
    )


@add("cross entropy with class weights and ignore_index")
def _() -> Any:
    """The mean is over weights, which the loss says."""
    table = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7])

    def loss(logits: Tensor, b: Batch) -> Loss:
        weight = torch.where(b["y"] == 2, torch.zeros(()), table[b["y"]]).sum()
        return Loss(
            functional.cross_entropy(logits, b["y"], weight=table, ignore_index=2), weight=weight
        )

    return classified(loss)


@add("focal loss")
def _() -> Any:
    def loss(logits: Tensor, b: Batch) -> Tensor:
        each = functional.cross_entropy(logits, b["y"], reduction="none")
        return ((1 - (-each).exp()).square() * each).mean()

    return classified(loss)


@add("loss with weight and metrics")
def _() -> Any:
    def loss(logits: Tensor, b: Batch) -> Loss:
        each = functional.cross_entropy(logits, b["y"], reduction="none")
        value = (each * b["w"]).sum() / b["w"].sum()
        return Loss(
            value,
            weight=b["w"].sum(),
            metrics={"accuracy": (logits.argmax(-1) == b["y"]).float().mean()},
        )

    return classified(loss, w=torch.tensor([0.5, 1.0, 1.5, 2.0]))


@add("regression losses")
def _() -> Any:
    def loss(out: Tensor, b: Batch) -> Tensor:
        return sum(
            (
                f(out, b["t"])
                for f in (
                    functional.smooth_l1_loss,
                    functional.huber_loss,
                    functional.l1_loss,
                    functional.mse_loss,
                )
            ),
            torch.zeros(()),
        )

    return classified(loss, t=torch.randn(ROWS, 5))


@add("binary cross entropy with logits")
def _() -> Any:
    weights = torch.rand(5)
    return classified(
        lambda out, b: functional.binary_cross_entropy_with_logits(out, b["t"], pos_weight=weights),
        t=torch.rand(ROWS, 5).round(),
    )


@add("Kullback-Leibler divergence from a teacher")
def _() -> Any:
    return classified(
        lambda out, b: (
            functional.kl_div(
                functional.log_softmax(out / 2, -1), b["t"].softmax(-1), reduction="batchmean"
            )
            * 4
        ),
        t=torch.randn(ROWS, 5),
    )


@add("triplet and cosine losses")
def _() -> Any:
    def loss(out: Tensor, b: Batch) -> Tensor:
        near = functional.triplet_margin_loss(out, b["t"], b["u"])
        return near + functional.cosine_embedding_loss(out, b["t"], (b["y"] > 1).float() * 2 - 1)

    return classified(loss, t=torch.randn(ROWS, 5), u=torch.randn(ROWS, 5))


@add("contrastive loss within the batch", mixes_rows=True)
def _() -> Any:
    def loss(out: Tensor, b: Batch) -> Tensor:
        left = functional.normalize(out, dim=-1)
        right = functional.normalize(b["t"], dim=-1)
        return functional.cross_entropy(left @ right.t() / 0.1, torch.arange(out.shape[0]))

    return classified(loss, t=torch.randn(ROWS, 5))


@add("ctc_loss")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            return functional.log_softmax(self.part(x), -1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"]).transpose(0, 1)
        each = functional.ctc_loss(
            logits, batch["y"], batch["frames"], batch["letters"], reduction="none"
        )
        return each.mean()

    batch = {
        "x": torch.randn(ROWS, 12, WIDTH),
        "y": torch.randint(1, 5, (ROWS, 4)),
        "frames": torch.tensor([12, 10, 11, 12]),
        "letters": torch.tensor([4, 3, 2, 4]),
    }
    return Model(), batch, loss


@add("a policy-gradient loss with clipping")
def _() -> Any:
    def loss(logits: Tensor, b: Batch) -> Tensor:
        now = functional.log_softmax(logits, -1).gather(1, b["y"].unsqueeze(1)).squeeze(1)
        ratio = (now - b["before"]).exp()
        return -torch.minimum(ratio * b["gain"], ratio.clamp(0.8, 1.2) * b["gain"]).mean()

    return classified(loss, before=-torch.rand(ROWS) - 1, gain=torch.randn(ROWS))
