"""Architectures: what a network is, before and after its size is known.

A user writes `SupportNet(size="XS", depth=4)` or `KeyNet(...)`; with n keys of dimension d in c cells it
becomes an `Architecture`, from which both the torch module and the numpy runtime are built.

Notation of the paper: L hidden layers of width h, n_x of the L - 1 later ones see the input again, and

    z_1     = s(W_0^x u + b_0)                         in R^h
    z_{i+1} = s(W_i^z z_i + W_i^x u + b_i) [+ z_i]     W_i^x only where injected; + z_i if residual
    out     = W_L z_L + b_L                            in R^{d_out}

with d_out = c for SupportNet and c d for KeyNet. u is x / ||x||: SupportNet's output is multiplied by
||x|| again, which makes it positively 1-homogeneous, and KeyNet's answer does not depend on ||x||, as the
true top key does not.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amips.arguments import check_choice, check_flag, check_number, check_whole, refused
from amips.errors import RunError

MOST_LAYERS = 1000  # a file may state any number, and layers are listed one by one
SIZES = {"XS": 0.01, "S": 0.05, "M": 0.10, "L": 0.20, "XL": 0.40, "XXL": 0.50}

Homogeneous = Literal["wrapper", "relu"]
NonNegative = Literal["penalty", "clip", "softplus"]


@dataclass(frozen=True)
class Architecture:
    """A network whose every dimension is known."""

    kind: Literal["support", "key"]
    d: int
    c: int
    width: int
    depth: int
    injected: tuple[int, ...]  # hidden layers among 1..L-1 that see the input again
    residual: bool = False
    alpha: float = 0.1
    beta: float = 20.0  # math.inf: the leaky ReLU itself
    homogeneous: Homogeneous = "wrapper"
    nonnegative: NonNegative = "penalty"

    def __post_init__(self) -> None:
        for name in ("d", "c", "width"):
            check_whole(name, getattr(self, name), 1, error=RunError)
        check_whole("depth", self.depth, 1, MOST_LAYERS, error=RunError)
        rising = list(self.injected) == sorted(set(self.injected))
        if not rising or not all(0 < i < self.depth for i in self.injected):
            raise RunError(f"injected={self.injected}: expected some of 1 to {self.depth - 1}, rising")
        check_flag("residual", self.residual, error=RunError)
        _check_activation(self.alpha, self.beta)
        check_choice("kind", self.kind, ("support", "key"), error=RunError)
        check_choice("homogeneous", self.homogeneous, Homogeneous, error=RunError)
        check_choice("nonnegative", self.nonnegative, NonNegative, error=RunError)

    @property
    def outputs(self) -> int:
        """d_out: c scores for SupportNet, c keys of dimension d for KeyNet."""
        return self.c if self.kind == "support" else self.c * self.d

    @property
    def biases(self) -> bool:
        """SupportNet made homogeneous by ReLU has none."""
        return not (self.kind == "support" and self.homogeneous == "relu")

    @property
    def parameters(self) -> int:
        """(1 + n_x) d h + (L - 1) h^2 + h d_out + L h + d_out, the last two only with biases."""
        h, L = self.width, self.depth
        weights = (1 + len(self.injected)) * self.d * h + (L - 1) * h * h + h * self.outputs
        return weights + (L * h + self.outputs if self.biases else 0)

    @property
    def score_flops(self) -> int:
        """FLOPs for all c scores of one query: one multiply-add counts 2."""
        h, L = self.width, self.depth
        forward = (1 + len(self.injected)) * self.d * h + (L - 1) * h * h + h * self.outputs
        return 2 * (forward + (self.c * self.d if self.kind == "key" else 0))

    def key_flops(self, cells: int | None = None) -> int:
        """FLOPs for the predicted keys of `cells` cells (all c when None) of one query.

        KeyNet's forward pass gives them. SupportNet needs one reverse pass for each: W_i^z and W_i^x
        transposed, without the rest of the head.
        """
        h, L = self.width, self.depth
        if self.kind == "key":
            return self.score_flops - 2 * self.c * self.d
        reverse = (1 + len(self.injected)) * self.d * h + (L - 1) * h * h
        return self.score_flops + 2 * reverse * (self.c if cells is None else cells)

    @property
    def floats(self) -> int:
        """About how many numbers a forward pass holds at once for one query: the output and the layers."""
        return self.outputs + (self.depth + 4) * self.width

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        values = asdict(self)
        values["injected"] = list(self.injected)
        values["beta"] = "inf" if math.isinf(self.beta) else self.beta
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Architecture":
        """The inverse of `to_json`; raises RunError on anything else."""
        try:
            known = dict(values)
            known["injected"] = tuple(int(i) for i in known["injected"])
            known["beta"] = float(known["beta"])
            return cls(**known)
        except (TypeError, KeyError, ValueError, RunError) as problem:
            raise RunError(f"not a description of an architecture: {problem}") from None


@dataclass(frozen=True)
class _Spec:
    """What SupportNet and KeyNet have in common; see there.

    Args:
        size: XS 1 %, S 5 %, M 10 %, L 20 %, XL 40 %, XXL 50 % of n d parameters, or a fraction.
        depth: hidden layers L.
        inject: how many of the L - 1 later layers see the input again (n_x), "all", or "every 4".
        residual: z_{i+1} = z_i + s(...) in hidden layers.
        alpha, beta: of the soft leaky ReLU a x + (1 - a) / b log(1 + exp(b x)); beta may be math.inf.
        width: h itself, instead of a size.
    """

    size: str | float = "XS"
    depth: int = 4
    inject: int | str = "all"
    residual: bool = False
    alpha: float = 0.1
    beta: float = 20.0
    width: int | None = None
    kind: Literal["support", "key"] = field(default="support", init=False, repr=False)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "depth": check_whole("depth", self.depth, 1, MOST_LAYERS, error=RunError),
            "residual": check_flag("residual", self.residual, error=RunError),
        }
        values["alpha"], values["beta"] = _check_activation(self.alpha, self.beta)
        if self.width is not None:
            values["width"] = check_whole("width", self.width, 1, error=RunError)
        if not isinstance(self.size, str):
            what = f"one of {', '.join(SIZES)}, or a fraction of n d"
            values["size"] = check_number("size", self.size, above=0, most=1, what=what, error=RunError)
        self.fraction()
        injected_layers(self.inject, values["depth"])
        values["inject"] = self.inject if isinstance(self.inject, str) else int(self.inject)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def fraction(self) -> float:
        """rho, the share of n d that the parameters may take."""
        if isinstance(self.size, str):
            if self.size.upper() not in SIZES:
                raise refused("size", self.size, f"one of {', '.join(SIZES)}, or a fraction of n d", RunError)
            return SIZES[self.size.upper()]
        return self.size

    def architecture(self, n: int, d: int, c: int) -> Architecture:
        """This network for n keys of dimension d in c cells."""
        injected = injected_layers(self.inject, self.depth)
        width = self.width or hidden_width(self.fraction() * n * d, d, self.depth, len(injected))
        own: dict[str, Any] = {}
        if isinstance(self, SupportNet):
            own = {"homogeneous": self.homogeneous, "nonnegative": self.nonnegative}
        relu = own.get("homogeneous") == "relu"
        alpha, beta = (0.0, math.inf) if relu else (self.alpha, self.beta)
        return Architecture(
            self.kind, d, c, width, self.depth, injected, self.residual, alpha=alpha, beta=beta, **own
        )


@dataclass(frozen=True)
class SupportNet(_Spec):
    """An input-convex network with c outputs, f(x)_j ~ sigma_j(x); its gradients are the predicted keys.

    Args:
        homogeneous: "wrapper" computes ||x|| g(x / ||x||); "relu" has no biases and a plain ReLU.
        nonnegative: how W_i^z >= 0 is kept: "penalty" (the paper's, loosely), "clip" after each update,
            or "softplus" of a free matrix. The head W_L must be non-negative too, and is: clipped under
            "penalty" and "clip", rectified under "softplus".
    """

    homogeneous: Homogeneous = "wrapper"
    nonnegative: NonNegative = "penalty"
    kind: Literal["support", "key"] = field(default="support", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("homogeneous", self.homogeneous, Homogeneous, error=RunError)
        check_choice("nonnegative", self.nonnegative, NonNegative, error=RunError)


@dataclass(frozen=True)
class KeyNet(_Spec):
    """A network with c x d outputs, F(x)_j ~ the top key of cell j; its scores are <F(x)_j, x>.

    Args:
        mapper: predict one key, the top key of all, whatever cells the task has. With a routing loss in the
            recipe it is trained through their centroids, so that the predicted key routes well.
    """

    inject: int | str = 0
    mapper: bool = False
    kind: Literal["support", "key"] = field(default="key", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mapper", check_flag("mapper", self.mapper, error=RunError))

    def architecture(self, n: int, d: int, c: int) -> Architecture:
        """This network for n keys of dimension d in c cells."""
        return super().architecture(n, d, 1 if self.mapper else c)


def injected_layers(inject: int | str, depth: int) -> tuple[int, ...]:
    """The layers among 1..L-1 that see the input again.

    A count n_x is spread evenly and always includes the last layer; "every r" means r, 2r, ...; "all"
    means every one.
    """
    if isinstance(inject, str):
        if inject == "all":
            return tuple(range(1, depth))
        word, _, number = inject.partition(" ")
        if word != "every" or not number.isdecimal() or int(number) < 1:
            raise RunError(f"inject={inject!r}: expected a count, 'all' or 'every R' (R layers apart)")
        return tuple(range(int(number), depth, int(number)))
    inject = check_whole("inject", inject, 0, depth - 1, error=RunError)
    return tuple((i + 1) * (depth - 1) // inject for i in range(inject))


def hidden_width(budget: float, d: int, depth: int, injections: int) -> int:
    """h from the parameter budget P: the positive root of (L - 1) h^2 + D h = P, D = (1 + n_x) d."""
    D = (1 + injections) * d
    if depth == 1:
        return max(1, round(budget / D))
    return max(1, round((math.sqrt(D * D + 4 * (depth - 1) * budget) - D) / (2 * (depth - 1))))


def _check_activation(alpha: Any, beta: Any) -> tuple[float, float]:
    return (
        check_number("alpha", alpha, least=0, most=1, error=RunError),
        check_number("beta", beta, above=0, infinite=True, error=RunError),
    )
