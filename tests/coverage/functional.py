"""Operators and layers: attention, recurrence, convolution, sparse reads, random draws, losses."""

from __future__ import annotations

from typing import Any

import torch
from tests.coverage.case import ROWS, WIDTH, Batch, Family, mean_square, small
from torch import Tensor, nn
from torch.nn import functional

from trainload.capture.job import Loss

FAMILY = Family("functional")
add = FAMILY.add
TIME = 6
HEADS = 2


def sequences(model: nn.Module) -> tuple[nn.Module, Batch, Any]:
    """(model, batch, loss) over (rows, TIME, WIDTH)."""
    return model, {"x": torch.randn(ROWS, TIME, WIDTH)}, mean_square


class Over(nn.Module):
    """forward is a function of (model, x); parts are given by name."""

    def __init__(self, function: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self, x)
        return out


def attention(dropout: float = 0.0, **options: Any) -> tuple[nn.Module, Batch, Any]:
    """Scaled dot-product attention of one projection with itself."""

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in model.project(x).chunk(3, -1))
        p = dropout if model.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=p, **options).transpose(1, 2).flatten(2)

    return sequences(Over(forward, project=nn.Linear(WIDTH, 3 * WIDTH)))


# Attention.


@add("sdpa")
def _() -> Any:
    return attention()


@add("sdpa, causal")
def _() -> Any:
    return attention(is_causal=True)


@add("sdpa with a boolean mask")
def _() -> Any:
    return attention(attn_mask=torch.ones(TIME, TIME, dtype=torch.bool).tril())


@add("sdpa with an additive mask")
def _() -> Any:
    return attention(attn_mask=torch.randn(TIME, TIME))


@add("sdpa with dropout")
def _() -> Any:
    return attention(dropout=0.2)


@add("sdpa, causal with dropout")
def _() -> Any:
    return attention(dropout=0.2, is_causal=True)


@add("sdpa with grouped queries")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        q = model.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in model.rest(x).chunk(2, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    return sequences(Over(forward, query=nn.Linear(WIDTH, 16), rest=nn.Linear(WIDTH, 16)))


@add("attention with a mask from the batch")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            mask = (torch.arange(TIME) < lengths.unsqueeze(1))[:, None, None, :]
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"], batch["lengths"]).square().flatten(1).mean(1).mean()
        return out

    return Model(), {"x": torch.randn(ROWS, TIME, WIDTH), "lengths": torch.tensor([3, 6, 4, 5])}, loss


@add("sdpa_kernel context")
def _() -> Any:
    """The choice of a kernel is a matter of the machine; the value is the same."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward(model: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in model.project(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return sequences(Over(forward, project=nn.Linear(WIDTH, 3 * WIDTH)))


@add("MultiheadAttention")
def _() -> Any:
    return sequences(
        Over(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True))
    )


@add("MultiheadAttention without weights")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        return model.attention(x, x, x, need_weights=False)[0]

    return sequences(Over(forward, attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)))


@add("MultiheadAttention, time first")
def _() -> Any:
    """The batch is the middle of a merged dim inside torch's own code."""

    def forward(model: Any, x: Tensor) -> Tensor:
        t = x.transpose(0, 1)
        return model.attention(t, t, t)[0].transpose(0, 1)

    return sequences(Over(forward, attention=nn.MultiheadAttention(WIDTH, HEADS)))


class _Padded(nn.Module):
    """Takes x and a mask of padding."""

    def __init__(self, part: nn.Module, call: Any) -> None:
        super().__init__()
        self.part = part
        self.call = call

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.call(self.part, x, padding)
        return out


def padded(part: nn.Module, call: Any) -> tuple[nn.Module, Batch, Any]:
    """(model, batch, loss) with a key padding mask; the loss counts what is not padding."""

    def loss(model: nn.Module, batch: Batch) -> Loss:
        kept = (~batch["padding"]).float().unsqueeze(-1)
        out = model(batch["x"], batch["padding"])
        return Loss((out.square() * kept).sum() / kept.sum(), weight=kept.sum())

    padding = torch.arange(TIME) >= torch.tensor([4, 6, 5, 3]).unsqueeze(1)
    return _Padded(part, call), {"x": torch.randn(ROWS, TIME, WIDTH), "padding": padding}, loss


@add("MultiheadAttention with key padding")
def _() -> Any:
    part = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return padded(part, lambda p, x, padding: p(x, x, x, key_padding_mask=padding)[0])


@add("TransformerEncoder with key padding")
def _() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.1, batch_first=True)
    return padded(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), lambda p, x, padding: p(x, src_key_padding_mask=padding))


@add("TransformerEncoder, norm first, gelu")
def _() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu")
    return sequences(nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)))


@add("Transformer, encoder and decoder")
def _() -> Any:
    part = nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(TIME)
    return sequences(Over(lambda m, x: m.part(x, x, tgt_mask=mask, tgt_is_causal=True), part=part))


# Recurrence.


@add("LSTM")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, WIDTH, batch_first=True)))


@add("LSTM, two layers, bidirectional")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, 4, 2, bidirectional=True, batch_first=True)))


@add("LSTM with dropout between layers")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)))


@add("LSTM with projection")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.LSTM(WIDTH, 12, proj_size=WIDTH, batch_first=True)))


@add("LSTM over packed sequences", gap="torch.export has no packed sequences; padded ones with a mask work")
def _() -> Any:
    """The number of steps of each row is in the batch."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out: Tensor = self.part(packed)[1][0][-1]
            return out

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"], batch["lengths"]).square().mean(1).mean()
        return out

    return Model(), {"x": torch.randn(ROWS, TIME, WIDTH), "lengths": torch.tensor([3, 6, 4, 5])}, loss


@add("GRU")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.GRU(WIDTH, WIDTH, batch_first=True)))


@add("GRU, bidirectional, time first")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x.transpose(0, 1))[0].transpose(0, 1), part=nn.GRU(WIDTH, 4, bidirectional=True)))


@add("RNN with relu")
def _() -> Any:
    return sequences(Over(lambda m, x: m.part(x)[0], part=nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True)))


@add("LSTMCell in a loop")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        for t in range(TIME):
            h, c = model.part(x[:, t], (h, c))
        return h

    return sequences(Over(forward, part=nn.LSTMCell(WIDTH, WIDTH)))


# Convolution and images.


def images(*layers: nn.Module) -> tuple[nn.Module, Batch, Any]:
    """(model, batch, loss) of a stack over (rows, 3, 8, 8)."""
    return nn.Sequential(*layers), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("a convolutional classifier")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    stack = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5),
    )  # fmt: skip
    return stack, {"x": torch.randn(ROWS, 3, 8, 8), "y": torch.tensor([0, 1, 2, 3])}, loss


@add("transposed convolution and PixelShuffle")
def _() -> Any:
    return images(nn.ConvTranspose2d(3, 8, 3, stride=2), nn.PixelShuffle(2), nn.AvgPool2d(2))


@add("Conv1d and Conv3d")
def _() -> Any:
    return images(nn.Flatten(2), nn.Conv1d(3, 4, 5), nn.Unflatten(2, (3, 4, 5)), nn.Conv3d(4, 2, 2))


@add("Unfold and Fold")
def _() -> Any:
    return images(nn.Conv2d(3, 3, 1), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2))


@add("interpolate and grid_sample")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        grid = model.grid(x.flatten(1)).view(-1, 8, 8, 2).tanh()
        return functional.interpolate(functional.grid_sample(x, grid, align_corners=False), scale_factor=2.0, mode="bilinear")

    return Over(forward, grid=nn.Linear(192, 128)), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("affine_grid", gap="torch's own backward of affine_grid takes no size that changes; with a fixed batch size it is captured")
def _() -> Any:
    def forward(model: Any, x: Tensor) -> Tensor:
        theta = model.theta(x.flatten(1)).view(-1, 2, 3)
        return functional.grid_sample(x, functional.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    return Over(forward, theta=nn.Linear(192, 6)), {"x": torch.randn(ROWS, 3, 8, 8)}, mean_square


@add("channels_last")
def _() -> Any:
    model, batch, loss = images(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    return model.to(memory_format=torch.channels_last), batch, loss  # type: ignore[call-overload]  # its stubs lack this one


# Random draws.


@add("Dropout")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.Dropout(0.3))


@add("Dropout in place")
def _() -> Any:
    return small(lambda model, x: model.part(x * 1.0), part=nn.Dropout(0.3, inplace=True))


@add("Dropout2d")
def _() -> Any:
    return images(nn.Conv2d(3, 6, 3), nn.Dropout2d(0.3), nn.Conv2d(6, 2, 3))


@add("AlphaDropout")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.AlphaDropout(0.3))


@add("FeatureAlphaDropout")
def _() -> Any:
    return images(nn.Conv2d(3, 6, 3), nn.FeatureAlphaDropout(0.3), nn.Conv2d(6, 2, 3))


@add("RReLU")
def _() -> Any:
    return small(lambda model, x: model.part(x), part=nn.RReLU())


@add("dropout of a value with the batch inside")
def _() -> Any:
    """(time, rows, width): masks belong to rows."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.part(functional.dropout(x.transpose(0, 1), 0.3, model.training)).transpose(0, 1)

    return sequences(Over(forward, part=nn.Linear(WIDTH, WIDTH)))


@add("dropout of parameters")
def _() -> Any:
    """As DropConnect: one mask for the whole batch."""

    def middle(model: Any, x: Tensor) -> Tensor:
        return functional.linear(x, functional.dropout(model.first.weight, 0.3, model.training))

    return small(middle)


@add("gumbel_softmax")
def _() -> Any:
    return small(lambda model, x: functional.gumbel_softmax(x, tau=0.7) if model.training else x.softmax(-1))


@add("gumbel_softmax, hard")
def _() -> Any:
    return small(lambda model, x: functional.gumbel_softmax(x, hard=True) if model.training else x.softmax(-1))


@add("a variational autoencoder")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(WIDTH, 8)
            self.decoder = nn.Linear(4, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log_variance = self.encoder(x).chunk(2, -1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
            return self.decoder(z), mean, log_variance

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        out, mean, log_variance = model(batch["x"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        result: Tensor = ((out - batch["x"]).square().sum(1) + divergence).mean()
        return result

    return Model(), {"x": torch.randn(ROWS, WIDTH)}, loss


@add("a diffusion step")
def _() -> Any:
    """Draws a time for each row (randint) and noise (randn_like)."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch["x"]
        if model.training:
            t, noise = torch.randint(0, 100, (x.shape[0],)), torch.randn_like(x)
        else:
            t, noise = torch.full((x.shape[0],), 50), torch.ones_like(x)
        level = (t.float() / 100).unsqueeze(1)
        out: Tensor = (model(x * (1 - level) + noise * level) - noise).square().mean(1).mean()
        return out

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("torch.distributions")
def _() -> Any:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        mean, scale = model(batch["x"]).chunk(2, -1)
        distribution = torch.distributions.Normal(mean, functional.softplus(scale) + 0.1, validate_args=False)
        value = distribution.rsample() if model.training else distribution.mean
        return -distribution.log_prob(value.detach()).mean(1).mean() + value.square().mean(1).mean()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("multinomial")
def _() -> Any:
    """REINFORCE: an action is drawn for each row."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["x"])
        action = torch.multinomial(logits.softmax(-1), 1) if model.training else logits.argmax(-1, keepdim=True)
        return -(functional.log_softmax(logits, -1).gather(1, action).squeeze(1) * action.squeeze(1).float()).mean()

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


@add("randperm", mixes_rows=True)
def _() -> Any:
    """A shuffle of features."""
    return small(lambda model, x: x + x[:, torch.randperm(WIDTH)] if model.training else x)


@add("poisson", gap="its draws have no stateless form yet")
def _() -> Any:
    return small(lambda model, x: x + torch.poisson(x.detach().abs()) if model.training else x)


@add("noise in evaluation too")
def _() -> Any:
    """As in a variational autoencoder whose validation loss is drawn."""
    return small(lambda _, x: x + 0.1 * torch.randn_like(x))


@add("bernoulli masks")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            return x
        return x * torch.bernoulli(torch.full_like(x, 0.7)) + torch.empty_like(x).bernoulli_(0.5)

    return small(middle)


@add("mixup", mixes_rows=True)
def _() -> Any:
    """Rows are mixed with their neighbours by a drawn factor."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rows = batch["x"].shape[0]
        factor = torch.rand(rows, 1) if model.training else torch.full((rows, 1), 0.5)
        x = factor * batch["x"] + (1 - factor) * batch["x"].flip(0)
        return mean_square(model, {"x": x})

    model, batch, _ = small(lambda _, x: x.relu())
    return model, batch, loss


# Indexing and shapes.


@add("einsum")
def _() -> Any:
    return small(lambda model, x: torch.einsum("bi,ij,bj->bj", x, model.first.weight, x))


@add("fft")
def _() -> Any:
    return small(lambda _, x: torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 0.5, n=WIDTH, dim=-1))


@add("complex values")
def _() -> Any:
    return small(lambda _, x: (torch.view_as_complex(x.view(-1, 4, 2).contiguous()) * 1j).abs().repeat(1, 2))


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
        return x.sort(-1)[0] + values.sum(-1, keepdim=True) + functional.one_hot(x.argmax(-1), WIDTH) * places.sum(-1, keepdim=True)

    return small(middle)


@add("bucketize and searchsorted")
def _() -> Any:
    return small(
        lambda model, x: x + model.table(torch.bucketize(x.detach(), torch.linspace(-1, 1, 6))).squeeze(-1), table=nn.Embedding(7, 1)
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
        return torch.cat([b, a], -1).roll(1, -1) + torch.cat([d, c], -1).flip(-1) + torch.stack([x, x.cos()]).sum(0)

    return small(middle)


@add("cumsum, cumprod, logcumsumexp")
def _() -> Any:
    return small(lambda _, x: x.cumsum(-1) + x.sigmoid().cumprod(-1) + x.logcumsumexp(-1))


@add("linear algebra")
def _() -> Any:
    def middle(model: Any, x: Tensor) -> Tensor:
        w = model.first.weight
        positive = w @ w.t() + torch.eye(WIDTH)
        return torch.linalg.solve(positive, x.t()).t() + torch.linalg.cholesky(positive).diagonal() + torch.logdet(positive)

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


@add("sparse embedding gradients", refused="the gradient is a sparse tensor, which neither a bucket nor a package can hold")
def _() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Embedding(20, WIDTH, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.one(x).sum(1)
            return out

    return Model(), {"x": torch.randint(0, 20, (ROWS, 5))}, mean_square


@add("Embedding with max_norm", refused="forward writes to the table: the step would change a parameter beside the optimizer")
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
        each = (functional.silu, functional.mish, functional.elu, functional.hardswish, functional.softsign, functional.logsigmoid)
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

    return small(middle, router=nn.Linear(WIDTH, 4), experts=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


# Losses.


def classified(loss: Any, classes: int = 5, **more: Tensor) -> tuple[nn.Module, Batch, Any]:
    """(model, batch, loss): a linear classifier; `loss(logits, batch)`."""
    stack = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, classes))
    batch = {"x": torch.randn(ROWS, WIDTH), "y": torch.tensor([0, 3, 2, 1]), **more}
    return stack, batch, lambda model, b: loss(model(b["x"]), b)


@add("cross entropy with label smoothing")
def _() -> Any:
    return classified(lambda logits, b: functional.cross_entropy(logits, b["y"], label_smoothing=0.1))


@add("cross entropy with class weights and ignore_index")
def _() -> Any:
    """The mean is over weights, which the loss says."""
    table = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.7])

    def loss(logits: Tensor, b: Batch) -> Loss:
        weight = torch.where(b["y"] == 2, torch.zeros(()), table[b["y"]]).sum()
        return Loss(functional.cross_entropy(logits, b["y"], weight=table, ignore_index=2), weight=weight)

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
        return Loss(value, weight=b["w"].sum(), metrics={"accuracy": (logits.argmax(-1) == b["y"]).float().mean()})

    return classified(loss, w=torch.tensor([0.5, 1.0, 1.5, 2.0]))


@add("regression losses")
def _() -> Any:
    def loss(out: Tensor, b: Batch) -> Tensor:
        return sum(
            (f(out, b["t"]) for f in (functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss, functional.mse_loss)),
            torch.zeros(()),
        )

    return classified(loss, t=torch.randn(ROWS, 5))


@add("binary cross entropy with logits")
def _() -> Any:
    weights = torch.rand(5)
    return classified(
        lambda out, b: functional.binary_cross_entropy_with_logits(out, b["t"], pos_weight=weights), t=torch.rand(ROWS, 5).round()
    )


@add("Kullback-Leibler divergence from a teacher")
def _() -> Any:
    return classified(
        lambda out, b: functional.kl_div(functional.log_softmax(out / 2, -1), b["t"].softmax(-1), reduction="batchmean") * 4,
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
        each = functional.ctc_loss(logits, batch["y"], batch["frames"], batch["letters"], reduction="none")
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
